"""The slot table. Invariant: it mirrors the KV exactly; each slot's ``tokens`` are what its stream holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.engine.scheduler.request import EngineRequest


@dataclass(slots=True, eq=False)
class Slot:
    """One KV stream: its ``tokens``, the ``turn_id`` that runs in it, and ``used_s``, the time of its last use.

    ``durable``: its content may be written to disk. ``saved``: it was examined for a checkpoint since its last turn.
    """

    index: int
    session_id: str | None = None
    client_id: str = ""
    turn_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    durable: bool = True
    saved: bool = False
    used_s: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a turn runs here."""
        return self.turn_id is not None

    @property
    def empty(self) -> bool:
        """Whether no session owns the slot."""
        return self.session_id is None


class SlotTable:
    """All slots of the context, by index."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]
        self._of_session: dict[str, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __repr__(self) -> str:
        shown = (f"{slot.session_id or '-'}{'*' if slot.busy else ''}:{len(slot.tokens)}" for slot in self)
        return f"SlotTable({' '.join(shown)})"

    def of_session(self, session_id: str) -> Slot | None:
        """Return the slot that holds a session's KV."""
        return self._of_session.get(session_id)

    def assign(self, slot: Slot, request: EngineRequest, *, keep_tokens: int) -> None:
        """Assign an idle slot to a turn, keeping the first ``keep_tokens`` of its content."""
        if slot.busy:
            raise ValueError(f"slot {slot.index} runs turn {slot.turn_id}")
        if keep_tokens and slot.client_id != request.client_id:
            raise ValueError(f"slot {slot.index} holds tokens of client {slot.client_id}, not of {request.client_id}")
        if self.of_session(request.session_id) not in (None, slot):
            raise ValueError(f"session {request.session_id} has a slot already")
        self._disown(slot)
        slot.session_id, slot.client_id, slot.turn_id = request.session_id, request.client_id, request.turn_id
        slot.durable, slot.saved = request.durable, False
        self._of_session[request.session_id] = slot
        del slot.tokens[keep_tokens:]

    def free(self, slot: Slot, *, now: float) -> None:
        """End the slot's turn; the session keeps its KV."""
        slot.turn_id, slot.used_s = None, now
        if not slot.tokens:
            self._disown(slot)

    def forget(self, slot: Slot) -> None:
        """Remove an idle slot's owner and content."""
        if slot.busy:
            raise ValueError(f"slot {slot.index} runs turn {slot.turn_id}")
        self._disown(slot)
        slot.tokens.clear()

    def swap(self, a: int, b: int) -> None:
        """Swap what two slots hold and run."""
        first, second = self._slots[a], self._slots[b]
        first.index, second.index = b, a
        self._slots[a], self._slots[b] = second, first

    def check_integrity(self, *, n_ctx: int) -> None:
        """Raise ``AssertionError`` when the table contradicts itself."""
        assert [slot.index for slot in self] == list(range(len(self))), f"slots are out of order: {self!r}"
        owners = {slot.session_id: slot for slot in self if slot.session_id is not None}
        assert len(owners) == sum(not slot.empty for slot in self), f"a session holds two slots: {self!r}"
        assert owners == self._of_session, f"a session's slot is not where it should be: {self!r}"
        for slot in self:
            assert len(slot.tokens) <= n_ctx, f"slot {slot.index} holds more than {n_ctx} tokens: {self!r}"
            in_use = slot.busy or bool(slot.tokens)
            assert in_use or slot.empty, f"slot {slot.index} is unused, but owned: {self!r}"
            assert not in_use or not slot.empty, f"slot {slot.index} is in use, but not owned: {self!r}"
            assert slot.empty == (not slot.client_id), f"slot {slot.index} has a session, but no client: {self!r}"

    def _disown(self, slot: Slot) -> None:
        if slot.session_id is not None:
            del self._of_session[slot.session_id]
        slot.session_id, slot.client_id = None, ""
