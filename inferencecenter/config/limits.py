"""Limits of a token at three levels: of the token, of its account, of the daemon. Pure."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from inferencecenter.core.addresses import addresses_of

MAX_COUNT: Final = 10**12


def _network(value: str) -> str:
    ip_network(value, strict=False)
    return value


Network = Annotated[str, AfterValidator(_network)]
_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class AccessLimits(BaseModel):
    """Limits of each token; an account or a token may override them. A limit that is not set does not apply."""

    # A field that is set to None removes the limit of the level below; a field that is not set inherits it.
    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(None, ge=1, le=MAX_COUNT, description="Maximum number of turns per minute.")
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of prefilled and generated tokens per minute; a turn may exceed it, and further "
        "turns are refused until the excess has been recovered.",
    )
    tokens_per_day: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of prefilled and generated tokens per day; days begin at midnight UTC. A turn"
        " that reaches it ends.",
    )
    concurrent_turns: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Maximum number of running and waiting turns."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=10**9, description="Maximum number of tokens per answer, also if the request sets no maximum."
    )
    models: tuple[_ModelName, ...] | None = Field(
        None, max_length=256, description="Names of the models that may be used."
    )
    addresses: tuple[Network, ...] | None = Field(
        None, max_length=256, description="Addresses or networks from which the token is accepted."
    )

    def over(self, below: AccessLimits) -> AccessLimits:
        """Merge with the level ``below``: values that are set here override it."""
        given = self.given()
        return below.model_copy(update=given) if given else below

    def given(self) -> dict[str, Any]:
        """Return the limits that are set, ``None`` included, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def allows_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def allows_address(self, address: str) -> bool:
        """Return whether ``address`` may connect; a text that is not an address may not if addresses are limited.

        A peer on the Unix socket may if a loopback address may: it is a program on this machine.
        """
        if self.addresses is None:
            return True
        networks = [ip_network(each, strict=False) for each in self.addresses]
        return any(peer in network for peer in addresses_of(address) for network in networks)


NO_LIMITS: Final = AccessLimits()
