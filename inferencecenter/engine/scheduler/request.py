"""One turn as the scheduler sees it: its tokens, how many of them are in KV, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from inferencecenter.lifecycle import Lifecycle


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class RequestChange(StrEnum):
    """What can happen to a request."""

    ADMIT = "admit"
    PROMPT_READ = "prompt_read"
    END = "end"


REQUEST: Final = Lifecycle(
    "request",
    {
        (RequestState.WAITING, RequestChange.ADMIT): RequestState.PREFILL,
        (RequestState.PREFILL, RequestChange.PROMPT_READ): RequestState.DECODE,
        (RequestState.WAITING, RequestChange.END): RequestState.DONE,
        (RequestState.PREFILL, RequestChange.END): RequestState.DONE,
        (RequestState.DECODE, RequestChange.END): RequestState.DONE,
    },
)


@dataclass(slots=True, kw_only=True)
class Request:
    """A turn's tokens and how far it got.

    ``tokens`` is the prompt followed by what was sampled; the first ``kv_tokens`` of them are in the slot's KV, and
    ``cached_tokens`` already were when the request got its slot. A lower ``priority`` goes first, then a lower
    ``arrival``. ``due`` orders the reading of prompts: the tokens that all prompts together may have been read on
    before this one is finished.

    The first ``prefix_tokens`` are a system prompt that other sessions of the client share, and with ``public`` other
    clients too. Without ``durable`` nothing of the turn may be written to a disk. ``submitted_s`` is when it came,
    ``preempted`` how often others got its slot.
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
    prompt_tokens: int = field(init=False)
    _state: RequestState = RequestState.WAITING

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def state(self) -> RequestState:
        """Where the request is in its life."""
        return self._state

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the queue: class first, then first come, first served."""
        return (self.priority, self.arrival)

    @property
    def generated_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """How many tokens are not in KV yet; 1 between two decodes."""
        return len(self.tokens) - self.kv_tokens

    def change(self, change: RequestChange) -> None:
        """Move on; the only writer of the state.

        Raises:
            IllegalTransitionError: The table has no such row.
        """
        self._state = REQUEST.after(self._state, change)

    def chunk_end(self, start: int, grid_tokens: int) -> int:
        """Return where the chunk that begins at ``start`` ends: at the grid's next line or with the tokens."""
        return min(len(self.tokens), (start // grid_tokens + 1) * grid_tokens)
