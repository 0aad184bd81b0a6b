"""Copies of what idle slots hold, made while nothing is asked, so that less is lost with the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.plan import Park

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.engine.scheduler.parking import ParkedKv
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable
    from inferencecenter.engine.scheduler.sources import Sources


class Saving:
    """Finds slots whose content is nowhere else.

    Each state of a slot is saved once at most, also when that fails or the copy is given up later.

    Args:
        slots: What the slots hold.
        sources: Where KV is found.
        parked: What can be parked.
        grid_tokens: Less than that is not worth it: reading it again is as fast.
    """

    def __init__(self, slots: SlotTable, sources: Sources, parked: ParkedKv, *, grid_tokens: int) -> None:
        self._slots = slots
        self._sources = sources
        self._parked = parked
        self._grid_tokens = grid_tokens

    @property
    def wanted(self) -> bool:
        """Whether a slot may hold something to save for which there is room now."""
        return any(self._candidates())

    def next(self) -> Park | None:
        """Return how to save what one slot holds, of what was used last first; ``None`` when all is saved."""
        for slot in sorted(self._candidates(), key=lambda slot: slot.used_s, reverse=True):
            slot.saved = True
            if not self._sources.is_parked(slot.client_id, slot.tokens, spare=True):
                assert slot.session_id is not None
                tokens = tuple(slot.tokens)
                return Park(slot.index, slot.session_id, slot.client_id, len(tokens), tokens, durable=True, spare=True)
        return None

    def begin_again(self) -> None:
        """Take note that copies may have been given up: what the slots hold is to be looked at once more."""
        for slot in self._slots:
            slot.saved = False

    def _candidates(self) -> Iterable[Slot]:
        return (slot for slot in self._slots if not (slot.busy or slot.saved) and self._is_worth_it(slot))

    def _is_worth_it(self, slot: Slot) -> bool:
        if slot.session_id is None or not slot.durable or len(slot.tokens) < self._grid_tokens:
            return False
        return self._parked.has_room(slot.session_id, slot.client_id, len(slot.tokens))
