"""What the scheduler keeps between steps: each turn's tokens, state and service, and the content of each slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine
from inferencecenter.ipc.messages import LOWEST_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.engine.speculation import Drafter


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
    """A turn's tokens and its progress.

    ``tokens`` is the prompt followed by the sampled tokens; the first ``kv_tokens`` of them are in the slot's KV, and
    ``cached_tokens`` were when the request got its first slot. A lower ``priority`` goes first, then a lower
    ``arrival``. ``due`` orders prefill: the total number of prompt tokens that may have been prefilled, over all turns,
    before this prompt is finished.

    The first ``prefix_tokens`` are a system prompt shared with other sessions of the client and, with ``public``, with
    other clients. Without ``durable`` nothing of the turn may be written to disk. ``submitted_s`` is its time of
    arrival, ``preempted`` how often it lost its slot.

    ``waits_since_s`` is when it last began to wait, ``effective_priority`` the class to which it has risen since,
    ``effective_service`` the service it then counts for. ``served`` and ``used`` are service units (see ``policy``) in
    total and since it got its slot; ``read_tokens`` prompt tokens have been charged. ``cut_tokens`` is a prompt
    position cut in addition to the grid; while ``snapshot`` is set no step prefills past it, because the slot's content
    at that position will be parked. ``fetches`` and ``follows`` count its waits for the disk and for other turns.
    ``drafter`` is set once it has generated a token, if drafting is enabled.
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
        return self.cut_tokens if self.snapshot and self.kv_tokens < self.cut_tokens else len(self.tokens)

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

        A grid line less than half a cell away is skipped: a pass costs about as much for a few tokens as for a cell.
        """
        end = min(len(self.tokens), ((start + grid_tokens // 2) // grid_tokens + 1) * grid_tokens)
        return self.cut_tokens if start < self.cut_tokens < end else end


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
