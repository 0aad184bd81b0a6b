"""Limits of a token on three levels: its own, its account's, the daemon's. Pure."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from inferencecenter.core.addresses import peer_address

MAX_COUNT: Final = 10**12


def _network(value: str) -> str:
    ip_network(value, strict=False)
    return value


Network = Annotated[str, AfterValidator(_network)]
_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class AccessLimits(BaseModel):
    """Limits of a token, unless its account or the token overrides them; without a value there is no limit."""

    # Which fields are set matters: one set to None removes the limit of the level below.
    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(None, ge=1, le=MAX_COUNT, description="Maximum number of turns per minute.")
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of prefilled and generated tokens per minute; a turn may exceed it, and the "
        "next one waits until the excess is regained.",
    )
    tokens_per_day: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of prefilled and generated tokens per day; days begin at midnight UTC. A turn"
        " that uses the last of them ends.",
    )
    concurrent_turns: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Maximum number of running and waiting turns."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=10**9, description="Maximum number of tokens per answer, also if the request sets none."
    )
    models: tuple[_ModelName, ...] | None = Field(
        None, max_length=256, description="Names of the models that may be used."
    )
    addresses: tuple[Network, ...] | None = Field(
        None, max_length=256, description="Addresses or networks from which the token is accepted."
    )

    def over(self, below: AccessLimits) -> AccessLimits:
        """Return the effective limits: the values set here, and the others from the level ``below``."""
        given = self.given()
        return below.model_copy(update=given) if given else below

    def given(self) -> dict[str, Any]:
        """Return the values that are set, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def allows_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def allows_address(self, address: str) -> bool:
        """Return whether ``address`` may connect; text that is not an address is in no network."""
        if self.addresses is None:
            return True
        found = peer_address(address)
        return found is not None and any(found in ip_network(each, strict=False) for each in self.addresses)


NO_LIMITS: Final = AccessLimits()
