"""One turn as the scheduler sees it: its tokens, how many of them are in KV, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine

if TYPE_CHECKING:
    from inferencecenter.engine.speculation import Drafter

LOWEST_CLASS: Final = 2
"""Turns come in the classes 0 (interactive), 1 (normal) and 2 (batch); lower goes first."""


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RESTORING = "restoring"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class RequestChange(StrEnum):
    """What can happen to a request."""

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
    """A turn's tokens and how far it got.

    ``tokens`` is the prompt followed by what was sampled; the first ``kv_tokens`` of them are in the slot's KV, and
    ``cached_tokens`` already were when the request got its slot. A lower ``priority`` goes first, then a lower
    ``arrival``. ``due`` orders the reading of prompts: the tokens that all prompts together may have been read on
    before this one is finished.

    The first ``prefix_tokens`` are a system prompt that other sessions of the client share, and with ``public`` other
    clients too. Without ``durable`` nothing of the turn may be written to a disk. ``submitted_s`` is when it came,
    ``preempted`` how often others got its slot.

    ``waits_since_s`` is when it last began to wait, ``rank`` the class to which it has risen since, ``claimed`` what it
    then counts as served. ``served`` and ``used`` are service units (see ``fairness``), of its whole life and since it
    got its slot; ``read_tokens`` of its prompt have been paid for. ``cut_tokens`` is a position at which its prompt is
    cut beside the grid, and while ``snapshot`` is set no step reads past it, because what the slot holds there is to be
    parked. ``fetches`` and ``follows`` count what it waited for on its way to a slot. The ``drafter`` is there once it
    has generated something, where tokens are drafted.
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
    claimed_service: int = 0
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
        """Where the request is in its life."""
        return self._state

    @property
    def base_class(self) -> int:
        """The class it was submitted in; what lies outside the three counts as the nearest."""
        return min(max(self.priority, 0), LOWEST_CLASS)

    @property
    def generated_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """How many tokens are not in KV yet; 1 between two decodes."""
        return len(self.tokens) - self.kv_tokens

    @property
    def step_end(self) -> int:
        """How far a step may read."""
        return self.cut_tokens if self.snapshot and self.kv_tokens < self.cut_tokens else len(self.tokens)

    def periods(self, now: float, ageing_s: float) -> int:
        """Return how often it has waited ``ageing_s`` since it began to, at most once more than makes a difference."""
        periods = 0
        while periods <= self.base_class and self.rises_at(periods, ageing_s) <= now:
            periods += 1
        return periods

    def rises_at(self, periods: int, ageing_s: float) -> float:
        """Return when one more period than ``periods`` is over."""
        return self.waits_since_s + (periods + 1) * ageing_s

    def change(self, change: RequestChange) -> None:
        """Move on; the only writer of the state.

        Raises:
            IllegalTransitionError: The table has no such row.
        """
        self._state = REQUEST.next(self._state, change)

    def chunk_end(self, start: int, grid_tokens: int) -> int:
        """Return where the chunk that begins at ``start`` ends: at the grid's next line, at the cut, or at the end.

        A line less than half a cell away is passed over: a pass costs about as much for a few tokens as for a cell.
        """
        end = min(len(self.tokens), ((start + grid_tokens // 2) // grid_tokens + 1) * grid_tokens)
        return self.cut_tokens if start < self.cut_tokens < end else end
