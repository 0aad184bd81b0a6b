"""Which models are in memory: whoever wants to be loaded asks here, and others make way where there is no room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

_log = structlog.get_logger(__name__)


class Tenant(Protocol):
    """A model's engine, as far as its place in memory is concerned."""

    @property
    def name(self) -> str:
        """The model."""

    @property
    def wanted(self) -> bool:
        """Whether it still wants to be loaded."""

    @property
    def holds_memory(self) -> bool:
        """Whether it is loaded, or about to be, or on its way out."""

    @property
    def busy(self) -> bool:
        """Whether it has turns."""

    @property
    def last_used_s(self) -> float:
        """When it was asked last."""

    async def make_way(self) -> None:
        """Give up its memory; returns when it has."""


_Tenant = TypeVar("_Tenant", bound=Tenant)


class Residency(Generic[_Tenant]):
    """Lets engines be loaded one after the other, in the order in which they ask.

    What does not fit beside the others takes the place of the model that was used longest ago, of an idle one if there
    is one. A model for which there is never as much room as it would like is let in when it is alone: its plan does
    with what there is.

    Args:
        max_resident: Models loaded at once; 0 for as many as fit.
        fits: Whether a model fits beside others that are loaded; raises why, if it never will.
        changed: Called when ``waits`` has another answer.
    """

    def __init__(
        self,
        *,
        max_resident: int,
        fits: Callable[[_Tenant, Sequence[_Tenant]], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        self._max_resident = max_resident
        self._fits = fits
        self._changed = changed
        self._tenants: list[_Tenant] = []
        self._one_at_a_time = asyncio.Lock()
        self._waiting: _Tenant | None = None

    def waits(self, tenant: _Tenant) -> bool:
        """Tell whether another model is making way for ``tenant``."""
        return tenant is self._waiting

    def add(self, tenant: _Tenant) -> None:
        """Take in a model that may want to be loaded."""
        self._tenants.append(tenant)

    def remove(self, tenant: _Tenant) -> None:
        """Forget a model whose engine is gone for good."""
        self._tenants.remove(tenant)

    async def admit(self, tenant: _Tenant) -> bool:
        """Wait until ``tenant`` may be loaded; ``False`` if it does not want to any more.

        Raises:
            InferenceCenterError: Why it fits nowhere; nobody has made way for it then.
        """
        async with self._one_at_a_time:
            while tenant.wanted:
                others = [each for each in self._tenants if each is not tenant and each.holds_memory]
                has_room = await self._has_room(tenant, others)
                if has_room or not others:
                    return tenant.wanted
                leaving = min(others, key=lambda each: (each.busy, each.last_used_s))
                _log.info("model_makes_way", model=leaving.name, wanted=tenant.name, busy=leaving.busy)
                self._wait(tenant)
                try:
                    await leaving.make_way()
                finally:
                    self._wait(None)
            return False

    async def _has_room(self, tenant: _Tenant, others: Sequence[_Tenant]) -> bool:
        fits = await self._fits(tenant, others)
        return fits and not (self._max_resident and len(others) >= self._max_resident)

    def _wait(self, tenant: _Tenant | None) -> None:
        self._waiting = tenant
        self._changed()
