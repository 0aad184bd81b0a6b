"""Which session's tokens each slot holds. The table mirrors the KV: what it says is there is exactly there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Slot:
    """One KV stream: ``tokens`` are what it holds, ``turn_id`` the turn that runs in it, ``used_s`` its last use."""

    index: int
    session_id: str | None = None
    turn_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    used_s: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a turn runs here."""
        return self.turn_id is not None

    @property
    def empty(self) -> bool:
        """Whether the slot belongs to nobody."""
        return self.session_id is None


class SlotTable:
    """All slots of the context, by index."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]

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
        return next((slot for slot in self if slot.session_id == session_id), None)

    def assign(self, slot: Slot, *, session_id: str, turn_id: str, keep_tokens: int) -> None:
        """Let a turn run in an idle slot, on top of the first ``keep_tokens`` of what it holds."""
        if slot.busy:
            raise ValueError(f"slot {slot.index} runs turn {slot.turn_id}")
        if keep_tokens and slot.session_id != session_id:
            raise ValueError(f"slot {slot.index} holds tokens of session {slot.session_id}, not of {session_id}")
        slot.session_id, slot.turn_id = session_id, turn_id
        del slot.tokens[keep_tokens:]

    def free(self, slot: Slot, *, now: float) -> None:
        """End the slot's turn; the session keeps its KV."""
        slot.turn_id, slot.used_s = None, now
        if not slot.tokens:
            slot.session_id = None

    def forget(self, slot: Slot) -> None:
        """Make an idle slot nobody's."""
        if slot.busy:
            raise ValueError(f"slot {slot.index} runs turn {slot.turn_id}")
        slot.session_id = None
        slot.tokens.clear()

    def swap(self, a: int, b: int) -> None:
        """Exchange what two slots hold and run."""
        first, second = self._slots[a], self._slots[b]
        first.index, second.index = b, a
        self._slots[a], self._slots[b] = second, first

    def check_integrity(self, *, n_ctx: int) -> None:
        """Raise ``AssertionError`` when the table contradicts itself."""
        assert [slot.index for slot in self] == list(range(len(self))), f"slots are out of order: {self!r}"
        owners = [slot.session_id for slot in self if slot.session_id is not None]
        assert len(owners) == len(set(owners)), f"a session holds two slots: {self!r}"
        for slot in self:
            assert len(slot.tokens) <= n_ctx, f"slot {slot.index} holds more than {n_ctx} tokens: {self!r}"
            in_use = slot.busy or bool(slot.tokens)
            assert in_use or slot.empty, f"slot {slot.index} is unused, but somebody's: {self!r}"
            assert not in_use or not slot.empty, f"slot {slot.index} is in use, but nobody's: {self!r}"
