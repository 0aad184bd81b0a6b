"""A turn's output: text that may be shown, the reason it ends, the tokens that stay in the history, trace stages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from msgspec import structs

from inferencecenter.engine.sampling.chain import learns
from inferencecenter.engine.sampling.detokenizer import TokenText
from inferencecenter.engine.sampling.stop import RepetitionDetector, StopScanner
from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, TokenDelta, TraceStage, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.core.errors import InferenceCenterError
    from inferencecenter.engine.backend import Sampled
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.engine.sampling.stop import Scan
    from inferencecenter.ipc.messages import TurnEvent
    from inferencecenter.protocol.params import Params


MAX_STAGES: Final = 256
"""A turn that was preempted so often that it has more of them tells the first ones and its last."""


class Timeline:
    """One turn's stages from its submission to its end: it waits, is read, generates, and may wait again.

    Seconds are of the monotonic clock. Each stage is told once.

    Args:
        submitted_s: When the turn came, and began to wait.
    """

    def __init__(self, submitted_s: float) -> None:
        self._stages: list[TraceStage] = []
        self._name: str | None = "queue"
        self._since_s = submitted_s
        self._n_tokens = 0

    def enter(self, name: str, *, at_s: float, n_tokens: int) -> None:
        """End the stage that it is in and begin another, with ``n_tokens`` of prompt and answer done."""
        # A prompt was read as a whole if the answer follows; of any other it is not known how far it was read.
        known = self._name == "decode" or (self._name == "prefill" and name == "decode")
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if known else 0)
        self._name, self._since_s, self._n_tokens = name, at_s, n_tokens

    def moved(self, stage: TraceStage) -> None:
        """Take note that the turn's KV was moved; what is put into a slot for it ends its waiting."""
        if self._name == "queue" and stage.name != "park":
            self._leave(at_s=stage.began_s)
        self._add(stage)

    def end(self, *, at_s: float, n_tokens: int) -> None:
        """End the last stage, with ``n_tokens`` of prompt and answer done."""
        if len(self._stages) == MAX_STAGES:
            del self._stages[-1]
        self._leave(at_s=at_s, done=n_tokens - self._n_tokens if self._name == "decode" else 0)

    def take_finished(self) -> tuple[TraceStage, ...]:
        """Return the stages that have ended and not been told."""
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
    """What an output asks about tokens, from any thread; every backend answers it."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text."""

    def token_text(self, token: int) -> str:
        """Return a token's name, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Tell whether the token ends a generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a turn asks for. ``submitted_s`` is a monotonic second, ``prompt_tokens`` the length of its whole prompt.

    ``answer`` is what the turn generated before its prompt was made shorter or its engine was lost, and the first
    ``shown_chars`` characters of its text have been told. With ``may_shift`` a full context is not its end. Where its
    time goes is taken down if it is ``traced``. Control tokens named in ``markers`` are text where they are generated,
    unless they end the answer. A ``constraint``, which has taken ``answer`` in, says what may be generated next.
    """

    turn_id: str
    params: Params
    submitted_s: float
    prompt_tokens: int
    answer: tuple[int, ...] = ()
    shown_chars: int = 0
    may_shift: bool = False
    traced: bool = False
    markers: tuple[str, ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """Why an answer is complete, and the stop string or pattern that matched."""

    reason: str
    stop: str | None


class OutputProcessor:
    """One turn from its submission to its last event; used by one thread at a time.

    Text that could become a stop string is held back. When the turn ends another way it was none, so it is shown.

    A turn that goes on after its prompt was made shorter or its engine was lost takes its earlier answer in again
    without a word: what had been held back is held back again, and what is told begins at the first character that has
    not been told, be that in the earlier answer or in what is generated next. Counts and the text that stays in the
    history are of the whole answer. Times are not: the engine has known of the turn only since it was submitted last,
    and ``max_time_ms`` counts from there. An earlier answer that is complete, because the turn was lost with its last
    token and before its end was heard, is ``complete`` here too, and nothing more is generated.

    Args:
        turn: What is asked for; its stopping parameters are obeyed here, the others by the sampler.
        vocabulary: Meaning of the tokens.
        n_ctx: Tokens that prompt and answer may have together.
        queue_timeout_s: Seconds in which the turn must have had a slot; infinite to let it wait.
        clock: Seconds that the calling thread has worked, which stop patterns are charged for.

    Raises:
        InferenceCenterError: ``invalid_request`` when a stop pattern proves too slow for the earlier answer.
    """

    def __init__(
        self,
        turn: GenerationRequest,
        vocabulary: Detokenizer,
        *,
        n_ctx: int,
        queue_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        params = turn.params
        self.turn_id = turn.turn_id
        self.params = params
        self.constraint = turn.constraint
        self._markers = turn.markers
        self.ended = False
        self.n_answered = len(turn.answer)
        self._may_shift = turn.may_shift
        self._vocabulary = vocabulary
        self._prompt_tokens = turn.prompt_tokens
        self._room_tokens = n_ctx - turn.prompt_tokens
        self._cached_tokens = 0
        self._preempted = 0
        self._generated_tokens = 0
        self._end_text = ""
        self._text = TokenText()
        self._shown_chars = turn.shown_chars
        self._warnings: tuple[str, ...] = ()
        self._scanner = StopScanner(params.stop, params.stop_regex, clock=clock)
        self._repetition = RepetitionDetector(params.stop_on_repetition) if params.stop_on_repetition else None
        self._submitted_s = turn.submitted_s
        limit_ms = params.max_time_ms
        self._ends_s = math.inf if limit_ms is None else turn.submitted_s + limit_ms / 1000
        # A turn that goes on has had a slot.
        self._starts_s = math.inf if turn.answer else turn.submitted_s + queue_timeout_s
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._reads = True
        self._timeline = Timeline(turn.submitted_s) if turn.traced else None
        self._end: _End | None = None
        # Text that was released but not told, and how many characters have been told that were not released.
        self._unsaid, self._ahead_chars = self._replay(turn)

    @property
    def complete(self) -> bool:
        """Whether the earlier answer has come to its end; then the turn is to be concluded, not started."""
        return self._end is not None

    @property
    def traced(self) -> bool:
        """Whether it is taken down where its time goes."""
        return self._timeline is not None

    @property
    def deadlines_s(self) -> tuple[float, float]:
        """The monotonic seconds at which it must have had a slot and must have ended; infinite for no such limit."""
        return self._starts_s, self._ends_s

    def timeout_reason(self, now: float) -> TimeoutReason | None:
        """Return which time has run out: ``max_time_ms``, counted from the submission, or that for getting a slot."""
        if now >= self._ends_s:
            return "time"
        return "queue_timeout" if self._started_s is None and now >= self._starts_s else None

    def start(self, prompt: Sequence[int], *, cached_tokens: int, now: float) -> Started:
        """Note that the turn got its slot, with ``cached_tokens`` of the prompt in it."""
        self._started_s = now
        self._cached_tokens = min(cached_tokens, len(prompt))  # the rest of them is the earlier answer's
        if self.n_answered and (learner := learns(self.params)) is not None:
            self._warnings = (
                f"{learner} began afresh after {self.n_answered} tokens, where the answer was taken up again",
            )
        self._enter("prefill", at_s=now, n_tokens=cached_tokens)
        return Started(self.turn_id, pack_tokens(prompt), self._cached_tokens, self._finished_stages())

    def conclude(self, prompt: Sequence[int], *, now: float) -> tuple[TurnEvent, ...]:
        """End a turn whose earlier answer is complete, as after its last token; nothing of its prompt is read."""
        assert self._end is not None
        end = self._end
        if end.reason == "context_full" and self._may_shift:
            return (self.overflow(now=now),)
        started = self.start(prompt, cached_tokens=len(prompt), now=now)
        self._warnings = ()
        return started, *self._ended(end.reason, stop=end.stop, now=now)

    def preempt(self, *, now: float) -> None:
        """Note that another turn got the slot."""
        self._preempted += 1
        self._enter("queue", at_s=now, n_tokens=self._n_tokens)

    def resume(self, *, now: float, kv_tokens: int, reads: bool) -> None:
        """Note that the turn has a slot again, with ``kv_tokens`` in it, and first ``reads`` what it lacks there."""
        self._reads = reads
        self._enter("prefill" if reads else "decode", at_s=now, n_tokens=kv_tokens if reads else self._n_tokens)

    def moved(self, stage: TraceStage) -> None:
        """Note that the turn's KV was moved from a slot or into one."""
        if self._timeline is not None:
            self._timeline.moved(stage)

    def push(self, sampled: Sampled, *, now: float) -> tuple[TurnEvent, ...]:
        """Take in the next token and return what is to be told of it, the turn's end included.

        Raises:
            InferenceCenterError: ``invalid_request`` when a stop pattern proves too slow; the turn has not ended.
        """
        if self._reads:
            self._begin_decode(now)
        scan = self._take(sampled.token)
        end = self._reached(sampled.token, scan)
        if end is None and now >= self._ends_s:
            end = _End("time", None)
        shifts = end is not None and end.reason == "context_full" and self._may_shift
        text = self._delta(scan.text if end is None or shifts else scan.text + self._scanner.finish())
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        delta = TokenDelta(self.turn_id, pack_tokens((sampled.token,)), text, logprobs)
        if end is None:
            return (delta,)
        return delta, self.overflow(now=now) if shifts else self._finish(end.reason, stop=end.stop, now=now)

    def end(self, reason: str, *, now: float) -> tuple[TurnEvent, ...]:
        """End the turn between two tokens, as aborted or out of time, and return its last events.

        A turn whose earlier answer is complete has ended by itself.
        """
        end = self._end or _End(reason, None)
        return self._ended(end.reason, stop=end.stop, now=now)

    def overflow(self, *, now: float) -> ContextFull:
        """End the turn as far as the engine knows it: it does not fit its context, but may go on with less before it.

        ``n_tokens`` are prompt and answer. A turn that has not said anything ends as one that never began.
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
        """Note that all is read that the next token depends on."""
        self._reads = False
        self._first_s = now if self._first_s is None else self._first_s
        self._enter("decode", at_s=now, n_tokens=self._n_tokens)

    def _replay(self, turn: GenerationRequest) -> tuple[str, int]:
        """Take the earlier answer in; return what of its text is to be told, and how much more has been told."""
        texts: list[str] = []
        for token in turn.answer:
            scan = self._take(token)
            texts.append(scan.text)
            # The prompt may have been shorter before: an end behind a full context is the end.
            if self._end is None or self._end.reason == "context_full":
                self._end = self._reached(token, scan)
        text = "".join(texts)
        return text[turn.shown_chars :], max(0, turn.shown_chars - len(text))

    def _take(self, token: int) -> Scan:
        """Add a token to the answer and return what may be shown of its text."""
        self._generated_tokens += 1
        if self._vocabulary.is_end(token):
            self._end_text = self._vocabulary.token_text(token)
            return self._scanner.feed(self._text.push(b""))
        return self._scanner.feed(self._text.push(self._bytes(token)))

    def _bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to this answer's text."""
        shown = self._vocabulary.token_bytes(token)
        if not shown and self._markers and (name := self._vocabulary.token_text(token)) in self._markers:
            return name.encode()
        return shown

    def _delta(self, released: str) -> str:
        """Return what is told when text is released."""
        text = self._unsaid + released
        told = text[self._ahead_chars :]
        self._unsaid, self._ahead_chars = "", max(0, self._ahead_chars - len(text))
        self._shown_chars += len(told)
        return told

    def _reached(self, token: int, scan: Scan) -> _End | None:
        """Return the end that the answer has reached with this token, if it is one."""
        if self._vocabulary.is_end(token) or scan.stop is not None:
            return _End("stop", scan.stop)
        if self._repetition is not None and self._repetition.push(token):
            return _End("repetition", None)
        if self.params.max_tokens is not None and self._generated_tokens >= self.params.max_tokens:
            return _End("length", None)
        return _End("context_full", None) if self._generated_tokens >= self._room_tokens else None

    def _ended(self, reason: str, *, stop: str | None, now: float) -> tuple[TurnEvent, ...]:
        text = self._delta(self._scanner.finish())
        finished = self._finish(reason, stop=stop, now=now)
        return (TokenDelta(self.turn_id, b"", text), finished) if text else (finished,)

    def _finish(self, reason: str, *, stop: str | None, now: float) -> Finished:
        kept_tokens, kept_chars = self._text.kept(self._shown_chars)
        # Behind a character that was never completed the end token cannot stay: the history has no gaps.
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
        """Return the stages to be told now, the last of which ended at ``ended_s`` if the turn did."""
        if self._timeline is None:
            return ()
        if ended_s is not None:
            self._timeline.end(at_s=ended_s, n_tokens=self._n_tokens)
        return self._timeline.take_finished()

    def _mark_ended(self) -> None:
        if self.ended:
            raise ValueError(f"turn {self.turn_id} has ended already")
        self.ended = True


def failed(turn_id: str, error: InferenceCenterError) -> Failed:
    """Return the terminal event of a turn that met ``error``."""
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def never_ran(turn_id: str, reason: str, *, waited_s: float) -> Finished:
    """Return the terminal event of a turn that ended before its prompt had become tokens."""
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
