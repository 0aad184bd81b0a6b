"""What the scheduler keeps between steps: each turn's tokens, state and service, and the content of each slot.

Mechanism of fair sharing: service is counted in units of a sixteenth of a token, one per prefilled prompt token and
sixteen per generated token. A prompt token costs between a third (small CPU) and a fiftieth (GPU) of a generated one; a
sixteenth is about the geometric mean. Units are integers, so equal claims compare equal. Waiting turns are ordered by
priority class, then by their client's counter, then by their own; a running turn yields its slot to an equal or
stronger claim once it has used its quantum (``placement.PreemptionPolicy``). Invariant: tokens that are prefilled again
because KV was lost are never charged, so a turn that holds a slot for a quantum advances by a quantum, however often
its KV is lost.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine
from inferencecenter.ipc.messages import LOWEST_CLASS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from inferencecenter.engine.images import ImageSpan
    from inferencecenter.engine.scheduler.speculation import Drafter


class RequestState(StrEnum):
    """State of a request."""

    WAITING = "waiting"
    RESTORING = "restoring"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class RequestChange(StrEnum):
    """Event that changes the state of a request."""

    ADMIT = "admit"
    FETCH = "fetch"
    FETCHED = "fetched"
    RESUME = "resume"
    PROMPT_READ = "prompt_read"
    KV_LOST = "kv_lost"
    PREEMPT = "preempt"
    END = "end"


REQUEST: Final = StateMachine(
    "request",
    {
        (RequestState.WAITING, RequestChange.ADMIT): RequestState.PREFILL,
        (RequestState.WAITING, RequestChange.FETCH): RequestState.RESTORING,
        (RequestState.RESTORING, RequestChange.FETCHED): RequestState.WAITING,
        (RequestState.WAITING, RequestChange.RESUME): RequestState.DECODE,
        (RequestState.PREFILL, RequestChange.PROMPT_READ): RequestState.DECODE,
        (RequestState.DECODE, RequestChange.KV_LOST): RequestState.PREFILL,
        (RequestState.PREFILL, RequestChange.PREEMPT): RequestState.WAITING,
        (RequestState.DECODE, RequestChange.PREEMPT): RequestState.WAITING,
        (RequestState.WAITING, RequestChange.END): RequestState.DONE,
        (RequestState.RESTORING, RequestChange.END): RequestState.DONE,
        (RequestState.PREFILL, RequestChange.END): RequestState.DONE,
        (RequestState.DECODE, RequestChange.END): RequestState.DONE,
    },
)


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A turn's tokens and its progress; not its ``Submit``, whose text is freed once it is tokenized.

    ``tokens`` is the prompt followed by the sampled tokens; the first ``kv_tokens`` of them are in the slot's KV, and
    ``cached_tokens`` were when the request got its first slot. A lower ``priority`` goes first, then a lower
    ``arrival``. ``due`` orders prefill: the total number of prompt tokens that may have been prefilled, over all turns,
    before this prompt is finished.

    The first ``prefix_tokens`` are a system prompt shared with other sessions of the client and, with ``public``, with
    other clients. Without ``durable`` nothing of the turn may be written to disk. ``submitted_s`` is its time of
    arrival, ``first_token_s`` that of its first token, which is infinite until then, and ``preempted`` how often it
    lost its slot.

    ``waits_since_s`` is when it last began to wait, ``effective_priority`` the class to which it has risen since,
    ``effective_service`` the service it then counts for. ``served`` and ``used`` are service units in
    total and since it got its slot; ``read_tokens`` prompt tokens have been charged. ``cut_tokens`` is a prompt
    position cut in addition to the grid; while ``snapshot`` is set no step prefills past it, because the slot's content
    at that position will be parked. ``fetches`` and ``follows`` count its waits for the disk and for other turns.
    ``drafter`` is set once it has generated a token, if drafting is enabled. ``spans`` are the rows of images in the
    prompt, and no step prefills past ``row_limit``, the first of them without embeddings.
    """

    turn_id: str
    session_id: str
    client_id: str
    priority: int
    arrival: int
    submitted_s: float
    tokens: list[int]
    prefix_tokens: int = 0
    public: bool = False
    durable: bool = True
    first_token_s: float = math.inf
    preempted: int = 0
    kv_tokens: int = 0
    cached_tokens: int = 0
    slot: int | None = None
    due: int = 0
    started: bool = False
    waits_since_s: float = field(init=False)
    effective_priority: int = field(init=False)
    effective_service: int = 0
    served: int = 0
    used: int = 0
    read_tokens: int = 0
    cut_tokens: int = 0
    snapshot: bool = False
    fetches: int = 0
    follows: int = 0
    drafter: Drafter | None = None
    spans: tuple[ImageSpan, ...] = ()
    row_limit: int | None = None
    prompt_tokens: int = field(init=False)
    _state: RequestState = RequestState.WAITING

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.prefix_tokens = min(self.prefix_tokens, self.prompt_tokens)
        self.waits_since_s = self.submitted_s
        self.effective_priority = self.base_class

    @property
    def state(self) -> RequestState:
        """State of the request; see ``REQUEST``."""
        return self._state

    @property
    def base_class(self) -> int:
        """The class it was submitted in, clamped to the valid range."""
        return min(max(self.priority, 0), LOWEST_CLASS)

    @property
    def generated_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of tokens not in KV yet; 1 between two decodes."""
        return len(self.tokens) - self.kv_tokens

    @property
    def step_end(self) -> int:
        """Position past which a step must not prefill."""
        end = self.cut_tokens if self.snapshot and self.kv_tokens < self.cut_tokens else len(self.tokens)
        return end if self.row_limit is None else min(end, self.row_limit)

    @property
    def reusable_tokens(self) -> int:
        """Most tokens whose KV may come from elsewhere: the last one is decoded, and with it the run that it ends."""
        last = len(self.tokens) - 1
        return next((span.start for span in self.spans if span.start <= last < span.end), last)

    def span_at(self, start: int) -> ImageSpan | None:
        """Return the run of rows that begins at a position."""
        return next((span for span in self.spans if span.start == start), None)

    def periods(self, now: float, ageing_s: float) -> int:
        """Return how many times it has waited ``ageing_s``, at most one more than the class it was submitted in."""
        periods = 0
        while periods <= self.base_class and self.rises_at(periods, ageing_s) <= now:
            periods += 1
        return periods

    def rises_at(self, periods: int, ageing_s: float) -> float:
        """Return when the period after ``periods`` ends."""
        return self.waits_since_s + (periods + 1) * ageing_s

    def change(self, change: RequestChange) -> None:
        """Apply a state change; the only writer of the state.

        Raises:
            IllegalTransitionError: The table has no such row.
        """
        self._state = REQUEST.next(self._state, change)

    def chunk_end(self, start: int, grid_tokens: int) -> int:
        """Return the end of the chunk that begins at ``start``: the next grid line, the cut, or the last token.

        A grid line less than half a cell away is skipped: a pass costs about as much for a few tokens as for a cell. A
        run of rows is a chunk of its own.
        """
        end = min(len(self.tokens), ((start + grid_tokens // 2) // grid_tokens + 1) * grid_tokens)
        if start < self.cut_tokens < end:
            end = self.cut_tokens
        for span in self.spans:
            if span.start == start:
                return span.end
            if start < span.start < end:
                return span.start
        return end


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
    """All slots of the context, by index. Invariant: each slot's ``tokens`` are what its KV stream holds."""

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
    """The use of a slot."""

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
