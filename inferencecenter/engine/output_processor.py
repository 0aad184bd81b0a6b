"""A turn's output: releasable text, finish reason, tokens kept in the history, trace stages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from msgspec import structs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.sampling.chain import learns
from inferencecenter.engine.sampling.text import RepetitionDetector, StopScanner, TokenText
from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, TokenDelta, TraceStage, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Sampled
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.messages import Submit, TurnEvent
    from inferencecenter.protocol.params import Params


MAX_STAGES: Final = 256
"""A turn preempted so often that it exceeds this reports its first stages and its last one."""


class Timeline:
    """One turn's stages from submission to end: queued, prefill, decode, and queued again when preempted.

    Times are monotonic seconds. Each stage is reported once.

    Args:
        submitted_s: When the turn was submitted.
    """

    def __init__(self, submitted_s: float) -> None:
        self._stages: list[TraceStage] = []
        self._name: str | None = "queue"
        self._since_s = submitted_s
        self._n_tokens = 0

    def enter(self, name: str, *, at_s: float, n_tokens: int) -> None:
        """End the current stage and begin another, with ``n_tokens`` of prompt and answer done."""
        # A prompt was prefilled completely if decode follows; otherwise its progress is unknown.
        known = self._name == "decode" or (self._name == "prefill" and name == "decode")
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if known else 0)
        self._name, self._since_s, self._n_tokens = name, at_s, n_tokens

    def record_move(self, stage: TraceStage) -> None:
        """Record a move of the turn's KV; a load into its slot ends the queue stage."""
        if self._name == "queue" and stage.name != "park":
            self._leave(at_s=stage.began_s)
        self._add(stage)

    def end(self, *, at_s: float, n_tokens: int) -> None:
        """End the last stage, with ``n_tokens`` of prompt and answer done."""
        if len(self._stages) == MAX_STAGES:
            del self._stages[-1]
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if self._name == "decode" else 0)

    def take_finished(self) -> tuple[TraceStage, ...]:
        """Return the finished stages that were not reported yet."""
        stages, self._stages = tuple(self._stages), []
        return stages

    def _leave(self, *, at_s: float, done: int = 0) -> None:
        if self._name is not None:
            self._add(TraceStage(self._name, self._since_s, at_s, done))
            self._name = None

    def _add(self, stage: TraceStage) -> None:
        if len(self._stages) < MAX_STAGES:
            self._stages.append(stage)


TimeoutReason: TypeAlias = Literal["time", "queue_timeout"]


class Detokenizer(Protocol):
    """Token lookups, callable from any thread; implemented by every backend."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text."""

    def token_text(self, token: int) -> str:
        """Return a token's name, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation."""


@dataclass(frozen=True, slots=True)
class _End:
    """Why an answer is complete, and the stop string or pattern that matched."""

    reason: str
    stop: str | None


class OutputProcessor:
    """One turn from its submission to its last event; used by one thread at a time.

    Text that could become a stop string is held back; it is released when the turn ends for another reason.

    A turn that resumes after its prompt was shortened or its engine was lost replays its earlier answer without events:
    text that was held back is held back again, and output begins at the first character that was not emitted, whether
    in the earlier answer or in new tokens. Counts and the text kept in the history cover the whole answer. Times do
    not: they and ``max_time_ms`` start at the last submission. An earlier answer that is complete, because the engine
    was lost after its last token but before its end was received, is ``complete`` here too, and nothing more is
    generated.

    Args:
        turn: The request.
        vocabulary: Token lookups.
        params: Its parameters; those of stopping are applied here, the others by the sampler.
        answer: The tokens of its earlier answer.
        constraint: Restricts the next tokens; it has consumed ``answer``.
        prompt_tokens: Tokens of the whole prompt.
        n_ctx: Tokens that prompt and answer may have together.
        submitted_s: When it was submitted, in monotonic seconds.
        queue_timeout_s: Seconds within which the turn must get a slot; infinite for no limit.
        clock: CPU seconds of the calling thread, which stop patterns are charged for.

    Raises:
        InferenceCenterError: ``invalid_request`` when a stop pattern proves too slow for the earlier answer.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        turn: Submit,
        vocabulary: Detokenizer,
        *,
        params: Params,
        prompt_tokens: int,
        n_ctx: int,
        submitted_s: float,
        answer: Sequence[int] = (),
        constraint: Constraint | None = None,
        queue_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.turn_id = turn.turn_id
        self.params = params
        self.constraint = constraint
        self._markers = turn.markers
        self.ended = False
        self.n_answered = len(answer)
        self._may_shift = turn.may_shift
        self._vocabulary = vocabulary
        self._prompt_tokens = prompt_tokens
        self._room_tokens = n_ctx - prompt_tokens
        self._cached_tokens = 0
        self._preempted = 0
        self._generated_tokens = 0
        self._end_text = ""
        self._text = TokenText()
        self._shown_chars = turn.shown_chars
        self._warnings: tuple[str, ...] = ()
        self._scanner = StopScanner(params.stop, params.stop_regex, clock=clock)
        self._repetition = RepetitionDetector(params.stop_on_repetition) if params.stop_on_repetition else None
        self._submitted_s = submitted_s
        limit_ms = params.max_time_ms
        self._ends_s = math.inf if limit_ms is None else submitted_s + limit_ms / 1000
        # A resumed turn has already had a slot.
        self._starts_s = math.inf if answer else submitted_s + queue_timeout_s
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._reads = True
        self._timeline = Timeline(submitted_s) if turn.traced else None
        self._end: _End | None = None
        # Text that was released but not emitted, and the number of characters emitted but not released.
        self._unsent, self._ahead_chars = self._replay(answer)

    @property
    def complete(self) -> bool:
        """Whether the earlier answer is complete; the turn is then concluded, not started."""
        return self._end is not None

    @property
    def traced(self) -> bool:
        """Whether the turn records its stages."""
        return self._timeline is not None

    @property
    def deadlines_s(self) -> tuple[float, float]:
        """Monotonic deadlines for getting a slot and for ending; infinite for no limit."""
        return self._starts_s, self._ends_s

    def timeout_reason(self, now: float) -> TimeoutReason | None:
        """Return which limit has passed: ``max_time_ms`` since submission, or the queue timeout."""
        if now >= self._ends_s:
            return "time"
        return "queue_timeout" if self._started_s is None and now >= self._starts_s else None

    def start(self, prompt: Sequence[int], *, cached_tokens: int, now: float) -> Started:
        """Record that the turn got its slot, with ``cached_tokens`` of the prompt in KV."""
        self._started_s = now
        self._cached_tokens = min(cached_tokens, len(prompt))  # the rest of them belongs to the earlier answer
        if self.n_answered and (learner := learns(self.params)) is not None:
            self._warnings = (f"{learner} lost its state after {self.n_answered} tokens, where the answer resumed",)
        self._enter("prefill", at_s=now, n_tokens=cached_tokens)
        return Started(self.turn_id, pack_tokens(prompt), self._cached_tokens, self._finished_stages())

    def conclude(self, prompt: Sequence[int], *, now: float) -> tuple[TurnEvent, ...]:
        """End a turn whose earlier answer is complete, without prefilling its prompt."""
        assert self._end is not None
        end = self._end
        if end.reason == "context_full" and self._may_shift:
            return (self.overflow(now=now),)
        started = self.start(prompt, cached_tokens=len(prompt), now=now)
        self._warnings = ()
        return started, *self._ended(end.reason, stop=end.stop, now=now)

    def preempt(self, *, now: float) -> None:
        """Record that another turn got the slot."""
        self._preempted += 1
        self._enter("queue", at_s=now, n_tokens=self._n_tokens)

    def resume(self, *, now: float, kv_tokens: int, reads: bool) -> None:
        """Record that the turn got a slot again with ``kv_tokens`` in KV; ``reads``: the rest is prefilled first."""
        self._reads = reads
        self._enter("prefill" if reads else "decode", at_s=now, n_tokens=kv_tokens if reads else self._n_tokens)

    def record_move(self, stage: TraceStage) -> None:
        """Record that the turn's KV was moved from a slot or into one."""
        if self._timeline is not None:
            self._timeline.record_move(stage)

    def push(self, sampled: Sampled, *, now: float) -> tuple[TurnEvent, ...]:
        """Consume the next token and return its events, including the turn's end.

        Raises:
            InferenceCenterError: ``invalid_request`` when a stop pattern proves too slow; the turn has not ended.
        """
        if self._reads:
            self._begin_decode(now)
        released, end = self._take(sampled.token)
        if end is None and now >= self._ends_s:
            end = _End("time", None)
        shifts = end is not None and end.reason == "context_full" and self._may_shift
        text = self._delta(released if end is None or shifts else released + self._scanner.finish())
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        delta = TokenDelta(self.turn_id, pack_tokens((sampled.token,)), text, logprobs)
        if end is None:
            return (delta,)
        return delta, self.overflow(now=now) if shifts else self._finish(end.reason, stop=end.stop, now=now)

    def end(self, reason: str, *, now: float) -> tuple[TurnEvent, ...]:
        """End the turn between two tokens, as aborted or timed out, and return its last events.

        A turn whose earlier answer is complete keeps that end.
        """
        end = self._end or _End(reason, None)
        return self._ended(end.reason, stop=end.stop, now=now)

    def overflow(self, *, now: float) -> ContextFull:
        """End the turn in this engine: the context is full, but the turn may resume with a shorter prompt.

        ``n_tokens`` counts prompt and answer. A turn without generated tokens ends as one that never began.
        """
        n_tokens = self._prompt_tokens + self._generated_tokens
        if not self._generated_tokens:
            self._mark_ended()
            return ContextFull(turn_id=self.turn_id, n_tokens=n_tokens)
        text = self._delta(self._scanner.finish())
        end = self._finish("context_full", stop=None, now=now)
        return ContextFull(turn_id=self.turn_id, n_tokens=n_tokens, text=text, end=end)

    def fail(self, error: InferenceCenterError, *, now: float) -> Failed:
        """End the turn with an error."""
        self._mark_ended()
        return structs.replace(failed(self.turn_id, error), stages=self._finished_stages(ended_s=now))

    def _begin_decode(self, now: float) -> None:
        """Record that prefill is complete."""
        self._reads = False
        self._first_s = now if self._first_s is None else self._first_s
        self._enter("decode", at_s=now, n_tokens=self._n_tokens)

    def _replay(self, answer: Sequence[int]) -> tuple[str, int]:
        """Replay the earlier answer; return its text to emit and the number of characters already emitted beyond it."""
        texts: list[str] = []
        for token in answer:
            released, end = self._take(token)
            texts.append(released)
            # The prompt may have been shorter before: an end after a full context is the actual end.
            if self._end is None or self._end.reason == "context_full":
                self._end = end
        text = "".join(texts)
        return text[self._shown_chars :], max(0, self._shown_chars - len(text))

    def _take(self, token: int) -> tuple[str, _End | None]:
        """Add a token to the answer; return the text it releases and the end that it reaches, if any."""
        self._generated_tokens += 1
        is_end = self._vocabulary.is_end(token)
        if is_end:
            self._end_text = self._vocabulary.token_text(token)
        scan = self._scanner.feed(self._text.push(b"" if is_end else self._bytes(token)))
        if is_end or scan.stop is not None:
            return scan.text, _End("stop", scan.stop)
        if self._repetition is not None and self._repetition.push(token):
            return scan.text, _End("repetition", None)
        if self.params.max_tokens is not None and self._generated_tokens >= self.params.max_tokens:
            return scan.text, _End("length", None)
        return scan.text, _End("context_full", None) if self._generated_tokens >= self._room_tokens else None

    def _bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to this answer's text."""
        shown = self._vocabulary.token_bytes(token)
        if not shown and self._markers and (name := self._vocabulary.token_text(token)) in self._markers:
            return name.encode()
        return shown

    def _delta(self, released: str) -> str:
        """Return the text to emit when ``released`` is released."""
        text = self._unsent + released
        emitted = text[self._ahead_chars :]
        self._unsent, self._ahead_chars = "", max(0, self._ahead_chars - len(text))
        self._shown_chars += len(emitted)
        return emitted

    def _ended(self, reason: str, *, stop: str | None, now: float) -> tuple[TurnEvent, ...]:
        text = self._delta(self._scanner.finish())
        finished = self._finish(reason, stop=stop, now=now)
        return (TokenDelta(self.turn_id, b"", text), finished) if text else (finished,)

    def _finish(self, reason: str, *, stop: str | None, now: float) -> Finished:
        kept_tokens, kept_chars = self._text.kept(self._shown_chars)
        # After an incomplete character the end token cannot be kept: the history has no gaps.
        end_text = self._end_text if kept_tokens == self._generated_tokens else ""
        first_s = now if self._first_s is None else self._first_s
        streamed = self._generated_tokens - self.n_answered - 1
        self._mark_ended()
        return Finished(
            turn_id=self.turn_id,
            reason=reason,
            stop=stop,
            kept_tokens=kept_tokens,
            kept_chars=kept_chars,
            end_text=end_text,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            queue_ms=((now if self._started_s is None else self._started_s) - self._submitted_s) * 1000,
            ttft_ms=(first_s - self._submitted_s) * 1000,
            total_ms=(now - self._submitted_s) * 1000,
            tokens_per_s=streamed / (now - first_s) if streamed > 0 and now > first_s else 0.0,
            preempted=self._preempted,
            warnings=self._warnings,
            stages=self._finished_stages(ended_s=now),
        )

    @property
    def _n_tokens(self) -> int:
        return self._prompt_tokens + self._generated_tokens

    def _enter(self, stage: str, *, at_s: float, n_tokens: int) -> None:
        if self._timeline is not None:
            self._timeline.enter(stage, at_s=at_s, n_tokens=n_tokens)

    def _finished_stages(self, *, ended_s: float | None = None) -> tuple[TraceStage, ...]:
        """Return the stages not reported yet; ``ended_s`` ends the last one."""
        if self._timeline is None:
            return ()
        if ended_s is not None:
            self._timeline.end(at_s=ended_s, n_tokens=self._n_tokens)
        return self._timeline.take_finished()

    def _mark_ended(self) -> None:
        if self.ended:
            raise ValueError(f"turn {self.turn_id} has ended already")
        self.ended = True


def failure_of(
    error: BaseException, doing: str, message: str = "", *, on_log: Callable[[str, str], None]
) -> InferenceCenterError:
    """Return the failure of one turn, or one lookup, for an exception that must not end the others.

    One that is no ``InferenceCenterError`` is a defect: it is logged, and the client gets ``internal``.
    """
    if isinstance(error, InferenceCenterError):
        return error
    on_log("error", f"{doing} failed: {error!r}")
    return InferenceCenterError(ErrorCode.INTERNAL, message)


def failed(turn_id: str, error: InferenceCenterError) -> Failed:
    """Return the terminal event of a turn that failed with ``error``."""
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def never_ran(turn_id: str, reason: str, *, waited_s: float) -> Finished:
    """Return the terminal event of a turn that ended before its prompt was tokenized."""
    return Finished(
        turn_id=turn_id,
        reason=reason,
        stop=None,
        kept_tokens=0,
        kept_chars=0,
        end_text="",
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        queue_ms=waited_s * 1000,
        ttft_ms=waited_s * 1000,
        total_ms=waited_s * 1000,
        tokens_per_s=0.0,
    )
