"""The scheduler's policies: fair sharing, preemption, slot choice, compaction, prefill budget, time quantum, limits.

Mechanism of fair sharing: service is counted in units of a sixteenth of a token, one per prefilled prompt token and
sixteen per generated token. A prompt token costs between a third (small CPU) and a fiftieth (GPU) of a generated one; a
sixteenth is about the geometric mean. Units are integers, so equal claims compare equal. Waiting turns are ordered by
priority class, then by their client's counter, then by their own; a running turn yields its slot to an equal or
stronger claim once it has used its quantum. Invariant: tokens that are prefilled again because KV was lost are never
charged, so a turn that holds a slot for a quantum advances by a quantum, however often its KV is lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.scheduler.plan import DecodePass, DecodeRow
from inferencecenter.engine.scheduler.state import RequestState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from inferencecenter.engine.scheduler.state import EngineRequest, Slot, SlotTable
    from inferencecenter.engine.speculation import Drafts


PREFILL_UNITS: Final = 1
DECODE_UNITS: Final = 16


class ServiceCounters:
    """Service per client, kept only as long as it is needed to compare the clients present.

    Idle time earns no credit: an arriving client is raised to the lowest counter among waiting clients or, if none
    waits, to the highest among running ones. It owes nothing either, because it starts at that value (virtual token
    counters: Sheng et al., Fairness in Serving Large Language Models, 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._turns: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._served)

    def served(self, client_id: str) -> int:
        """Return a client's counter in service units."""
        return self._served.get(client_id, 0)

    def enter(self, client_id: str) -> None:
        """Count a turn of the client in."""
        self._turns[client_id] += 1

    def leave(self, client_id: str) -> None:
        """Count a turn of the client out; the last turn of all clears every counter."""
        self._turns[client_id] -= 1
        if not self._turns[client_id]:
            del self._turns[client_id]
        if not self._turns:
            self._served.clear()

    def raise_to(self, client_id: str, units: int) -> None:
        """Raise a client's counter to at least ``units``."""
        if units > self.served(client_id):
            self._served[client_id] = units

    def charge(self, request: EngineRequest, units: int) -> None:
        """Charge a turn and its client."""
        request.served += units
        request.used += units
        self._served[request.client_id] = self.served(request.client_id) + units

    def most(self, client_ids: Iterable[str]) -> int:
        """Return the highest counter of these clients."""
        return max(map(self.served, client_ids), default=0)

    def check_integrity(self, turns: Iterable[EngineRequest]) -> None:
        """Raise ``AssertionError`` when the counters contradict the turns present."""
        assert self._turns == Counter(request.client_id for request in turns), f"turns counted wrong: {self._turns}"
        assert all(units > 0 for units in self._served.values()), f"a counter is not positive: {self._served}"


def charge_prefill(counters: ServiceCounters, request: EngineRequest) -> None:
    """Charge prompt tokens that were prefilled for the first time."""
    read = min(request.kv_tokens, request.prompt_tokens)
    if read > request.read_tokens:
        counters.charge(request, (read - request.read_tokens) * PREFILL_UNITS)
        request.read_tokens = read


def charge_decode(counters: ServiceCounters, request: EngineRequest, n_tokens: int) -> None:
    """Charge sampled tokens."""
    counters.charge(request, n_tokens * DECODE_UNITS)


class PreemptionPolicy:
    """Decides which running turn loses its slot to a waiting one.

    A turn that has used its quantum yields to any claim that is at least equal: class, then its client's service, then
    its own. After a quarter of the quantum a decoding turn yields to an equal claim of a turn that counts as never
    served, which shortens the time to first token, and to a turn whose client is more than a quantum behind, so that
    new turns do not starve it. Every turn yields to a higher class. A turn that rose a class by waiting keeps that
    class for one quantum.

    A turn in prefill yields only to a turn with less to prefill: prompts that take turns would all be late.

    Args:
        counters: Service per client.
        quantum_units: The quantum of this step in service units.
    """

    def __init__(self, counters: ServiceCounters, quantum_units: int) -> None:
        self._counters = counters
        self._quantum_units = quantum_units

    def possible(self, running: EngineRequest) -> bool:
        """Return whether a turn can lose its slot to any other turn."""
        return 4 * running.used >= self._quantum_units

    def spent(self, running: EngineRequest) -> bool:
        """Return whether a turn has used its quantum."""
        return running.used >= self._quantum_units

    def allowed(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Return whether the claims allow a waiting turn to preempt a running one."""
        if not self.possible(running):
            return False
        priority = self._effective_priority(running)
        if waiting.effective_priority != priority:
            return waiting.effective_priority < priority
        claim, other = (self._counters.served(waiting.client_id), waiting.effective_service), self._claim(running)
        if claim > other:
            return False
        if self.spent(running):
            return True
        soon = waiting.effective_service == 0 or claim[0] + self._quantum_units < other[0]
        return soon and running.state is RequestState.DECODE

    def overtakes(self, waiting: EngineRequest, running: EngineRequest, *, cached_tokens: int) -> bool:
        """Return whether a waiting turn with ``cached_tokens`` in KV may interrupt a prefill, given ``allowed``."""
        if running.state is not RequestState.PREFILL or waiting.effective_priority < self._effective_priority(running):
            return True
        return len(waiting.tokens) - cached_tokens < running.pending_tokens

    def weakness(self, running: EngineRequest) -> tuple[int, int, int, int]:
        """Return a sort key; the weakest claim among running turns has the largest key."""
        return (self._effective_priority(running), *self._claim(running), running.arrival)

    def _effective_priority(self, running: EngineRequest) -> int:
        return running.base_class if self.spent(running) else running.effective_priority

    def _claim(self, running: EngineRequest) -> tuple[int, int]:
        return (self._counters.served(running.client_id), running.served)


_FIRST_TOKENS: Final = 32
_LEAST_TOKENS: Final = 16
_MOST_TOKENS: Final = 512
_PARKING_SHARE: Final = 0.03
# Preempting a turn takes one save and one restore.
_MOVES_PER_PREEMPTION: Final = 2
# Weight of the newest step: moves are few, and the first ones into fresh memory take ten times as long as later ones.
_QUANTUM_EWMA_WEIGHT: Final = 0.2


def ewma(old: float, new: float, *, weight: float) -> float:
    """Return the exponentially weighted moving average; ``new`` itself when ``old`` is 0."""
    return old + weight * (new - old) if old else new


# Weight of the newest step in the averages: they follow a change within a few steps and absorb one outlier.
_BUDGET_EWMA_WEIGHT = 0.3
_PREFILL_SHARE = 6.0
_LONGEST_S = 1.0


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


@lru_cache(maxsize=256)
def compaction(slot_uses: tuple[SlotUse, ...]) -> tuple[tuple[int, int], ...]:
    """Return the swaps, in order, that make busy slots consecutive and the decoding ones among them too.

    llama.cpp decodes only consecutive streams together; a gap costs another pass over all weights, and so does a
    prefilling slot between two decoding ones. The busier slot of a pair comes first.
    """
    uses = list(slot_uses)
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


def _decode_row(request: EngineRequest, drafts: Drafts) -> DecodeRow:
    turn_id = request.turn_id
    row = _row(request, request.kv_tokens, len(request.tokens), drafts.tokens.get(turn_id, ()))
    return replace(row, draft=drafts.requests.get(turn_id))


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
    time: a turn waiting for its first token keeps the batch small for all. Where more turns wait for it than decode,
    that time grows with their ratio, up to ``_LONGEST_S``: in a burst every decode step for the few that are ahead
    delays the many, and full batches decode sooner. Learned from recent prefill and decode times, separately for one
    prompt and for several, since a pass of several is faster per token. ``floor_tokens`` is the minimum, and the value
    until there is a measurement.
    """

    def __init__(self, *, target_step_s: float, floor_tokens: int) -> None:
        self._target_step_s = target_step_s
        self._floor_tokens = floor_tokens
        self._tokens_per_s = {True: 0.0, False: 0.0}
        self._decode_s = 0.0

    def tokens(self, *, n_prefilling: int, n_decoding: int) -> int:
        """Return the budget of a step that prefills ``n_prefilling`` prompts while ``n_decoding`` turns decode."""
        decode_s = self._decode_s if n_decoding else 0.0
        prefill_s = max(self._target_step_s - decode_s, _PREFILL_SHARE * decode_s)
        if n_decoding:
            prefill_s = max(prefill_s, min(_LONGEST_S, _PREFILL_SHARE * decode_s * n_prefilling / n_decoding))
        tokens_per_s = self._tokens_per_s[True] if n_prefilling == 1 else max(self._tokens_per_s.values())
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
