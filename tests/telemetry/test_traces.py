"""Traces: the tree of spans, their attributes, and that a slow collector never blocks."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from inferencecenter.config.sections import TelemetrySettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.telemetry import otlp, traces
from inferencecenter.telemetry.otlp import ENGINE, FRONT, BackgroundExporter, Traces
from tests.telemetry.collector import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
EPOCH_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Spent:
    """The timing of a stage."""

    name: str
    began_s: float
    ended_s: float
    tokens: int = 0


class Clock:
    """Seconds that a test advances; the wall clock may jump beside them."""

    def __init__(self) -> None:
        self.second = 100.0
        self.jump_ns = 0

    def monotonic(self) -> float:
        """Return the seconds."""
        return self.second

    def wall_ns(self) -> int:
        """Return Unix nanoseconds."""
        return EPOCH_NS + round(self.second * 1e9) + self.jump_ns


@dataclass
class TraceRecorder:
    """Traces whose spans are recorded."""

    clock: Clock
    kept: InMemorySpanExporter
    traces: Traces

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """The ended spans by name."""
        return {span.name: span for span in self.kept.get_finished_spans()}


def make_recorder(ratio: float = 1.0) -> TraceRecorder:
    """Return a new recorder."""
    clock, kept = Clock(), InMemorySpanExporter()
    made = Traces(SimpleSpanProcessor(kept), ratio=ratio, wall_ns=clock.wall_ns, monotonic=clock.monotonic)
    return TraceRecorder(clock, kept, made)


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Restore OpenTelemetry's logger."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


def test_turn_is_one_trace_over_both_processes() -> None:
    """The engine's stages have its times, and belong to another service."""
    world = make_recorder()
    trace = world.traces.begin(None)
    trace.set_attributes({"gen_ai.request.model": "demo"})
    trace.add_stages((Spent("queue", 100.5, 101.0), Spent("prefill", 101.0, 102.25, 40)))
    world.clock.second = 105.0
    trace.end({"gen_ai.usage.output_tokens": 7}, error=None)
    spans = world.spans
    turn, queue, prefill = spans["turn"], spans["queue"], spans["prefill"]
    assert turn.parent is None
    assert (turn.start_time, turn.end_time) == (EPOCH_NS + 100 * 10**9, EPOCH_NS + 105 * 10**9)
    assert turn.attributes == {"gen_ai.request.model": "demo", "gen_ai.usage.output_tokens": 7}
    assert turn.status.is_unset
    for span in (queue, prefill):
        assert span.parent == turn.context
        assert span.resource.attributes["service.name"] == ENGINE
    assert turn.resource.attributes["service.name"] == FRONT
    assert (queue.start_time, queue.end_time) == (EPOCH_NS + 100_500_000_000, EPOCH_NS + 101_000_000_000)
    assert (queue.attributes, prefill.attributes) == ({}, {"inferencecenter.tokens": 40})


def test_turns_have_separate_traces() -> None:
    """Concurrent traces are not nested."""
    world = make_recorder()
    first, second = world.traces.begin(None), world.traces.begin(None)
    second.end({}, error=None)
    first.end({}, error=None)
    one, other = world.kept.get_finished_spans()
    assert one.context.trace_id != other.context.trace_id
    assert one.parent is other.parent is None


def test_client_span_is_the_parent() -> None:
    """The sampling ratio does not matter."""
    world = make_recorder(ratio=0.0)
    trace = world.traces.begin(SAMPLED)
    trace.add_stages((Spent("queue", 100.0, 101.0),))
    trace.end({}, error=None)
    turn = world.spans["turn"]
    assert turn.parent is not None
    assert (f"{turn.parent.trace_id:032x}", f"{turn.parent.span_id:016x}") == (TRACE, SPAN)
    assert {f"{span.context.trace_id:032x}" for span in world.spans.values()} == {TRACE}


@pytest.mark.parametrize(("ratio", "parent"), [(1.0, UNSAMPLED), (0.0, None)])
def test_unsampled_turns_are_not_recorded(ratio: float, parent: str | None) -> None:
    """The client's flag decides, else the ratio."""
    world = make_recorder(ratio)
    trace = world.traces.begin(parent)
    assert not trace.wanted
    trace.set_attributes({"a": 1})
    trace.add_stages(())
    trace.add_event("lost", {})
    trace.end({}, error="internal")
    assert world.kept.get_finished_spans() == ()


def test_sampling_ratio() -> None:
    """About that share of the turns is sampled."""
    made = make_recorder(0.25).traces
    assert 150 < sum(made.begin(None).wanted for _ in range(1000)) < 350


def test_failed_turn_has_an_error_status() -> None:
    """It has its code, but not its message."""
    world = make_recorder()
    world.traces.begin(None).end({}, error="engine_crashed")
    turn = world.spans["turn"]
    assert (turn.status.status_code.name, turn.status.description) == ("ERROR", "engine_crashed")
    assert turn.attributes == {"error.type": "engine_crashed"}


def test_incidents_are_span_events() -> None:
    """They have a time and figures."""
    world = make_recorder()
    trace = world.traces.begin(None)
    world.clock.second = 102.0
    trace.add_event("engine_lost", {"inferencecenter.tokens": 3})
    trace.end({}, error=None)
    (event,) = world.spans["turn"].events
    assert (event.name, event.timestamp) == ("engine_lost", EPOCH_NS + 102 * 10**9)
    assert event.attributes == {"inferencecenter.tokens": 3}


def test_spans_have_their_machine() -> None:
    """The turn's is that of the last engine; each stage has that of its own."""
    world = make_recorder()
    trace = world.traces.begin(None)
    trace.set_node("local")
    trace.add_stages((Spent("queue", 100.0, 101.0),))
    trace.set_node("box2")
    trace.add_stages((Spent("decode", 101.0, 102.0),))
    trace.end({}, error=None)
    nodes = {name: (span.attributes or {})["inferencecenter.node"] for name, span in world.spans.items()}
    assert nodes == {"queue": "local", "decode": "box2", "turn": "box2"}


def test_wall_clock_jump_does_not_distort_a_trace() -> None:
    """Within a turn only the monotonic clock counts."""
    world = make_recorder()
    trace = world.traces.begin(None)
    world.clock.jump_ns = -3600 * 10**9
    world.clock.second = 103.0
    trace.add_stages((Spent("decode", 101.0, 102.0),))
    trace.end({}, error=None)
    turn, decode = world.spans["turn"], world.spans["decode"]
    times = [turn.start_time, decode.start_time, decode.end_time, turn.end_time]
    assert times == [EPOCH_NS + second * 10**9 for second in (100, 101, 102, 103)]


def test_suspended_turns_are_exported() -> None:
    """Their spans end with the daemon and are marked; ended ones are unchanged, refused ones dropped."""
    world = make_recorder()
    world.traces.begin(None).end({}, error=None)
    running = world.traces.begin(None)
    world.traces.begin(None)
    world.traces.close()
    ended, suspended = world.kept.get_finished_spans()
    assert ended.events == ()
    assert [event.name for event in suspended.events] == ["suspended"]
    running.end({}, error=None)
    assert len(world.kept.get_finished_spans()) == 2


class BlockedProvider(SpanProcessor):
    """Blocks its shutdown until released."""

    def __init__(self) -> None:
        self.entered, self.may, self.left = threading.Event(), threading.Event(), threading.Event()

    def shutdown(self) -> None:
        """Wait."""
        self.entered.set()
        self.may.wait()
        self.left.set()


def test_shutdown_flush_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that does not answer costs ``FLUSH_S``."""
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    stuck = BlockedProvider()
    try:
        Traces(stuck).close()
        assert not stuck.left.is_set()
        assert stuck.entered.wait(60)
    finally:
        stuck.may.set()


class FlakyExporter(SpanExporter):
    """Succeeds or fails as a test sets."""

    def __init__(self) -> None:
        self.works = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Say whether it would have."""
        return SpanExportResult.SUCCESS if self.works else SpanExportResult.FAILURE


def test_collector_outage_logs_two_lines() -> None:
    """One line reports its start and one its end, at most one a minute."""
    clock, sender = Clock(), FlakyExporter()
    sending = BackgroundExporter(sender, log_handler=otlp.ExporterLogHandler(), monotonic=clock.monotonic)
    logging.getLogger("opentelemetry.anything").warning("refused %s", "by 127.0.0.1")
    span = _span()
    with structlog.testing.capture_logs() as lines:
        sending.export([span])
        for works in (False, False, False, True, False, True):
            sender.works = works
            sending.export([span, span])
        clock.second += 60
        sender.works = False
        sending.export([span])
    assert [(line["event"], line.get("lost_spans")) for line in lines] == [
        ("traces_not_sent", None),
        ("traces_sent_again", 6),
        ("traces_not_sent", None),
    ]
    assert lines[0]["reason"] == "refused by 127.0.0.1"


def _span() -> ReadableSpan:
    world = make_recorder()
    world.traces.begin(None).end({}, error=None)
    return world.spans["turn"]


def settings(**values: Any) -> TelemetrySettings:
    """Validated settings."""
    return TelemetrySettings(**values)


def test_tracing_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages need not be installed."""
    monkeypatch.setattr(traces, "find_spec", lambda _name: None)
    assert traces.open_traces(settings()) is None
    traces.check_installed(settings())


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_missing_package_fails_the_start(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The hint says what to install."""

    def find_spec(name: str) -> object:
        if name == missing:
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(traces, "find_spec", find_spec)
    with pytest.raises(InferenceCenterError) as refused:
        traces.open_traces(settings(otlp_endpoint="http://127.0.0.1:4318"))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_CONFIG, "telemetry.otlp_endpoint")
    assert "inferencecenter[otel]" in str(refused.value.hint)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_collector_receives_the_trace(path: str) -> None:
    """The request is protobuf over HTTP with the configured headers."""
    with Collector() as collector:
        made = traces.open_traces(
            settings(otlp_endpoint=collector.address + path, otlp_headers={"X-Key": SecretStr("hunter2")})
        )
        assert made is not None
        trace = made.begin(SAMPLED)
        now = time.monotonic()
        trace.add_stages((Spent("decode", now, now + 0.5, 3),))
        trace.end({"gen_ai.response.finish_reasons": ("stop",)}, error=None)
        made.close()
        spans = {span.name: span for span in collector.wait(lambda spans: len(spans) == 2)}
    turn, decode = spans["turn"], spans["decode"]
    assert collector.paths == ["/v1/traces"]
    assert collector.headers["x-key"] == "hunter2"
    assert (turn.service, turn.trace_id, turn.parent_id) == (FRONT, TRACE, SPAN)
    assert (decode.service, decode.trace_id, decode.parent_id) == (ENGINE, TRACE, turn.span_id)
    assert turn.attributes == {"gen_ai.response.finish_reasons": ["stop"]}
    assert decode.attributes == {"inferencecenter.tokens": 3}
    assert decode.ended_ns - decode.began_ns == pytest.approx(5e8, abs=1000)


def test_missing_collector_costs_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns and shutdown are unaffected."""
    monkeypatch.setattr(otlp, "FLUSH_S", 0.2)
    monkeypatch.setattr(otlp, "_SEND_TIMEOUT_S", 0.1)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        made = traces.open_traces(settings(otlp_endpoint=address))
        assert made is not None
        with structlog.testing.capture_logs() as lines:
            for _ in range(3000):
                made.begin(None).end({}, error=None)
            made.close()
    assert [line["event"] for line in lines] in ([], ["traces_not_sent"])
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []
