"""One question and its answer, from acceptance to its one terminal event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.protocol.values import TurnStats
from inferencecenter.sessions.prompt import TOKEN_BYTES, Answer
from inferencecenter.sessions.states import TURN, TurnChange, TurnState

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import Delta, Failed, Finished, Started
    from inferencecenter.protocol.requests import Abort, Infer
    from inferencecenter.sessions.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended; ``finish`` is the wire's ``finish_reason``, or the error code of a turn that failed."""

    finish: str
    stats: TurnStats
    stop: str | None = None
    warnings: tuple[str, ...] = ()


class Turn:
    """What is known of a turn so far. ``change`` is the only writer of its state.

    Args:
        turn_id: Its name on the wire and in the engine.
        request: The frame that caused it.
        prompt: What was submitted.
        warnings: Legal settings without effect.
        now: Seconds of the clock that all later times are of.
    """

    def __init__(self, turn_id: str, request: Infer, *, prompt: Prompt, warnings: tuple[str, ...], now: float) -> None:
        self.turn_id = turn_id
        self.request_id = request.id
        self.turn_key = request.turn_key
        self.prompt = prompt
        self._warnings = warnings
        self.position = 0
        self.abort_request: Abort | None = None
        self._state = TurnState.QUEUED
        self._texts: list[str] = []
        self._tokens = bytearray()
        self._prompt_tokens: bytes | None = None
        self._cached_tokens = 0
        self._submitted_at = now
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn_id}, {self._state.value}, tokens={self.n_tokens})"

    @property
    def state(self) -> TurnState:
        """Where the turn is in its life."""
        return self._state

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def answer(self) -> Answer:
        """What was said so far."""
        return Answer(text="".join(self._texts), tokens=bytes(self._tokens), prompt_tokens=self._prompt_tokens)

    @property
    def ending_id(self) -> str | None:
        """The frame that the turn's terminal event answers, if one asked for its end."""
        return self.abort_request.id if self.abort_request else None

    def change(self, change: TurnChange) -> None:
        """Go to the next state.

        Raises:
            IllegalTransitionError: The table of turns has no such row.
        """
        self._state = TURN.after(self._state, change)

    def start(self, event: Started, *, now: float) -> None:
        """Take note that the turn has a slot, and of which tokens its prompt consists."""
        self.change(TurnChange.START)
        self._prompt_tokens = event.tokens
        self._cached_tokens = event.cached_tokens
        self._started_at = now

    def extend(self, event: Delta, *, now: float) -> None:
        """Take in what was generated."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._texts.append(event.text)
        self._tokens += event.tokens

    def reported(self, end: Finished) -> Outcome:
        """Return how the turn ended as the engine says."""
        stats = TurnStats(
            ttft_ms=round(end.ttft_ms, 2),
            total_ms=round(end.total_ms, 2),
            tokens=end.generated_tokens,
            tps=round(end.tokens_per_s, 2),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            queue_ms=round(end.queue_ms, 2),
            preempted=0,
        )
        return Outcome(end.reason, stats, stop=end.stop, warnings=(*self._warnings, *end.warnings))

    def cut_short(self, *, now: float) -> Outcome:
        """Return how the turn ended that is aborted without waiting for the engine."""
        return Outcome("aborted", self._measured(now=now), warnings=self._warnings)

    def failed(self, failure: Failed, *, now: float) -> Outcome:
        """Return how the turn ended that could not go on."""
        return Outcome(failure.code, self._measured(now=now))

    def _measured(self, *, now: float) -> TurnStats:
        """How the turn went as seen from here."""
        first, started = self._first_token_at, self._started_at
        generating_s = now - first if first is not None else 0.0
        return TurnStats(
            ttft_ms=_ms(first - self._submitted_at) if first is not None else 0.0,
            total_ms=_ms(now - self._submitted_at),
            tokens=self.n_tokens,
            tps=round((self.n_tokens - 1) / generating_s, 2) if generating_s > 0 else 0.0,
            prompt_tokens=len(self._prompt_tokens or b"") // TOKEN_BYTES,
            cached_tokens=self._cached_tokens,
            queue_ms=_ms((started if started is not None else now) - self._submitted_at),
            preempted=0,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
