"""Executes the KV moves of a plan before a step decodes: truncate, swap, park, restore, copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferencecenter.engine.backend import DecodeError
from inferencecenter.engine.scheduler.plan import CopySlot, ParkSlot, RestoreSlot, SwapSlots, TruncateSlot
from inferencecenter.ipc.messages import MoveTime, TraceStage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.kv_cache.store import KvStore
    from inferencecenter.engine.scheduler.plan import KvMove


@dataclass(slots=True)
class KvMoveResult:
    """The result of a plan's moves.

    ``emptied`` turns are prefilled from the start again, ``lost`` ones cannot continue; the slots of both are empty, as
    are the ``wiped`` slots of idle sessions, numbered as after the moves. ``times`` lists the duration of each park,
    restore and copy, ``stages`` those made for a turn, with its id; ``n_parked`` sequences were parked.
    """

    emptied: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    wiped: set[int] = field(default_factory=set)
    n_parked: int = 0
    times: list[MoveTime] = field(default_factory=list)
    stages: list[tuple[str, TraceStage]] = field(default_factory=list)

    @property
    def took_s(self) -> float:
        """Total duration of the moves in ``times``."""
        return sum(each.took_s for each in self.times)


class KvMover:
    """Executes moves on a backend. A failed move leaves its slot empty, and later moves take that into account.

    Args:
        backend: Holds the slots.
        kv: The store of parked sequences.
        clock: Monotonic seconds.
        progressed: Called after each move.
        on_log: Called with level and text.
    """

    def __init__(
        self,
        backend: Backend,
        kv: KvStore,
        *,
        clock: Callable[[], float],
        progressed: Callable[[], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._clock = clock
        self._progressed = progressed
        self._on_log = on_log
        # Slots that are empty although the plan relies on their content.
        self._empty: set[int] = set()
        # Keys of parked sequences that parking must not evict.
        self._wanted: set[str] = set()

    def run(self, moves: Collection[KvMove]) -> KvMoveResult:
        """Make the moves in order and return their result."""
        moved = KvMoveResult()
        self._empty.clear()
        self._wanted = {move.key for move in moves if isinstance(move, RestoreSlot)}
        for move in moves:
            match move:
                case TruncateSlot():
                    self._truncate(move, moved)
                case SwapSlots():
                    self._swap(move, moved)
                case ParkSlot() | RestoreSlot() | CopySlot():
                    began_s = self._clock()
                    kind = self._transfer(move, moved)
                    ended_s = self._clock()
                    moved.times.append(MoveTime(kind, ended_s - began_s))
                    if move.turn_id is not None:
                        moved.stages.append((move.turn_id, TraceStage(kind, began_s, ended_s, move.n_tokens)))
            self._progressed()
        return moved

    def _transfer(self, move: ParkSlot | RestoreSlot | CopySlot, moved: KvMoveResult) -> str:
        """Make a timed move and return its kind."""
        match move:
            case ParkSlot():
                moved.n_parked += self._park(move)
                return "park"
            case RestoreSlot(slot=slot):
                self._filled(slot, move.turn_id, moved, filled=self._restore(move))
                return "restore"
            case CopySlot(target=slot):
                self._filled(slot, move.turn_id, moved, filled=self._copy(move))
                return "copy"

    def _truncate(self, truncation: TruncateSlot, moved: KvMoveResult) -> None:
        slot = truncation.slot
        if slot in self._empty:
            return
        if self._backend.truncate(slot, truncation.n_tokens) or not truncation.n_tokens:
            return
        self._empty.add(slot)
        if truncation.turn_id is None:
            moved.wiped.add(slot)
        else:
            moved.emptied.add(truncation.turn_id)

    def _swap(self, swap: SwapSlots, moved: KvMoveResult) -> None:
        for slots in (self._empty, moved.wiped):
            _exchange(slots, swap.a, swap.b)
        try:
            self._backend.swap(swap.a, swap.b)
        except DecodeError as error:
            self._on_log("error", f"slots {swap.a} and {swap.b} could not be swapped: {error}")
            for turn_id, slot in ((swap.turn_a, swap.b), (swap.turn_b, swap.a)):
                self._backend.truncate(slot, 0)
                self._empty.add(slot)
                if turn_id is None:
                    moved.wiped.add(slot)
                else:
                    moved.lost.add(turn_id)

    def _park(self, park: ParkSlot) -> bool:
        # An empty slot has no bytes, so there is nothing to park.
        size_bytes = self._backend.state_bytes(park.slot)
        return size_bytes > 0 and self._kv.park(
            park.key,
            scope=park.scope,
            tokens=park.tokens,
            size_bytes=size_bytes,
            write=lambda buffer: self._backend.save(park.slot, buffer),
            durable=park.durable,
            keep=self._wanted,
            spare=park.spare,
        )

    def _restore(self, restore: RestoreSlot) -> bool:
        return self._kv.load(
            restore.key,
            restore.tokens,
            lambda data: self._backend.restore(restore.slot, data, restore.n_tokens),
        )

    def _copy(self, copy: CopySlot) -> bool:
        return copy.source not in self._empty and self._backend.copy(copy.source, copy.target, copy.n_tokens)

    def _filled(self, slot: int, turn_id: str, moved: KvMoveResult, *, filled: bool) -> None:
        if filled:
            self._empty.discard(slot)
            return
        # The previous content may still be there: a missing file is not even tried.
        self._backend.truncate(slot, 0)
        self._empty.add(slot)
        moved.emptied.add(turn_id)


def _exchange(slots: set[int], a: int, b: int) -> None:
    if (a in slots) != (b in slots):
        slots ^= {a, b}
