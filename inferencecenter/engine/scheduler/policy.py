"""The choices: which slot for a session, which slots to exchange, whose prompt is read on, how much in one step."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.scheduler.average import moved
from inferencecenter.engine.scheduler.plan import Pass, Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable

# Weight of the newest step in the running averages: a few steps to follow a change, one outlier forgiven.
_NEWEST = 0.3
_READING_SHARE = 4.0


def choose_slot(slots: SlotTable, session_id: str, *, waiting: Collection[str]) -> tuple[Slot, str] | None:
    """Return a slot for a session's turn and why, or ``None`` when it has to wait.

    Its own slot; else an empty one, next to the busy ones; else the one least recently used, sparing sessions in
    ``waiting``, which are about to use theirs. Another session's KV is never built upon.
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


class Use(IntEnum):
    """What a slot is doing."""

    IDLE = 0
    READING = 1
    GENERATING = 2


def compaction(uses: Sequence[Use]) -> tuple[tuple[int, int], ...]:
    """Return exchanges, to be made in order, after which busy slots are consecutive and so are the generating ones.

    llama.cpp decodes only consecutive streams together; a gap costs another reading of all weights, and so does a slot
    that reads its prompt between two that generate. The busier slot of a pair is named first.
    """
    uses = list(uses)
    gather = _gather([use > Use.IDLE for use in uses], range(len(uses)))
    for a, b in gather:
        uses[a], uses[b] = uses[b], uses[a]
    busy = [index for index, use in enumerate(uses) if use > Use.IDLE]
    generating = [use is Use.GENERATING for use in uses]
    return gather + _gather(generating, range(busy[0], busy[-1] + 1) if busy else range(0))


def _gather(wanted: Sequence[bool], within: range) -> tuple[tuple[int, int], ...]:
    """Return the fewest exchanges, wanted slot first, that make the wanted slots a run ``within`` the others.

    The run that already holds most of them is filled, the lowest one when several do.
    """
    width = sum(wanted)
    starts = range(within.start, within.stop - width + 1)
    best = max(starts, key=lambda start: (sum(wanted[start : start + width]), -start), default=0)
    run = range(best, best + width)
    outside = (index for index, is_wanted in enumerate(wanted) if is_wanted and index not in run)
    gaps = (index for index in run if not wanted[index])
    return tuple(zip(outside, gaps, strict=True))


def decode_pass(requests: Iterable[Request], drafts: Mapping[str, Sequence[int]]) -> Pass:
    """Return the pass in which everybody who generates gets one token, and those more whose ``drafts`` are right."""
    rows = [
        _row(request, request.kv_tokens, len(request.tokens), drafts.get(request.turn_id, ())) for request in requests
    ]
    return Pass(tuple(sorted(rows, key=_slot_of)), prefill=False)


def prefill_passes(
    requests: Iterable[Request], *, grid_tokens: int, budget_tokens: int, pass_tokens: int
) -> tuple[Pass, ...]:
    """Return the passes that read prompts on, at least one chunk and at most ``budget_tokens``.

    Each chunk is one cell of the grid, so an answer never depends on how many fit a step. One prompt is read after the
    other, the highest class first and in it by ``Request.due``: a short prompt overtakes a long one, but not for ever.
    None is read past its ``step_end``.
    A pass holds chunks of one length, because llama.cpp cuts the others to the shortest, and no more than
    ``pass_tokens``, which it would cut as well.
    """
    cells: dict[tuple[int, int], list[Row]] = {}
    for nth, row in _cells(requests, grid_tokens):
        n_tokens = len(row.chunk.tokens)
        if cells and n_tokens > budget_tokens:
            break
        budget_tokens -= n_tokens
        cells.setdefault((nth, n_tokens), []).append(row)
    passes: list[Pass] = []
    for (_, length), rows in sorted(cells.items(), key=lambda item: item[0]):
        rows.sort(key=_slot_of)
        width = max(1, pass_tokens // length)
        passes.extend(Pass(tuple(rows[at : at + width]), prefill=True) for at in range(0, len(rows), width))
    return tuple(passes)


def _cells(requests: Iterable[Request], grid_tokens: int) -> Iterator[tuple[int, Row]]:
    """Yield what is left of the prompts, cell by cell in the order of reading, each with its number in its prompt."""
    for request in sorted(requests, key=lambda request: (request.rank, request.due, request.arrival)):
        start, nth = request.kv_tokens, 0
        while start < request.step_end:
            end = request.chunk_end(start, grid_tokens)
            yield nth, _row(request, start, end)
            start, nth = end, nth + 1


def _row(request: Request, start: int, end: int, drafts: Sequence[int] = ()) -> Row:
    assert request.slot is not None
    tokens = [*request.tokens[start:end], *drafts]
    chunk = Chunk(request.slot, start, tokens, sample=end == len(request.tokens), drafts=len(drafts))
    return Row(request.turn_id, chunk)


def _slot_of(row: Row) -> int:
    return row.chunk.slot


class PrefillBudget:
    """How many prompt tokens a step may read.

    As many as make it take about ``target_step_s``, or, where generating takes long, ``_READING_SHARE`` times as long
    as that: who waits for a first token keeps the batch small for everybody. Learned from what reading and generating
    took lately, for one prompt and for several apart, since a pass of several reads faster; ``floor_tokens`` until
    something was read so, and never less.
    """

    def __init__(self, *, target_step_s: float, floor_tokens: int) -> None:
        self._target_step_s = target_step_s
        self._floor_tokens = floor_tokens
        self._tokens_per_s = {True: 0.0, False: 0.0}
        self._decode_s = 0.0

    def tokens(self, *, decoding: bool, alone: bool) -> int:
        """Return the budget of the next step, in which others generate or not, for one prompt ``alone`` or several."""
        decode_s = self._decode_s if decoding else 0.0
        reading_s = max(self._target_step_s - decode_s, _READING_SHARE * decode_s)
        tokens_per_s = self._tokens_per_s[True] if alone else max(self._tokens_per_s.values())
        return max(self._floor_tokens, int(tokens_per_s * reading_s))

    def observe(self, *, prefill_tokens: int, prefill_s: float, decode_s: float, alone: bool) -> None:
        """Learn from a step; zero stands for a part that it did not have, ``alone`` for a single prompt read."""
        if prefill_tokens and prefill_s > 0:
            self._tokens_per_s[alone] = moved(self._tokens_per_s[alone], prefill_tokens / prefill_s, weight=_NEWEST)
        if decode_s > 0:
            self._decode_s = moved(self._decode_s, decode_s, weight=_NEWEST)
