"""Counters over all sessions, and the metrics, log and traces of turns."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.models.registry import LOCAL_NODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.ipc.messages import TraceStage
    from inferencecenter.protocol.values import TurnStats
    from inferencecenter.sessions.context import SessionConfig
    from inferencecenter.sessions.model_router import ServedModel
    from inferencecenter.sessions.turn import Turn, TurnOutcome, TurnSpec


WINDOW_S: Final = 10
_NEWEST: Final = 0.2

_log = structlog.get_logger("turn")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn that ended, on the machine ``node``.

    ``finish`` is the wire's ``finish_reason``, or the error code of a failed turn.
    """

    client_id: str
    session_id: str
    turn_id: str
    model: str
    finish: str
    stats: TurnStats
    node: str = LOCAL_NODE


class TurnObserver(Protocol):
    """Receives each turn that ended, such as the metrics."""

    def turn_ended(self, record: TurnRecord) -> None:
        """Handle the end of a turn; never blocks, never raises."""


class TurnObservers:
    """Passes each ended turn to several observers."""

    def __init__(self, *observers: TurnObserver) -> None:
        self._observers = observers

    def turn_ended(self, record: TurnRecord) -> None:
        """Pass the turn on."""
        for each in self._observers:
            each.turn_ended(record)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over all sessions; ``tokens_per_s`` is the mean of the last ten seconds."""

    active_generations: int
    total_sessions: int
    archived_sessions: int
    last_tps: float
    last_ttft_ms: float
    total_tokens_generated: int
    tokens_per_s: float


class ActiveTurnCount:
    """Counts the sessions with a running turn, in total and per client; stateless ones count in the total only."""

    def __init__(self) -> None:
        self.total = 0
        self._of_client: Counter[str] = Counter()

    def of(self, client_id: str) -> int:
        """Return the number of a client's sessions with a running turn."""
        return self._of_client.get(client_id, 0)

    def add(self, change: int, *, client_id: str, stateless: bool) -> None:
        """Add ``change``, which may be negative."""
        self.total += change
        if stateless:
            return
        self._of_client[client_id] += change
        if not self._of_client[client_id]:
            del self._of_client[client_id]


class TextQuota:
    """Limits the characters held by each client's sessions.

    A fork counts in full, since its parent may be deleted and leave the shared text to the fork alone.

    Args:
        max_chars: Maximum over a client's sessions, without stateless ones.
    """

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._of_client: Counter[str] = Counter()

    def of(self, client_id: str) -> int:
        """Return the characters held by a client's sessions."""
        return self._of_client.get(client_id, 0)

    def add(self, n_chars: int, *, client_id: str) -> None:
        """Add ``n_chars``, which may be negative."""
        self._of_client[client_id] += n_chars
        if not self._of_client[client_id]:
            del self._of_client[client_id]

    def fits(self, n_chars: int, *, client_id: str) -> bool:
        """Return whether ``n_chars`` more are within the limit."""
        return not n_chars or self.of(client_id) + n_chars <= self._max_chars

    def check(self, n_chars: int, *, client_id: str) -> None:
        """Refuse ``n_chars`` more if they exceed the limit.

        Raises:
            InferenceCenterError: ``quota_exceeded``.
        """
        if not self.fits(n_chars, client_id=client_id):
            held = self.of(client_id) + n_chars
            raise InferenceCenterError(
                ErrorCode.QUOTA_EXCEEDED,
                f"this client's sessions would hold {held} characters; {self._max_chars} are allowed",
                hint="Close sessions that are no longer needed, or rewind them.",
            )


class TokenMeter:
    """Counts generated tokens, in total and over the last ten seconds; times are monotonic seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._seconds: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def add(self, n_tokens: int, *, now: float) -> None:
        """Count ``n_tokens`` generated at ``now``."""
        self.total += n_tokens
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            n_tokens += self._seconds.pop()[1]
        self._seconds.append((second, n_tokens))

    def per_s(self, *, now: float) -> float:
        """Return the tokens per second over the last ten seconds."""
        return sum(n_tokens for second, n_tokens in self._seconds if second > now - WINDOW_S) / WINDOW_S


class WaitEstimator:
    """Estimates the wait of a turn from the time that recent turns of its model held their slots."""

    def __init__(self) -> None:
        self._held_ms: dict[str, float] = {}

    def update(self, record: TurnRecord) -> None:
        """Update the estimate with an ended turn; a turn that never ran is ignored."""
        if record.stats.prompt_tokens:
            held_ms = record.stats.total_ms - record.stats.queue_ms
            old_ms = self._held_ms.get(record.model, held_ms)
            self._held_ms[record.model] = old_ms + _NEWEST * (held_ms - old_ms)

    def eta_ms(self, model: str, position: int, *, slots: int) -> float | None:
        """Return the expected wait at a queue position from 1; ``None`` without data."""
        held_ms = self._held_ms.get(model)
        return None if held_ms is None else round(position * held_ms / slots)


class TurnMetrics:
    """Counts ended turns, passes them to the observer, and writes them to the log.

    Args:
        observer: Receives each turn that ended.
    """

    def __init__(self, observer: TurnObserver | None) -> None:
        self.meter = TokenMeter()
        self._observer = observer
        self._waits = WaitEstimator()
        self._last: TurnStats | None = None

    def turn_ended(self, record: TurnRecord) -> None:
        stats = self._last = record.stats
        self._waits.update(record)
        _log.info(
            "turn",
            client=record.client_id,
            session=record.session_id,
            turn=record.turn_id,
            model=record.model,
            **({} if record.node == LOCAL_NODE else {"node": record.node}),
            queue_ms=stats.queue_ms,
            ttft_ms=stats.ttft_ms,
            total_ms=stats.total_ms,
            prompt=stats.prompt_tokens,
            tokens=stats.tokens,
            tps=stats.tps,
            cached=stats.cached_tokens,
            preempted=stats.preempted,
            finish=record.finish,
        )
        if self._observer is not None:
            try:
                self._observer.turn_ended(record)
            except Exception:  # noqa: BLE001 - what is counted of a turn takes nothing from its end
                _log.exception("turn_not_counted", turn=record.turn_id)

    def eta_ms(self, serving: ServedModel, position: int) -> float | None:
        """Return the expected wait at a queue position of a model; ``None`` for a running turn, or if it is unknown."""
        if not position:
            return None
        engine = serving.engine.status
        if engine.model is None or engine.state is not EngineState.READY:
            return None  # the start time of an engine is unknown
        # The position is one in the queue of a single replica.
        n_ready = sum(each.state is EngineState.READY for each in engine.replicas) or 1
        return self._waits.eta_ms(serving.name, position, slots=max(1, engine.model.slots // n_ready))

    def totals(self, *, sessions: int, archived: int, active: int, now: float) -> Totals:
        """Return the totals over so many open sessions, of which ``active`` run a turn, and archived ones."""
        return Totals(
            active_generations=active,
            total_sessions=sessions,
            archived_sessions=archived,
            last_tps=self._last.tps if self._last else 0.0,
            last_ttft_ms=self._last.ttft_ms if self._last else 0.0,
            total_tokens_generated=self.meter.total,
            tokens_per_s=self.meter.per_s(now=now),
        )


SpanAttributes: TypeAlias = "Mapping[str, str | bool | int | float | tuple[str, ...]]"


class TurnSpan(Protocol):
    """The trace of one turn. No method blocks or raises."""

    @property
    def wanted(self) -> bool:
        """Whether the turn is traced; if not, the engine need not measure its stages."""

    def set_attributes(self, figures: SpanAttributes) -> None:
        """Set the attributes of the request."""

    def set_node(self, node: str) -> None:
        """Set the machine of the turn, and of the stages that are added from now on."""

    def add_stages(self, stages: Iterable[TraceStage]) -> None:
        """Add the stages measured by the engine."""

    def add_event(self, event: str, figures: SpanAttributes) -> None:
        """Add an event at the current time."""

    def end(self, figures: SpanAttributes, *, error: str | None) -> None:
        """End the trace now, with the error code of a failed turn."""


class Tracer(Protocol):
    """Starts the traces of turns."""

    def begin(self, traceparent: str | None) -> TurnSpan:
        """Start a trace, as a child of the client's span if the request names one. Never blocks, never raises."""


class NullTracer:
    """Traces nothing; both a ``Tracer`` and a ``TurnSpan``."""

    wanted = False

    def begin(self, traceparent: str | None) -> TurnSpan:
        """Return itself."""
        return self

    def set_attributes(self, figures: SpanAttributes) -> None:
        """Do nothing."""

    def set_node(self, node: str) -> None:
        """Do nothing."""

    def add_stages(self, stages: Iterable[TraceStage]) -> None:
        """Do nothing."""

    def add_event(self, event: str, figures: SpanAttributes) -> None:
        """Do nothing."""

    def end(self, figures: SpanAttributes, *, error: str | None) -> None:
        """Do nothing."""


def trace_turn(tracer: Tracer, config: SessionConfig, spec: TurnSpec, *, restored_tokens: int) -> TurnSpan:
    """Start the trace of a turn; ``restored_tokens`` are the tokens restored from an earlier daemon.

    Attribute names follow OpenTelemetry's conventions for generative AI where they define one.
    """
    trace = tracer.begin(spec.request.traceparent)
    if not trace.wanted:
        return trace
    params = spec.params
    attributes = {
        "gen_ai.operation.name": "chat" if config.mode == "chat" else "text_completion",
        "gen_ai.provider.name": "inferencecenter",
        "gen_ai.request.model": spec.model or config.model,
        "gen_ai.conversation.id": config.session_id,
        "gen_ai.response.id": spec.turn_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "inferencecenter.client": config.client_id,
        "inferencecenter.priority": spec.rank,
    }
    trace.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if restored_tokens:
        trace.add_event("continued", {"inferencecenter.tokens": restored_tokens})
    return trace


def end_trace(turn: Turn, outcome: TurnOutcome, *, failed: bool = False) -> None:
    if not turn.trace.wanted:
        return
    stats = outcome.stats
    answered: SpanAttributes = {
        "gen_ai.response.model": turn.spec.model,
        "gen_ai.response.finish_reasons": () if failed else (outcome.finish,),
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        "gen_ai.usage.output_tokens": stats.tokens,
        "gen_ai.response.time_to_first_chunk": stats.ttft_ms / 1000,
        "inferencecenter.preempted": stats.preempted,
    }
    turn.trace.end(answered, error=outcome.finish if failed else None)
