"""Decides which models are in memory: a model is admitted before it is loaded, and others are evicted to make room.

Clients share the memory. Of the models that wait, the one whose client was served longest ago is admitted first: a
client that requests many models delays another client's model by one of them. A model that other clients use is not
evicted before it has been loaded for a minimum time: a client that alternates between models gets no more than its
share, and not all time is spent on loading. A client that alone uses what is loaded does not wait for that time, and an
operator's load waits for neither.
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
"""Clients whose last admission is remembered; earlier ones count as never served."""

_log = structlog.get_logger(__name__)


class ResidentModel(Protocol):
    """A model's engine as the cache sees it."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def wanted(self) -> bool:
        """Whether it still waits to be loaded."""

    @property
    def holds_memory(self) -> bool:
        """Whether it is loaded, loading or being unloaded."""

    @property
    def busy(self) -> bool:
        """Whether it has turns."""

    @property
    def last_used_s(self) -> float:
        """When it was last used, in monotonic seconds."""

    @property
    def clients(self) -> frozenset[str]:
        """The clients that wait for it to be loaded, as far as they are known."""

    @property
    def users(self) -> frozenset[str]:
        """The clients whose turns it has run since it was loaded."""

    @property
    def loaded_at_s(self) -> float | None:
        """When it was loaded, in monotonic seconds; now while it is loading, ``None`` otherwise."""

    @property
    def is_urgent(self) -> bool:
        """Whether an operator requested it."""

    def delay(self, seconds: float) -> None:
        """Notify the turns that wait for it how long they have to wait at least."""

    async def evict(self) -> None:
        """Unload it; returns when its memory is free."""


_Model = TypeVar("_Model", bound=ResidentModel)


class ModelCache(Generic[_Model]):
    """Admits models one at a time.

    A model that does not fit beside the others evicts the least recently used one, preferably an idle one. A model for
    which there is never as much memory as it could use is admitted when it is alone: its plan adapts to what there is.

    Args:
        max_resident: Models loaded at once; 0 for as many as fit.
        min_residency_s: Seconds for which a loaded model is evicted only for its own users.
        fits: Whether a model fits beside others that are loaded; raises if it never will.
        changed: Called when ``waits`` returns another value.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        max_resident: int,
        min_residency_s: float,
        fits: Callable[[_Model, Sequence[_Model]], Awaitable[bool]],
        changed: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_resident = max_resident
        self._min_residency_s = min_residency_s
        self._fits = fits
        self._changed = changed
        self._monotonic = monotonic
        self._models: list[_Model] = []
        self._queue: list[_Model] = []
        self._admitting = False
        self._waiting: _Model | None = None
        # By client: the number of its last admission.
        self._served: dict[str, int] = {}
        self._admissions = 0
        self._wakeup = asyncio.Event()

    def waits(self, model: _Model) -> bool:
        """Return whether another model is being evicted for ``model``."""
        return model is self._waiting

    def add(self, model: _Model) -> None:
        """Register a model that may be loaded."""
        self._models.append(model)

    def remove(self, model: _Model) -> None:
        """Remove a model whose engine is gone for good."""
        self._models.remove(model)

    def reevaluate(self) -> None:
        """Evaluate admissions again: a model was loaded or unloaded, or another client wants one."""
        self._wakeup.set()
        self._wakeup.clear()

    async def admit(self, model: _Model) -> bool:
        """Wait until ``model`` may be loaded; return ``False`` if it is no longer wanted.

        Raises:
            InferenceCenterError: It can never fit; nothing was evicted then.
        """
        self._queue.append(model)
        self.reevaluate()
        try:
            while model.wanted:
                wait_s = None
                if not self._admitting and self._next() is model:
                    wait_s = await self._try(model)
                    if not wait_s:
                        break
                await self._wait_for_change(wait_s)
        finally:
            self._queue.remove(model)
            self.reevaluate()
        if model.wanted:
            self._note_served(model)
        return model.wanted

    def _next(self) -> _Model:
        """Return the waiting model to admit next; the caller is one of them."""
        wanted = [each for each in self._queue if each.wanted]
        return min(wanted, key=lambda each: (not each.is_urgent, self._last_served(each)))

    def _last_served(self, model: _Model) -> int:
        return min(self._served.get(client_id, 0) for client_id in model.clients or {""})

    def _note_served(self, model: _Model) -> None:
        self._admissions += 1
        for client_id in model.clients or {""}:
            self._served.pop(client_id, None)
            self._served[client_id] = self._admissions
        while len(self._served) > _MAX_SERVED:
            del self._served[next(iter(self._served))]

    async def _try(self, model: _Model) -> float:
        """Make room for a model; return 0, or after how many seconds to try again because the others may stay."""
        self._admitting = True
        try:
            while model.wanted:
                others = [each for each in self._models if each is not model and each.holds_memory]
                if await self._has_room(model, others) or not others:
                    return 0.0
                victim = min(others, key=lambda each: (self._stays_s(each, model), each.busy, each.last_used_s))
                if (stays_s := self._stays_s(victim, model)) > 0:
                    _log.info("model_waits", model=model.name, until_leaves=victim.name, wait_s=round(stays_s, 1))
                    model.delay(stays_s)
                    return stays_s
                await self._evict(victim, model)
            return 0.0
        finally:
            self._admitting = False
            self.reevaluate()

    async def _evict(self, victim: _Model, model: _Model) -> None:
        _log.info("model_makes_way", model=victim.name, wanted=model.name, busy=victim.busy)
        self._wait(model)
        try:
            await victim.evict()
        finally:
            self._wait(None)

    def _stays_s(self, other: _Model, model: _Model) -> float:
        """Return for how many seconds a loaded model must not be evicted for ``model``."""
        loaded_at_s = other.loaded_at_s
        if loaded_at_s is None or model.is_urgent or other.users <= model.clients:
            return 0.0
        return max(0.0, loaded_at_s + self._min_residency_s - self._monotonic())

    async def _has_room(self, model: _Model, others: Sequence[_Model]) -> bool:
        fits = await self._fits(model, others)
        return fits and not (self._max_resident and len(others) >= self._max_resident)

    async def _wait_for_change(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakeup.wait()

    def _wait(self, model: _Model | None) -> None:
        self._waiting = model
        self._changed()
