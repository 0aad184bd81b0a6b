"""The plan of one step and its outcome, as exchanged between scheduler and executor.

Mechanism of the chunk grid: a prompt is prefilled in chunks whose boundaries lie at multiples of ``grid_tokens`` (or at
the end of a shared system prompt), never where a step's token budget happens to end. A budget decides only how many
whole chunks a step takes. Invariant: the chunk boundaries of a prompt depend on the prompt alone, not on load, other
turns or cached KV, so the floating-point results, and with them a seeded answer, are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.engine.backend import Chunk, DraftRequest
    from inferencecenter.ipc.messages import MoveTime, TraceStage, TurnEvent


@dataclass(frozen=True, slots=True)
class TruncateSlot:
    """Keep the first ``n_tokens`` of a slot; ``turn_id`` is the turn that builds on them, if any."""

    slot: int
    n_tokens: int
    turn_id: str | None

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn that builds on it, if any."""
        return () if self.turn_id is None else (self.turn_id,)


@dataclass(frozen=True, slots=True)
class SwapSlots:
    """Swap the sequences of two slots. ``turn_a`` runs in ``a`` before and in ``b`` after, ``turn_b`` likewise."""

    a: int
    b: int
    turn_a: str | None
    turn_b: str | None

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns that change slots."""
        return tuple(turn_id for turn_id in (self.turn_a, self.turn_b) if turn_id is not None)


@dataclass(frozen=True, slots=True)
class ParkSlot:
    """Save a slot's ``n_tokens`` (``tokens``) under ``key`` of ``scope``; the slot keeps its content.

    A failure is no error: what was not parked is prefilled again. Without ``durable`` it must not be written to disk. A
    ``redundant`` entry is a copy of what stays in the slot: it evicts nothing and is evicted first. ``turn_id`` is the
    turn that loses the slot, if it was running.
    """

    slot: int
    key: str
    scope: str
    n_tokens: int
    tokens: tuple[int, ...]
    durable: bool
    turn_id: str | None = None
    redundant: bool = False

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """Empty: no particular turn builds on it."""
        return ()


@dataclass(frozen=True, slots=True)
class RestoreSlot:
    """Replace a slot's content by the parked sequence ``key`` of ``n_tokens``; ``turn_id`` builds on it.

    The entry must hold exactly ``tokens`` (packed); if it was replaced meanwhile, nothing is restored.
    """

    slot: int
    key: str
    n_tokens: int
    tokens: bytes
    turn_id: str

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn that builds on it."""
        return (self.turn_id,)


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Replace the content of ``target`` by the first ``n_tokens`` of slot ``source``; ``turn_id`` builds on them."""

    source: int
    target: int
    n_tokens: int
    turn_id: str

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turn that builds on it."""
        return (self.turn_id,)


KvMove: TypeAlias = TruncateSlot | SwapSlots | ParkSlot | RestoreSlot | CopySlot


@dataclass(frozen=True, slots=True)
class Admission:
    """A turn gets its first slot, with ``cached_tokens`` of its ``prompt`` in KV.

    A preempted turn that resumes is not admitted again: its sampler and its output still exist.
    """

    turn_id: str
    prompt: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A turn's chunk in a decode pass; with ``draft`` the draft model's tokens are added to it before."""

    turn_id: str
    chunk: Chunk
    draft: DraftRequest | None = None

    def with_drafts(self, tokens: Sequence[int]) -> DecodeRow:
        """Return the row with the draft model's tokens, of which there may be none."""
        chunk = replace(self.chunk, tokens=[*self.chunk.tokens, *tokens], drafts=len(tokens))
        return replace(self, chunk=chunk, draft=None)


@dataclass(frozen=True, slots=True)
class DecodePass:
    """One ``Backend.decode``: chunks of equal length except for drafts, in ascending slots, at most one per slot.

    ``prefill`` distinguishes prefill from decode.
    """

    rows: tuple[DecodeRow, ...]
    prefill: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: make the moves in order, then admit, then run the decode passes.

    The chunks' slots are those after the moves. ``fetches`` are keys of parked sequences to load from disk meanwhile.
    ``preemptions`` are turns that lose their slot and wait again. ``reasons`` explains the decisions.
    """

    moves: tuple[KvMove, ...] = ()
    fetches: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    admissions: tuple[Admission, ...] = ()
    passes: tuple[DecodePass, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the backend has nothing to do."""
        return not (self.moves or self.passes)

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns affected by the plan, each once."""
        ids = [row.turn_id for each in self.passes for row in each.rows]
        ids += [admission.turn_id for admission in self.admissions]
        ids += self.preemptions
        for move in self.moves:
            ids += move.turn_ids
        return tuple(dict.fromkeys(ids))


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """The result of a plan, by turn id; the executor fills it while it runs the plan.

    ``events`` are those of the turns, in order. ``decoded`` counts the tokens added to KV that stay there; ``accepted``
    are the draft tokens among them, sampled before the token in ``sampled``; ``drafted`` counts all drafts tried.
    ``emptied`` turns lost the KV they build on and are prefilled from the start; ``wiped`` slots, numbered as after the
    moves, lost an idle session's KV. ``ended`` turns are finished; the ``lost`` ones among them left no KV. ``stalled``
    turns are unchanged and decode again with the next step, the first of them after ``wait_s`` where samplers wait.

    ``prefill_s`` is the time for prefilling ``prefill_tokens``, ``decode_s`` the time of the decode pass and
    ``draft_s`` that of the draft model in it.
    ``move_times`` lists each park, restore and copy, ``stages`` those made for a turn, with its id; ``n_parked``
    sequences were parked.
    """

    events: list[TurnEvent] = field(default_factory=list)
    decoded: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafted: int = 0
    emptied: set[str] = field(default_factory=set)
    wiped: set[int] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    wait_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    move_times: list[MoveTime] = field(default_factory=list)
    stages: list[tuple[str, TraceStage]] = field(default_factory=list)
    n_parked: int = 0

    @property
    def moves_s(self) -> float:
        """Total duration of the moves in ``move_times``."""
        return sum(each.took_s for each in self.move_times)
