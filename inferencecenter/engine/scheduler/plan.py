"""The plan of one step and its outcome, as exchanged between scheduler and executor.

Mechanism of the chunk grid: a prompt is prefilled in chunks whose boundaries lie at multiples of ``grid_tokens`` (or at
the end of a shared system prompt), never where a step's token budget happens to end. A budget decides only how many
whole chunks a step takes. Invariant: the chunk boundaries of a prompt depend on the prompt alone, not on load, other
turns or cached KV, so the floating-point results, and with them a seeded answer, are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.engine.backend import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inferencecenter.engine.backend import DraftRequest
    from inferencecenter.engine.images import ImageSpan
    from inferencecenter.engine.scheduler.speculation import Drafts
    from inferencecenter.engine.scheduler.state import EngineRequest, Slot
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

    A failure is no error: tokens that were not parked are prefilled again. Without ``durable`` it must not be written
    to disk. A ``redundant`` entry is a copy of a slot's content: it evicts nothing and is evicted first. ``turn_id`` is
    the turn that loses the slot, if it was running.
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
    """A turn's chunk in a decode pass; with ``draft`` the draft model's tokens are added to it before.

    The chunk of a ``span`` is a run of rows, and gets its embeddings before.
    """

    turn_id: str
    chunk: Chunk
    draft: DraftRequest | None = None
    span: ImageSpan | None = None

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
class RowEncoding:
    """A turn needs the embeddings of a run of rows, whose pixels are there."""

    turn_id: str
    span: ImageSpan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: make the moves in order, then admit, then encode, then run the decode passes.

    The chunks' slots are those after the moves. ``fetches`` are keys of parked sequences to load from disk meanwhile.
    ``preemptions`` are turns that lose their slot and wait again. ``reasons`` explains the decisions.
    """

    moves: tuple[KvMove, ...] = ()
    fetches: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    admissions: tuple[Admission, ...] = ()
    passes: tuple[DecodePass, ...] = ()
    reasons: tuple[str, ...] = ()
    encoding: RowEncoding | None = None

    @property
    def empty(self) -> bool:
        """Whether the backend has nothing to do."""
        return not (self.moves or self.passes or self.encoding)

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns affected by the plan, each once."""
        ids = [row.turn_id for each in self.passes for row in each.rows]
        ids += [admission.turn_id for admission in self.admissions]
        ids += self.preemptions
        if self.encoding is not None:
            ids.append(self.encoding.turn_id)
        for move in self.moves:
            ids += move.turn_ids
        return tuple(dict.fromkeys(ids))


@dataclass(slots=True)
class PlanBuilder:
    """Collects the moves, admissions and reasons of one step's plan.

    ``read_tokens`` is the number of prompt tokens prefilled by all turns before this plan. The content of ``unsettled``
    slots depends on moves that may fail; entries found under ``replaced`` keys will have been overwritten when the plan
    runs. ``preempted`` turns are requeued only after all slots are assigned, so that none of them competes in the step
    that preempted it.
    """

    read_tokens: int
    moves: list[KvMove]
    fetches: list[str] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    unsettled: set[Slot] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    encoding: RowEncoding | None = None

    def plan(self, passes: list[DecodePass]) -> StepPlan:
        """Return the finished plan."""
        return StepPlan(
            moves=tuple(self.moves),
            fetches=tuple(self.fetches),
            preemptions=tuple(request.turn_id for request in self.preempted),
            admissions=tuple(self.admissions),
            passes=tuple(passes),
            reasons=tuple(self.reasons),
            encoding=self.encoding,
        )


def decode_pass(requests: Iterable[EngineRequest], drafts: Drafts) -> DecodePass:
    """Return the pass in which every decoding turn gets one token, plus those of its ``drafts`` that are accepted."""
    rows = [_decode_row(request, drafts) for request in requests]
    return DecodePass(tuple(sorted(rows, key=_slot_of)), prefill=False)


def prefill_passes(
    requests: Iterable[EngineRequest], *, grid_tokens: int, budget_tokens: int, pass_tokens: int
) -> tuple[DecodePass, ...]:
    """Return the passes that prefill prompts: at least one chunk, at most ``budget_tokens``.

    Each chunk is one cell of the grid, so an answer never depends on how many fit a step. Prompts are prefilled one
    after the other, the highest class first and within it by ``EngineRequest.due``: a short prompt overtakes a long
    one, but not indefinitely. None is prefilled past its ``step_end``. Prompts that have at most ``pass_tokens`` in
    this step together share passes, which is faster per token. A pass holds chunks of one length and at most
    ``pass_tokens``, because llama.cpp would split it otherwise. A run of rows is a pass of its own.
    """
    groups: list[list[list[DecodeRow]]] = []
    room_tokens = 0
    for request in sorted(requests, key=prefill_order):
        rows: list[DecodeRow] = []
        for row in _prefill_rows(request, grid_tokens):
            if (groups or rows) and len(row.chunk.tokens) > budget_tokens:
                break
            budget_tokens -= len(row.chunk.tokens)
            rows.append(row)
        if not rows:
            break
        n_tokens = sum(len(row.chunk.tokens) for row in rows)
        if n_tokens > room_tokens:
            groups.append([])
            room_tokens = pass_tokens
        groups[-1].append(rows)
        room_tokens -= n_tokens
        if request.kv_tokens + n_tokens < request.step_end:
            break
    return tuple(each for group in groups for each in _group_passes(group, pass_tokens))


def _group_passes(prompts: list[list[DecodeRow]], pass_tokens: int) -> Iterator[DecodePass]:
    """Yield the passes of prompts' chunks, with the chunks of equal number and length in one."""
    cells: dict[tuple[int, int, bool], list[DecodeRow]] = {}
    for prompt in prompts:
        for nth, row in enumerate(prompt):
            cells.setdefault((nth, len(row.chunk.tokens), row.span is not None), []).append(row)
    for (_, length, of_image), rows in sorted(cells.items(), key=lambda item: item[0]):
        rows.sort(key=_slot_of)
        width = 1 if of_image else max(1, pass_tokens // length)
        for at in range(0, len(rows), width):
            yield DecodePass(tuple(rows[at : at + width]), prefill=True)


def until_first_token(passes: Sequence[DecodePass], *, least_tokens: int) -> list[DecodePass]:
    """Return the passes up to the first one that completes a prompt, and at least ``least_tokens``.

    The token is published at the end of a step, so it does not wait for the other prompts.
    """
    n_tokens = 0
    for number, each in enumerate(passes, start=1):
        n_tokens += sum(len(row.chunk.tokens) for row in each.rows)
        if n_tokens >= least_tokens and any(row.chunk.sample for row in each.rows):
            return list(passes[:number])
    return list(passes)


def prefill_order(request: EngineRequest) -> tuple[int, int, int]:
    """Return the key by which prompts are prefilled."""
    return request.effective_priority, request.due, request.arrival


def _prefill_rows(request: EngineRequest, grid_tokens: int) -> Iterator[DecodeRow]:
    """Yield the remaining chunks of a prompt."""
    start = request.kv_tokens
    while start < request.step_end:
        end = request.chunk_end(start, grid_tokens)
        yield DecodeRow(request.turn_id, _chunk(request, start, end), span=request.span_at(start))
        start = end


def _decode_row(request: EngineRequest, drafts: Drafts) -> DecodeRow:
    turn_id = request.turn_id
    chunk = _chunk(request, request.kv_tokens, len(request.tokens), drafts.tokens.get(turn_id, ()))
    return DecodeRow(turn_id, chunk, drafts.requests.get(turn_id))


def _chunk(request: EngineRequest, start: int, end: int, drafts: Sequence[int] = ()) -> Chunk:
    assert request.slot is not None
    tokens = [*request.tokens[start:end], *drafts]
    return Chunk(request.slot, start, tokens, sample=end == len(request.tokens), drafts=len(drafts))


def _slot_of(row: DecodeRow) -> int:
    return row.chunk.slot


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """The result of a plan, by turn id; the executor fills it while it runs the plan.

    ``events`` are those of the turns, in order. ``decoded`` counts the tokens added to KV that stay there; ``accepted``
    are the draft tokens among them, sampled before the token in ``sampled``; ``drafted`` counts all drafts tried.
    ``emptied`` turns lost the KV they build on and are prefilled from the start; ``wiped`` slots, numbered as after the
    moves, lost an idle session's KV. ``ended`` turns are finished; the ``lost`` ones among them left no KV. ``stalled``
    turns are unchanged and decode again with the next step, the first of them after ``wait_s`` where samplers wait. An
    ``interrupted`` plan has passes that were not run.

    ``encode_s`` is the time for encoding an image, ``prefill_s`` that for prefilling ``prefill_tokens``, ``decode_s``
    the time of the decode pass and ``draft_s`` that of the draft model in it. ``move_times`` lists each park, restore
    and copy, ``stages`` those made for a turn, with its id; ``n_parked`` sequences were parked.
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
    interrupted: bool = False
    wait_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    move_times: list[MoveTime] = field(default_factory=list)
    stages: list[tuple[str, TraceStage]] = field(default_factory=list)
    n_parked: int = 0

    @property
    def moves_s(self) -> float:
        """Total duration of the moves in ``move_times``."""
        return sum(each.took_s for each in self.move_times)
