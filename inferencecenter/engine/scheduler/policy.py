"""The scheduler's policies: slot choice, compaction, prefill budget, time quantum, limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import ceil
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.scheduler.plan import DecodePass, DecodeRow
from inferencecenter.engine.scheduler.request import LOWEST_CLASS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from inferencecenter.engine.scheduler.request import EngineRequest
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable

_FIRST_TOKENS: Final = 32
_LEAST_TOKENS: Final = 16
_MOST_TOKENS: Final = 512
_PARKING_SHARE: Final = 0.03
# Preempting a turn takes one save and one restore.
_MOVES_PER_PREEMPTION: Final = 2
# Weight of the newest step: moves are few, and the first ones into fresh memory take ten times as long as later ones.
_QUANTUM_EWMA_WEIGHT: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits on what may run.

    Attributes:
        active_slots: Most turns that hold a slot at once. Turns above the limit finish their quantum.
        prefill_share: The fraction of a step's prompt tokens that is prefilled.
        lowest_class: Turns of a lower class get no slot, however long they wait.
    """

    active_slots: int
    prefill_share: float = 1.0
    lowest_class: int = LOWEST_CLASS

    def __post_init__(self) -> None:
        if self.active_slots < 1:
            raise ValueError(f"active_slots must be at least 1, not {self.active_slots}")
        if not 0 < self.prefill_share <= 1:
            raise ValueError(f"prefill_share must be in (0, 1], not {self.prefill_share}")
        if self.lowest_class < 0:
            raise ValueError(f"lowest_class must not be negative: {self.lowest_class}")

    def excludes(self, request: EngineRequest) -> bool:
        """Return whether the limits exclude a turn."""
        return request.base_class > self.lowest_class


def ewma(old: float, new: float, *, weight: float) -> float:
    """Return the exponentially weighted moving average; ``new`` itself when ``old`` is 0."""
    return old + weight * (new - old) if old else new


# Weight of the newest step in the averages: they follow a change within a few steps and absorb one outlier.
_BUDGET_EWMA_WEIGHT = 0.3
_PREFILL_SHARE = 4.0


def choose_slot(slots: SlotTable, session_id: str, *, waiting: Collection[str]) -> tuple[Slot, str] | None:
    """Return a slot for a session's turn and the reason, or ``None`` when it must wait.

    In order of preference: its own slot; an empty one next to the busy ones; the least recently used one, sparing
    sessions in ``waiting``, which are about to use theirs. Another session's KV is never built upon.
    """
    own = slots.of_session(session_id)
    if own is not None:
        return None if own.busy else (own, "holds its session")
    idle = [slot for slot in slots if not slot.busy]
    if not idle:
        return None
    busy = [slot.index for slot in slots if slot.busy]
    empty = [slot for slot in idle if slot.empty]
    if empty:
        return min(empty, key=lambda slot: (_distance(slot.index, busy), slot.index)), "empty"
    return min(idle, key=lambda slot: (slot.session_id in waiting, slot.used_s, slot.index)), "least recently used"


def _distance(index: int, busy: Sequence[int]) -> int:
    return min((abs(index - other) for other in busy), default=0)


class SlotUse(IntEnum):
    """What a slot is used for."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2


def compaction(uses: Sequence[SlotUse]) -> tuple[tuple[int, int], ...]:
    """Return the swaps, in order, that make busy slots consecutive and the decoding ones among them too.

    llama.cpp decodes only consecutive streams together; a gap costs another pass over all weights, and so does a
    prefilling slot between two decoding ones. The busier slot of a pair comes first.
    """
    uses = list(uses)
    gather = _gather([use > SlotUse.IDLE for use in uses], range(len(uses)))
    for a, b in gather:
        uses[a], uses[b] = uses[b], uses[a]
    busy = [index for index, use in enumerate(uses) if use > SlotUse.IDLE]
    generating = [use is SlotUse.DECODE for use in uses]
    return gather + _gather(generating, range(busy[0], busy[-1] + 1) if busy else range(0))


def _gather(wanted: Sequence[bool], within: range) -> tuple[tuple[int, int], ...]:
    """Return the fewest swaps, wanted slot first, that make the wanted slots consecutive ``within`` a range.

    The run that already holds most of them is filled; the lowest one if several do.
    """
    width = sum(wanted)
    starts = range(within.start, within.stop - width + 1)
    best = max(starts, key=lambda start: (sum(wanted[start : start + width]), -start), default=0)
    run = range(best, best + width)
    outside = (index for index, is_wanted in enumerate(wanted) if is_wanted and index not in run)
    gaps = (index for index in run if not wanted[index])
    return tuple(zip(outside, gaps, strict=True))


def decode_pass(requests: Iterable[EngineRequest], drafts: Mapping[str, Sequence[int]]) -> DecodePass:
    """Return the pass in which every decoding turn gets one token, plus those of its ``drafts`` that are accepted."""
    rows = [
        _row(request, request.kv_tokens, len(request.tokens), drafts.get(request.turn_id, ())) for request in requests
    ]
    return DecodePass(tuple(sorted(rows, key=_slot_of)), prefill=False)


def prefill_passes(
    requests: Iterable[EngineRequest], *, grid_tokens: int, budget_tokens: int, pass_tokens: int
) -> tuple[DecodePass, ...]:
    """Return the passes that prefill prompts: at least one chunk, at most ``budget_tokens``.

    Each chunk is one cell of the grid, so an answer never depends on how many fit a step. Prompts are prefilled one
    after the other, the highest class first and within it by ``EngineRequest.due``: a short prompt overtakes a long
    one, but not indefinitely. None is prefilled past its ``step_end``. A pass holds chunks of one length and at most
    ``pass_tokens``, because llama.cpp would split it otherwise.
    """
    cells: dict[tuple[int, int], list[DecodeRow]] = {}
    for nth, row in _prefill_chunks(requests, grid_tokens):
        n_tokens = len(row.chunk.tokens)
        if cells and n_tokens > budget_tokens:
            break
        budget_tokens -= n_tokens
        cells.setdefault((nth, n_tokens), []).append(row)
    passes: list[DecodePass] = []
    for (_, length), rows in sorted(cells.items(), key=lambda item: item[0]):
        rows.sort(key=_slot_of)
        width = max(1, pass_tokens // length)
        passes.extend(DecodePass(tuple(rows[at : at + width]), prefill=True) for at in range(0, len(rows), width))
    return tuple(passes)


def _prefill_chunks(requests: Iterable[EngineRequest], grid_tokens: int) -> Iterator[tuple[int, DecodeRow]]:
    """Yield the remaining chunks of the prompts in order, each with its number in its prompt."""
    for request in sorted(requests, key=lambda request: (request.effective_priority, request.due, request.arrival)):
        start, nth = request.kv_tokens, 0
        while start < request.step_end:
            end = request.chunk_end(start, grid_tokens)
            yield nth, _row(request, start, end)
            start, nth = end, nth + 1


def _row(request: EngineRequest, start: int, end: int, drafts: Sequence[int] = ()) -> DecodeRow:
    assert request.slot is not None
    tokens = [*request.tokens[start:end], *drafts]
    chunk = Chunk(request.slot, start, tokens, sample=end == len(request.tokens), drafts=len(drafts))
    return DecodeRow(request.turn_id, chunk)


def _slot_of(row: DecodeRow) -> int:
    return row.chunk.slot


class PrefillBudget:
    """How many prompt tokens a step may prefill.

    As many as keep a step at about ``target_step_s`` or, where decoding is slow, ``_PREFILL_SHARE`` times the decode
    time: a turn waiting for its first token keeps the batch small for all. Learned from recent prefill and decode
    times, separately for one prompt and for several, since a pass of several is faster per token. ``floor_tokens`` is
    the minimum, and the value until there is a measurement.
    """

    def __init__(self, *, target_step_s: float, floor_tokens: int) -> None:
        self._target_step_s = target_step_s
        self._floor_tokens = floor_tokens
        self._tokens_per_s = {True: 0.0, False: 0.0}
        self._decode_s = 0.0

    def tokens(self, *, decoding: bool, alone: bool) -> int:
        """Return the next step's budget; ``decoding``: other turns decode; ``alone``: a single prompt is prefilled."""
        decode_s = self._decode_s if decoding else 0.0
        prefill_s = max(self._target_step_s - decode_s, _PREFILL_SHARE * decode_s)
        tokens_per_s = self._tokens_per_s[True] if alone else max(self._tokens_per_s.values())
        return max(self._floor_tokens, int(tokens_per_s * prefill_s))

    def observe(self, *, prefill_tokens: int, prefill_s: float, decode_s: float, alone: bool) -> None:
        """Learn from a step; zero stands for a part it did not have, ``alone`` for a single prompt."""
        if prefill_tokens and prefill_s > 0:
            self._tokens_per_s[alone] = ewma(
                self._tokens_per_s[alone], prefill_tokens / prefill_s, weight=_BUDGET_EWMA_WEIGHT
            )
        if decode_s > 0:
            self._decode_s = ewma(self._decode_s, decode_s, weight=_BUDGET_EWMA_WEIGHT)


class Quantum:
    """How many tokens a turn generates before a waiting turn may preempt it.

    The configured value, or as many that preemption takes less than 3 % of the time: with ``s`` decoding slots each
    step generates ``s`` tokens in ``d`` seconds, and in the ``q`` steps of a quantum each slot changes hands once at
    ``e`` seconds. ``s·e <= 0.03·q·d`` holds from ``q = e / (0.03·d/s)`` on: what counts is the time per token, ``d/s``.

    Args:
        tokens: The quantum; 0 to learn it.
    """

    def __init__(self, tokens: int) -> None:
        self._given_tokens = tokens
        self._move_s = 0.0
        self._token_s = 0.0

    @property
    def tokens(self) -> int:
        """The quantum of the next step."""
        if self._given_tokens:
            return self._given_tokens
        if not (self._move_s and self._token_s):
            return _FIRST_TOKENS
        needed = ceil(_MOVES_PER_PREEMPTION * self._move_s / (_PARKING_SHARE * self._token_s))
        return min(max(needed, _LEAST_TOKENS), _MOST_TOKENS)

    def observe(self, *, moves: int, moves_s: float, generated_tokens: int, decode_s: float) -> None:
        """Learn from a step; zero stands for a part it did not have."""
        if moves and moves_s > 0:
            self._move_s = ewma(self._move_s, moves_s / moves, weight=_QUANTUM_EWMA_WEIGHT)
        if generated_tokens and decode_s > 0:
            self._token_s = ewma(self._token_s, decode_s / generated_tokens, weight=_QUANTUM_EWMA_WEIGHT)
