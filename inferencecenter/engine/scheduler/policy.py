"""The choices: which slot for a session, which slots to exchange, whose prompt is read on, how much in one step."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.scheduler.plan import Pass, Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable

# Weight of the newest step in the running averages: a few steps to follow a change, one outlier forgiven.
_NEWEST = 0.3


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


def compaction(busy: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the fewest exchanges, busy slot first, idle one second, that make the busy slots consecutive.

    llama.cpp decodes only consecutive streams together; a gap costs another reading of all weights. The window that
    already holds most busy slots is filled, the lowest of them when several do.
    """
    width = sum(busy)
    inside = sum(busy[:width])
    best, most = 0, inside
    for start in range(1, len(busy) - width + 1):
        inside += busy[start + width - 1] - busy[start - 1]
        if inside > most:
            best, most = start, inside
    window = range(best, best + width)
    outside = (index for index, is_busy in enumerate(busy) if is_busy and index not in window)
    gaps = (index for index in window if not busy[index])
    return tuple(zip(outside, gaps, strict=True))


def decode_pass(requests: Iterable[Request]) -> Pass:
    """Return the pass in which everybody who generates gets one token."""
    rows = [_row(request, request.kv_tokens, len(request.tokens)) for request in requests]
    return Pass(tuple(sorted(rows, key=_slot_of)), prefill=False)


def prefill_passes(
    requests: Iterable[Request], *, grid_tokens: int, budget_tokens: int, pass_tokens: int, tick: int
) -> tuple[Pass, ...]:
    """Return the passes that read prompts on, at least one chunk and at most ``budget_tokens``.

    Each chunk is one cell of the grid, so an answer never depends on how many fit a step. Cells go round: the highest
    class first, in it whoever waited longest since ``Request.served``, which is set from ``tick`` on. A pass holds
    chunks of one length, because llama.cpp cuts the others to the shortest, and no more than ``pass_tokens``, which it
    would cut as well.
    """
    queue = [(request.priority, request.served, request.arrival, request.kv_tokens, request) for request in requests]
    heapq.heapify(queue)
    cells: dict[tuple[int, int], list[Row]] = {}
    rounds: dict[str, int] = {}
    while queue:
        priority, _, arrival, start, request = heapq.heappop(queue)
        end = request.chunk_end(start, grid_tokens)
        if rounds and end - start > budget_tokens:
            break
        budget_tokens -= end - start
        tick += 1
        request.served = tick
        nth = rounds[request.turn_id] = rounds.get(request.turn_id, 0) + 1
        cells.setdefault((nth, end - start), []).append(_row(request, start, end))
        if end < len(request.tokens):
            heapq.heappush(queue, (priority, tick, arrival, end, request))
    passes: list[Pass] = []
    for (_, length), rows in sorted(cells.items(), key=lambda item: item[0]):
        rows.sort(key=_slot_of)
        width = max(1, pass_tokens // length)
        passes.extend(Pass(tuple(rows[at : at + width]), prefill=True) for at in range(0, len(rows), width))
    return tuple(passes)


def _row(request: Request, start: int, end: int) -> Row:
    assert request.slot is not None
    chunk = Chunk(request.slot, start, request.tokens[start:end], sample=end == len(request.tokens))
    return Row(request.turn_id, chunk)


def _slot_of(row: Row) -> int:
    return row.chunk.slot


class PrefillBudget:
    """How many prompt tokens a step may read so that it takes about ``target_step_s``.

    Learned from what reading and generating took lately; ``floor_tokens`` until something was read, and never less.
    """

    def __init__(self, *, target_step_s: float, floor_tokens: int) -> None:
        self._target_step_s = target_step_s
        self._floor_tokens = floor_tokens
        self._tokens_per_s = 0.0
        self._decode_s = 0.0

    def tokens(self, *, decoding: bool) -> int:
        """Return the budget of the next step, in which others generate or not."""
        left_s = self._target_step_s - (self._decode_s if decoding else 0.0)
        return max(self._floor_tokens, int(self._tokens_per_s * left_s))

    def observe(self, *, prefill_tokens: int, prefill_s: float, decode_s: float) -> None:
        """Learn from a step; zero stands for a part that it did not have."""
        if prefill_tokens and prefill_s > 0:
            self._tokens_per_s = _average(self._tokens_per_s, prefill_tokens / prefill_s)
        if decode_s > 0:
            self._decode_s = _average(self._decode_s, decode_s)


def _average(old: float, new: float) -> float:
    return old + _NEWEST * (new - old) if old else new
