"""The state of one turn, from acceptance to its terminal event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import TurnStats
from inferencecenter.sessions.history import TOKEN_BYTES
from inferencecenter.sessions.observability import NullTracer, TurnRecord
from inferencecenter.sessions.output_parsing.assembler import ResponseAssembler, assembler_for
from inferencecenter.sessions.output_parsing.parser import OutputSpec, output_spec
from inferencecenter.sessions.prompt.plan import GeneratedAnswer
from inferencecenter.sessions.states import TURN, TurnChange, TurnState

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, TokenDelta
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Abort
    from inferencecenter.sessions.journal import PendingTurn, TurnSpec
    from inferencecenter.sessions.observability import TurnSpan
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.plan import Prompt
    from inferencecenter.sessions.session_config import SessionConfig


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """How a turn ended; ``finish`` is the wire's ``finish_reason``, or the error code of a turn that failed."""

    finish: str
    stats: TurnStats
    stop: str | None = None
    warnings: tuple[str, ...] = ()

    def record(self, config: SessionConfig, turn_id: str, *, model: str) -> TurnRecord:
        """Return the record of the ended turn for metrics and the log."""
        stats = self.stats
        return TurnRecord(
            client_id=config.client_id,
            session_id=config.session_id,
            turn_id=turn_id,
            model=model,
            finish=self.finish,
            queue_ms=stats.queue_ms,
            ttft_ms=stats.ttft_ms,
            total_ms=stats.total_ms,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            tokens=stats.tokens,
            tps=stats.tps,
            preempted=stats.preempted,
        )


class Turn:
    """The state of a turn. ``change`` is the only writer of ``state``.

    Args:
        spec: The request, parameters and model of the turn.
        submitted_at: Monotonic seconds of the submission.
        now: Monotonic seconds at which it enters the queue.
        restored: The turn as an earlier daemon stored it.

    Attributes:
        counted_tokens: Tokens of the answer whose usage is recorded before the end of the turn.
    """

    def __init__(self, spec: TurnSpec, *, submitted_at: float, now: float, restored: PendingTurn | None = None) -> None:
        tokens, text = (restored.tokens, restored.text) if restored is not None else (b"", "")
        self.spec = spec
        self.prompt: Prompt | None = None
        self.output_spec = OutputSpec()
        self.assembler: ResponseAssembler | None = None
        if restored is not None and restored.parts is not None:
            self.assembler = ResponseAssembler.restored(spec.turn_id, restored.parts)
        self.position = 0
        self.abort_request: Abort | None = None
        self.out_of_quota = False
        self.counted_tokens = 0
        self.trace: TurnSpan = NullTracer()
        self._state = TurnState.QUEUED
        self._measured_here = restored is not None
        self._texts = [text] if text else []
        self._tokens = bytearray(tokens)
        self._n_restored = len(tokens) // TOKEN_BYTES
        self._held_back = ""
        self._prompt_tokens: bytes | None = None
        self._prompt_counted = False
        self._n_prompt_tokens = 0
        self._cached_tokens = 0
        self._preempted = 0
        self._submitted_at = submitted_at
        self._queued_at: float | None = now
        self._queue_s = 0.0
        self._first_token_at: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn_id}, {self._state.value}, tokens={self.n_tokens})"

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.spec.turn_id

    @property
    def turn_key(self) -> str | None:
        """The client's idempotency key for the turn."""
        return self.spec.request.turn_key

    @property
    def request_id(self) -> str | None:
        """The id of the request frame."""
        return self.spec.request.id

    @property
    def state(self) -> TurnState:
        """The state of the turn."""
        return self._state

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def answer(self) -> GeneratedAnswer:
        """The answer so far."""
        return GeneratedAnswer(
            turn_id=self.turn_id,
            text=self._text,
            tokens=bytes(self._tokens),
            prompt_tokens=self._prompt_tokens,
            message=self.assembler.message() if self.assembler is not None else None,
        )

    @property
    def prompt_usage(self) -> tuple[int, int]:
        """Prompt tokens prefilled since this daemon started, and how many of them were cached."""
        return self._n_prompt_tokens, self._cached_tokens

    @property
    def content(self) -> str:
        """The answer's text so far, without reasoning and tool calls."""
        return self._text if self.assembler is None else self.assembler.content

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning; estimated from its share of the text if the assembler did not count them."""
        if self.assembler is None or not self.assembler.reasoning:
            return 0
        if self.assembler.has_parser:
            return self.assembler.reasoning_tokens
        return min(self.n_tokens, round(self.n_tokens * len(self.assembler.reasoning) / len(self._text)))

    @property
    def abort_request_id(self) -> str | None:
        """The id of the ``abort`` frame that the turn's terminal event answers, if there is one."""
        return self.abort_request.id if self.abort_request else None

    @property
    def forced_finish(self) -> str | None:
        """The ``finish_reason`` of a turn whose end is forced, by an abort or a used-up quota."""
        if self.abort_request is not None:
            return "aborted"
        return "quota_exceeded" if self.out_of_quota else None

    def change(self, change: TurnChange) -> None:
        """Apply a transition.

        Raises:
            IllegalTransitionError: The transition table has no such row.
        """
        self._state = TURN.next(self._state, change)

    def set_prompt(self, prompt: Prompt, spec: TurnSpec, *, capabilities: TemplateCapabilities) -> None:
        """Set the prompt to submit and its spec; ``capabilities`` of the template determine how output is parsed.

        Raises:
            InferenceCenterError: See ``output_spec``.
        """
        self.output_spec = output_spec(spec.request, capabilities=capabilities, prompt=prompt.text)
        self.spec, self.prompt = spec, prompt
        self.assembler = assembler_for(
            self.output_spec, self.assembler, turn_id=self.turn_id, text=self._text, n_tokens=self.n_tokens
        )

    def start(self, event: Started, *, now: float) -> int:
        """Handle the assignment of a slot; ``event`` contains the tokens of the prompt.

        Returns:
            Tokens to prefill that are not counted yet; 0 if the same prompt is prefilled again.
        """
        self.change(TurnChange.START)
        self._leave_queue(now)
        self._held_back = ""
        self._prompt_tokens = event.tokens
        self.trace.add_stages(event.stages)
        if self._prompt_counted:
            return 0
        n_tokens = len(event.tokens) // TOKEN_BYTES
        self._prompt_counted = True
        self._n_prompt_tokens += n_tokens
        self._cached_tokens += event.cached_tokens
        return n_tokens - event.cached_tokens

    def shift(self, event: ContextFull, *, now: float) -> None:
        """Return to the queue with a shorter prompt."""
        self._wait_again(TurnChange.SHIFT, now=now)
        self._prompt_counted = False
        self.trace.add_event("shifted", {"inferencecenter.tokens": event.n_tokens})
        if event.end is not None:
            self.trace.add_stages(event.end.stages)
            self._held_back = event.text
            self._preempted += event.end.preempted

    def interrupt(self, *, now: float) -> None:
        """Return to the queue after the loss of the engine."""
        self._wait_again(TurnChange.INTERRUPT, now=now)
        self.trace.add_event("interrupted", {"inferencecenter.tokens": self.n_tokens})

    def recall(self, *, now: float) -> None:
        """Return to the queue to be submitted to another engine."""
        self._wait_again(TurnChange.INTERRUPT, now=now)

    def extend(self, event: TokenDelta, *, now: float) -> None:
        """Append generated tokens and text."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._held_back = ""
        self._texts.append(event.text)
        self._tokens += event.tokens

    def take_held_back(self) -> str:
        """Return and clear the text that the engine held back at the last interruption."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def request_abort(self, request: Abort) -> None:
        """Set the abort request of a client.

        Raises:
            InferenceCenterError: ``turn_not_found`` if the request names another turn, ``nothing_to_abort`` if the turn
                is being aborted already.
        """
        if request.turn_id not in (None, self.turn_id):
            raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, f"the running turn is {self.turn_id}", field="turn_id")
        if self.abort_request is not None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, "the turn is being aborted already")
        self.abort_request = request

    def params_left(self, *, now: float) -> Params:
        """Return the parameters with the remaining time; the engine measures it from each submission."""
        limit_ms = self.spec.params.max_time_ms
        if limit_ms is None:
            return self.spec.params
        left_ms = max(1, limit_ms - round((now - self._submitted_at) * 1000))
        return self.spec.params.model_copy(update={"max_time_ms": left_ms})

    def finished_outcome(self, end: Finished, *, now: float) -> TurnOutcome:
        """Return the outcome that the engine reports; its figures cover the time since the last submission."""
        warnings = (*self.spec.warnings, *end.warnings)
        finish = self.forced_finish if self.forced_finish is not None and end.reason == "aborted" else end.reason
        if finish == "stop" and self.assembler is not None and self.assembler.complete_calls:
            finish = "tool_calls"
        if self._measured_here:
            stats = self._measured_stats(now=now, preempted=self._preempted + end.preempted)
            return TurnOutcome(finish, stats, stop=end.stop, warnings=warnings)
        stats = TurnStats(
            ttft_ms=round(end.ttft_ms, 2),
            total_ms=round(end.total_ms, 2),
            tokens=end.generated_tokens,
            tps=round(end.tokens_per_s, 2),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            queue_ms=round(end.queue_ms, 2),
            preempted=end.preempted,
        )
        return TurnOutcome(finish, stats, stop=end.stop, warnings=warnings)

    def forced_outcome(self, finish: str, *, now: float, warnings: tuple[str, ...] = ()) -> TurnOutcome:
        """Return the outcome of a turn that ends without a report of the engine."""
        stats = self._measured_stats(now=now, preempted=self._preempted)
        return TurnOutcome(finish, stats, warnings=(*self.spec.warnings, *warnings))

    def failed_outcome(self, failure: Failed, *, now: float) -> TurnOutcome:
        """Return the outcome of a failed turn."""
        return TurnOutcome(failure.code, self._measured_stats(now=now, preempted=self._preempted))

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _wait_again(self, change: TurnChange, *, now: float) -> None:
        self.change(change)
        self._measured_here = True
        self._prompt_tokens = None
        self._leave_queue(now)
        self._queued_at = now

    def _leave_queue(self, now: float) -> None:
        if self._queued_at is not None:
            self._queue_s += now - self._queued_at
            self._queued_at = None

    def _measured_stats(self, *, now: float, preempted: int) -> TurnStats:
        """Return the figures measured in this process; the speed covers the tokens of this process."""
        first = self._first_token_at
        generating_s = now - first if first is not None else 0.0
        waiting_s = now - self._queued_at if self._queued_at is not None else 0.0
        return TurnStats(
            ttft_ms=_ms(first - self._submitted_at) if first is not None else 0.0,
            total_ms=_ms(now - self._submitted_at),
            tokens=self.n_tokens,
            tps=round(max(0, self.n_tokens - self._n_restored - 1) / generating_s, 2) if generating_s > 0 else 0.0,
            prompt_tokens=self._n_prompt_tokens,
            cached_tokens=self._cached_tokens,
            queue_ms=_ms(self._queue_s + waiting_s),
            preempted=preempted,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
