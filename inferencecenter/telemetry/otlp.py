"""One tree of spans per turn, sent to a collector by a separate thread. Imports OpenTelemetry.

The spans of both processes are made here: the engine reports when its stages began and ended, and does not depend on
OpenTelemetry. ``service.name`` distinguishes them, since each process is a resource of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias
from weakref import WeakSet

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from inferencecenter import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span, Tracer

FRONT: Final = "inferencecenter"
ENGINE: Final = "inferencecenter-engine"
FLUSH_S: Final = 2.0
"""How long stopping waits for the last spans to be sent."""
_SEND_TIMEOUT_S: Final = 5.0
_WARN_EVERY_S: Final = 60.0
_PATH: Final = "/v1/traces"
_NS_PER_S: Final = 1_000_000_000
_NODE: Final = "inferencecenter.node"

Figures: TypeAlias = "Mapping[str, str | bool | int | float | tuple[str, ...]]"

_log = structlog.get_logger(__name__)


class SpanStage(Protocol):
    """A stage of a turn in the engine, in seconds of the machine's monotonic clock."""

    @property
    def name(self) -> str: ...
    @property
    def began_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...
    @property
    def tokens(self) -> int: ...


class Traces:
    """Begins a trace for each turn. Its methods are called on the event loop, except ``close``, which blocks.

    Args:
        processor: Receives the spans that have ended.
        ratio: Share of the turns to trace, unless the client's trace decides it.
        wall_ns: Unix time in nanoseconds.
        monotonic: Monotonic clock in seconds, the one that the engine reads too.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        ratio: float = 1.0,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processor = processor
        self._front = _tracer(FRONT, processor, ParentBased(TraceIdRatioBased(ratio)))
        self._engine = _tracer(ENGINE, processor, ALWAYS_ON)
        self._wall_ns = wall_ns
        self._monotonic = monotonic
        self._propagator = TraceContextTextMapPropagator()
        self._open: WeakSet[OtlpTurnTrace] = WeakSet()

    @classmethod
    def to_collector(cls, address: str, *, headers: Mapping[str, str], ratio: float) -> Traces:
        """Return traces that are sent to the collector at ``address``, with ``headers`` on each request."""
        log_handler = ExporterLogHandler()
        base = address.rstrip("/").removesuffix(_PATH)
        exporter = OTLPSpanExporter(endpoint=base + _PATH, headers=headers, timeout=_SEND_TIMEOUT_S)
        return cls(BatchSpanProcessor(BackgroundExporter(exporter, log_handler=log_handler)), ratio=ratio)

    def begin(self, traceparent: str | None) -> OtlpTurnTrace:
        """Begin the trace of a turn, inside the client's if ``traceparent`` names a span."""
        empty = Context()
        context = empty if traceparent is None else self._propagator.extract({"traceparent": traceparent}, empty)
        now_s, now_ns = self._monotonic(), self._wall_ns()
        span = self._front.start_span("turn", context, kind=SpanKind.SERVER, start_time=now_ns)
        trace = OtlpTurnTrace(span, self._engine, epoch_ns=now_ns - round(now_s * _NS_PER_S), monotonic=self._monotonic)
        if trace.wanted:
            self._open.add(trace)
        return trace

    def close(self) -> None:
        """End the traces of turns that the next daemon continues, and send what is pending within ``FLUSH_S``."""
        for trace in tuple(self._open):
            trace.suspend()
        # A collector that does not respond is abandoned when the process ends.
        sending = threading.Thread(target=self._processor.shutdown, name="traces-last", daemon=True)
        sending.start()
        sending.join(FLUSH_S)


class OtlpTurnTrace:
    """The spans of one turn.

    Args:
        span: The turn's span, the parent of the others.
        engine: Makes the engine's spans.
        epoch_ns: Unix time in nanoseconds at which the monotonic clock was 0, determined when the turn begins: within a
            trace, time does not jump.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(self, span: Span, engine: Tracer, *, epoch_ns: int, monotonic: Callable[[], float]) -> None:
        self.wanted = span.is_recording()
        self._span = span
        self._engine = engine
        self._epoch_ns = epoch_ns
        self._monotonic = monotonic
        self._node = ""

    def set_attributes(self, figures: Figures) -> None:
        self._span.set_attributes(figures)

    def set_node(self, node: str) -> None:
        self._node = node
        self._span.set_attribute(_NODE, node)

    def add_stages(self, stages: Iterable[SpanStage]) -> None:
        for stage in stages:
            span = self._engine.start_span(
                stage.name, set_span_in_context(self._span, Context()), start_time=self._at(stage.began_s)
            )
            if self._node:
                span.set_attribute(_NODE, self._node)
            if stage.tokens:
                span.set_attribute("inferencecenter.tokens", stage.tokens)
            span.end(self._at(stage.ended_s))

    def add_event(self, event: str, figures: Figures) -> None:
        self._span.add_event(event, figures, self._at(self._monotonic()))

    def end(self, figures: Figures, *, error: str | None) -> None:
        """End the trace now, with the error code if the turn failed."""
        self._span.set_attributes(figures)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._at(self._monotonic()))

    def suspend(self) -> None:
        """End the trace, if it has not ended: the next daemon continues the turn."""
        if self._span.is_recording():
            self.add_event("suspended", {})
            self._span.end(self._at(self._monotonic()))

    def _at(self, second: float) -> int:
        return self._epoch_ns + round(second * _NS_PER_S)


class BackgroundExporter(SpanExporter):
    """Passes spans to an exporter; logs once when that fails, and when it works again.

    Args:
        exporter: Sends the spans, from a thread, for as long as it may take.
        log_handler: Holds what the libraries log about failures.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        log_handler: ExporterLogHandler,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporter = exporter
        self._log_handler = log_handler
        self._monotonic = monotonic
        self._lost = 0
        self._warned = False
        self._warned_s = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; those that cannot be sent are lost."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._warned:
                _log.info("traces_sent_again", lost_spans=self._lost)
            self._lost, self._warned = 0, False
            return result
        self._lost += len(spans)
        now = self._monotonic()
        if not self._warned and now >= self._warned_s + _WARN_EVERY_S:
            self._warned, self._warned_s = True, now
            _log.warning("traces_not_sent", reason=self._log_handler.last)
        return result

    def shutdown(self) -> None:
        """Abort sending."""
        self._exporter.shutdown()


class ExporterLogHandler(logging.Handler):
    """Keeps OpenTelemetry's own lines out of the log: there is one per failed batch, and under load one per span."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last line."""
        self.last = record.getMessage()


def _tracer(service: str, processor: SpanProcessor, sampler: Sampler) -> Tracer:
    resource = Resource.create({"service.name": service, "service.version": __version__})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer(FRONT, __version__)
