"""What one token may use, on three levels: its own, its account's, the daemon's. Pure."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

MAX_COUNT: Final = 10**12


def _network(value: str) -> str:
    ipaddress.ip_network(value, strict=False)
    return value


Network = Annotated[str, AfterValidator(_network)]
_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class AccessLimits(BaseModel):
    """What a token may use, unless its account or the token itself says otherwise; what is not set has no limit."""

    # Which fields are set counts: one that is set to None takes the limit of the level below away.
    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Turns that a token may ask for in any minute."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Tokens a minute, prompts that had to be read and answers; what a turn takes beyond it has to be "
        "regained before the next one.",
    )
    tokens_per_day: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Tokens a day, likewise; days begin at midnight UTC. A turn that uses up the last of them ends.",
    )
    concurrent_turns: int | None = Field(None, ge=1, le=MAX_COUNT, description="Turns that run or wait at once.")
    max_tokens: int | None = Field(
        None, ge=1, le=10**9, description="Tokens that one answer may have, also where none are asked for."
    )
    models: tuple[_ModelName, ...] | None = Field(None, max_length=256, description="Models that may be used, by name.")
    addresses: tuple[Network, ...] | None = Field(
        None, max_length=256, description="Addresses or networks that the token is taken from."
    )

    def over(self, below: AccessLimits) -> AccessLimits:
        """Return what holds: what is set here, and for the rest what the level ``below`` says."""
        return below.model_copy(update=self.given())

    def given(self) -> dict[str, Any]:
        """Return what is set, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def allows_model(self, name: str) -> bool:
        """Tell whether a model may be used."""
        return self.models is None or name in self.models

    def allows_address(self, address: str) -> bool:
        """Tell whether somebody may come from ``address``; what is no address is in no network."""
        if self.addresses is None:
            return True
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in ipaddress.ip_network(each, strict=False) for each in self.addresses)


NO_LIMITS: Final = AccessLimits()
