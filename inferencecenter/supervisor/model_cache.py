"""Which models are in memory: a model asks before it is loaded, and others make way where there is no room.

Clients share the memory. Of the models that ask, the one goes first whose client was served longest ago: a client that
asks for many keeps the model of another waiting for one of them. And a model that others use is not evicted before it
has been loaded for a while: a client that names models in turn gets no more than each of the others, and not all time
is spent on loading. A client that alone uses what is loaded waits for nothing, and an operator's load for neither.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

_MAX_SERVED: Final = 1000
"""Clients of which it is known when they were served; those before them count as never served."""

_log = structlog.get_logger(__name__)


class ResidentModel(Protocol):
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

    @property
    def clients(self) -> frozenset[str]:
        """Who waits for it to be loaded, as far as that is known."""

    @property
    def users(self) -> frozenset[str]:
        """Whose turns it has run since it was loaded."""

    @property
    def loaded_at_s(self) -> float | None:
        """When it was loaded, now for one that is being loaded; ``None`` where it is neither."""

    @property
    def is_urgent(self) -> bool:
        """Whether an operator wants it loaded."""

    def delay(self, seconds: float) -> None:
        """Tell the turns that wait for it how long the others keep their place at least."""

    async def evict(self) -> None:
        """Give up its memory; returns when it has."""


_Tenant = TypeVar("_Tenant", bound=ResidentModel)


class ModelCache(Generic[_Tenant]):
    """Lets engines be loaded one after the other.

    What does not fit beside the others takes the place of the model that was used longest ago, of an idle one if there
    is one. A model for which there is never as much room as it would like is let in when it is alone: its plan does
    with what there is.

    Args:
        max_resident: Models loaded at once; 0 for as many as fit.
        min_residency_s: Seconds for which a model that was loaded makes no way for clients other than its users.
        fits: Whether a model fits beside others that are loaded; raises why, if it never will.
        changed: Called when ``waits`` has another answer.
        monotonic: Seconds that only rise.
    """

    def __init__(
        self,
        *,
        max_resident: int,
        min_residency_s: float,
        fits: Callable[[_Tenant, Sequence[_Tenant]], Awaitable[bool]],
        changed: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_resident = max_resident
        self._min_residency_s = min_residency_s
        self._fits = fits
        self._changed = changed
        self._monotonic = monotonic
        self._tenants: list[_Tenant] = []
        self._line: list[_Tenant] = []
        self._admitting = False
        self._waiting: _Tenant | None = None
        # By client: the number of the admission that served it last.
        self._served: dict[str, int] = {}
        self._admissions = 0
        self._news = asyncio.Event()

    def waits(self, tenant: _Tenant) -> bool:
        """Tell whether another model is making way for ``tenant``."""
        return tenant is self._waiting

    def add(self, tenant: _Tenant) -> None:
        """Take in a model that may want to be loaded."""
        self._tenants.append(tenant)

    def remove(self, tenant: _Tenant) -> None:
        """Forget a model whose engine is gone for good."""
        self._tenants.remove(tenant)

    def reevaluate(self) -> None:
        """Take note that a model has been loaded or has gone, or that another client wants one."""
        self._news.set()
        self._news.clear()

    async def admit(self, tenant: _Tenant) -> bool:
        """Wait until ``tenant`` may be loaded; ``False`` if it does not want to any more.

        Raises:
            InferenceCenterError: Why it fits nowhere; nobody has made way for it then.
        """
        self._line.append(tenant)
        self.reevaluate()
        try:
            while tenant.wanted:
                wait_s = None
                if not self._admitting and self._next() is tenant:
                    wait_s = await self._try(tenant)
                    if not wait_s:
                        break
                await self._wait_for_news(wait_s)
        finally:
            self._line.remove(tenant)
            self.reevaluate()
        if tenant.wanted:
            self._note_served(tenant)
        return tenant.wanted

    def _next(self) -> _Tenant:
        """Return whose turn it is of those in the line, of which the one that asks is one."""
        wanted = [each for each in self._line if each.wanted]
        return min(wanted, key=lambda each: (not each.is_urgent, self._last_served(each)))

    def _last_served(self, tenant: _Tenant) -> int:
        return min(self._served.get(client_id, 0) for client_id in tenant.clients or {""})

    def _note_served(self, tenant: _Tenant) -> None:
        self._admissions += 1
        for client_id in tenant.clients or {""}:
            self._served.pop(client_id, None)
            self._served[client_id] = self._admissions
        while len(self._served) > _MAX_SERVED:
            del self._served[next(iter(self._served))]

    async def _try(self, tenant: _Tenant) -> float:
        """Make room for a model; return 0, or after how many seconds to look again, since the others may stay."""
        self._admitting = True
        try:
            while tenant.wanted:
                others = [each for each in self._tenants if each is not tenant and each.holds_memory]
                if await self._has_room(tenant, others) or not others:
                    return 0.0
                leaving = min(others, key=lambda each: (self._stays_s(each, tenant), each.busy, each.last_used_s))
                if (stays_s := self._stays_s(leaving, tenant)) > 0:
                    _log.info("model_waits", model=tenant.name, until_leaves=leaving.name, wait_s=round(stays_s, 1))
                    tenant.delay(stays_s)
                    return stays_s
                await self._evict(leaving, tenant)
            return 0.0
        finally:
            self._admitting = False
            self.reevaluate()

    async def _evict(self, leaving: _Tenant, tenant: _Tenant) -> None:
        _log.info("model_makes_way", model=leaving.name, wanted=tenant.name, busy=leaving.busy)
        self._wait(tenant)
        try:
            await leaving.evict()
        finally:
            self._wait(None)

    def _stays_s(self, other: _Tenant, tenant: _Tenant) -> float:
        """Return how long a model that is loaded need not make way for ``tenant``; 0 if it is to now."""
        loaded_at_s = other.loaded_at_s
        if loaded_at_s is None or tenant.is_urgent or other.users <= tenant.clients:
            return 0.0
        return max(0.0, loaded_at_s + self._min_residency_s - self._monotonic())

    async def _has_room(self, tenant: _Tenant, others: Sequence[_Tenant]) -> bool:
        fits = await self._fits(tenant, others)
        return fits and not (self._max_resident and len(others) >= self._max_resident)

    async def _wait_for_news(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _wait(self, tenant: _Tenant | None) -> None:
        self._waiting = tenant
        self._changed()
