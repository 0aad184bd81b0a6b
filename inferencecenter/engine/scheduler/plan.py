"""What the scheduler decides for one step, and what the executor tells it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from inferencecenter.engine.backend import Chunk
    from inferencecenter.ipc.messages import MoveTime


@dataclass(frozen=True, slots=True)
class TruncateSlot:
    """Keep the first ``n_tokens`` of a slot; ``turn_id`` is the turn that builds on them, if one does."""

    slot: int
    n_tokens: int
    turn_id: str | None

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn for which it is made, if it is for one."""
        return () if self.turn_id is None else (self.turn_id,)


@dataclass(frozen=True, slots=True)
class SwapSlots:
    """Exchange the sequences of two slots. ``turn_a`` runs in ``a`` before and in ``b`` after, ``turn_b`` likewise."""

    a: int
    b: int
    turn_a: str | None
    turn_b: str | None

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns that change their slots."""
        return tuple(turn_id for turn_id in (self.turn_a, self.turn_b) if turn_id is not None)


@dataclass(frozen=True, slots=True)
class ParkSlot:
    """Save what a slot holds, ``n_tokens`` spelt by ``tokens``, under ``key`` of ``scope``; the slot keeps its content.

    That it fails is no error: what was not parked is read again. Without ``durable`` it may not be written to a disk.
    A ``spare`` one is a copy of what stays in the slot: it pushes nothing out, and goes first when there is no room.
    ``turn_id`` is the turn that loses the slot, if it was running.
    """

    slot: int
    key: str
    scope: str
    n_tokens: int
    tokens: tuple[int, ...]
    durable: bool
    turn_id: str | None = None
    spare: bool = False

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """No turn: it is for whoever comes back."""
        return ()


@dataclass(frozen=True, slots=True)
class RestoreSlot:
    """Replace what a slot holds by the parked sequence ``key`` of ``n_tokens``; ``turn_id`` builds on it.

    It must spell ``tokens``, packed: when something else is parked there by then, nothing is restored.
    """

    slot: int
    key: str
    n_tokens: int
    tokens: bytes
    turn_id: str

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn for which it is made."""
        return (self.turn_id,)


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Replace what ``target`` holds by the first ``n_tokens`` of slot ``source``; ``turn_id`` builds on them."""

    source: int
    target: int
    n_tokens: int
    turn_id: str

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn for which it is made."""
        return (self.turn_id,)


KvMove: TypeAlias = TruncateSlot | SwapSlots | ParkSlot | RestoreSlot | CopySlot


@dataclass(frozen=True, slots=True)
class Admission:
    """A turn gets its first slot; ``cached_tokens`` of its ``prompt`` are there already.

    A turn that was preempted and comes back is not admitted again: its sampler and its output live on.
    """

    turn_id: str
    prompt: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A turn's chunk in a decode pass."""

    turn_id: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class DecodePass:
    """One ``Backend.decode``: chunks of equal length but for drafts, in ascending slots, at most one a slot.

    ``prefill`` tells reading prompts from generating.
    """

    rows: tuple[DecodeRow, ...]
    prefill: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: make the moves in order, then admit, then decode pass after pass.

    The chunks' slots are those after the moves. ``fetches`` are keys of parked sequences to read from disk
    meanwhile. ``preemptions`` are turns that lose their slot and wait again. ``reasons`` says in words why.
    """

    moves: tuple[KvMove, ...] = ()
    fetches: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    admissions: tuple[Admission, ...] = ()
    passes: tuple[DecodePass, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing for the backend to do."""
        return not (self.moves or self.passes)

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns for which anything is done, each once."""
        ids = [row.turn_id for each in self.passes for row in each.rows]
        ids += [admission.turn_id for admission in self.admissions]
        ids += self.preemptions
        for move in self.moves:
            ids += move.turn_ids
        return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of a plan, by turn id.

    ``decoded`` counts the tokens that went into KV and stay there: ``accepted`` are drafts among them, which were
    sampled before what ``sampled`` names; ``drafted`` were tried in all. ``emptied`` turns lost the KV they were to
    build on, or what they had, and read all from its start; ``wiped`` slots, numbered as after the moves, lost an idle
    session's KV. ``ended`` turns are over; of them the ``lost`` ones left no KV behind. ``prefill_s`` is what reading
    ``prefill_tokens`` took, ``decode_s`` the pass of those that generate, ``moves_s`` parking, restoring and copying,
    each of which is among ``move_times``; ``n_parked`` sequences were parked.
    """

    decoded: Mapping[str, int] = field(default_factory=dict)
    sampled: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    drafted: int = 0
    emptied: frozenset[str] = frozenset()
    wiped: frozenset[int] = frozenset()
    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    moves_s: float = 0.0
    move_times: tuple[MoveTime, ...] = ()
    n_parked: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """``done`` of ``total`` prompt tokens of a turn are in KV, and more is to be read."""

    turn_id: str
    done: int
    total: int
