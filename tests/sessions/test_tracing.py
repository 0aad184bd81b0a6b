"""Traces of turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Failed, Started, TokenDelta, TraceStage
from inferencecenter.protocol import requests
from inferencecenter.sessions.observability import NullTracer
from tests.sessions.conftest import SessionHarness, packed
from tests.sessions.test_restore import restart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.sessions.observability import SpanAttributes

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QUEUE, PREFILL, DECODE = (
    TraceStage("queue", 1.0, 2.0),
    TraceStage("prefill", 2.0, 3.0, 7),
    TraceStage("decode", 3.0, 4.0, 5),
)


@dataclass
class RecordingTrace:
    """A trace that records its data."""

    traceparent: str | None
    wanted: bool
    figures: dict[str, Any] = field(default_factory=dict)
    stages: list[TraceStage] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)

    def set_attributes(self, figures: SpanAttributes) -> None:
        """Record the attributes."""
        self.figures |= figures

    def set_node(self, node: str) -> None:
        """Record the machine."""
        self.nodes.append(node)

    def add_stages(self, stages: Iterable[TraceStage]) -> None:
        """Record the stages."""
        self.stages += stages

    def add_event(self, event: str, figures: SpanAttributes) -> None:
        """Record the event."""
        self.events.append((event, dict(figures)))

    def end(self, figures: SpanAttributes, *, error: str | None) -> None:
        """Record the end, once."""
        assert not self.ends
        self.figures |= figures
        self.ends.append(error)


@dataclass
class RecordingTracer:
    """Starts recording traces, wanted or not."""

    wanted: bool = True
    traces: list[RecordingTrace] = field(default_factory=list)

    def begin(self, traceparent: str | None) -> RecordingTrace:
        """Start a trace."""
        self.traces.append(RecordingTrace(traceparent, self.wanted))
        return self.traces[-1]

    @property
    def last(self) -> RecordingTrace:
        """The latest trace."""
        return self.traces[-1]


@pytest.fixture
def tracer(world: SessionHarness) -> RecordingTracer:
    """Traces all turns of ``world``."""
    tracer = RecordingTracer()
    world.tracer = tracer
    world.reopen()
    return tracer


def start(world: SessionHarness, *stages: TraceStage) -> None:
    """Start the last turn with the stages before."""
    turn = world.engine.last
    world.engine.say(Started(turn.turn_id, turn.tokens + packed(world.engine.last_text), 0, stages))


def test_turn_is_traced_from_start_to_end(world: SessionHarness, tracer: RecordingTracer) -> None:
    """Request, stages and result have the names of the conventions."""
    session_id = world.create()
    world.infer(session_id, "Hi", params={"temperature": 0.5, "max_tokens": 9, "seed": 3}, traceparent=PARENT)
    trace, turn_id = tracer.last, world.engine.last.turn_id
    assert trace.traceparent == PARENT
    assert world.engine.last.traced
    start(world, QUEUE)
    assert trace.stages == [QUEUE]
    world.engine.generate("Hello")
    world.engine.finish(kept="Hello", stages=(PREFILL, DECODE))
    assert trace.stages == [QUEUE, PREFILL, DECODE]
    assert (trace.events, trace.ends) == ([], [None])
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inferencecenter",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.conversation.id": session_id,
        "gen_ai.response.id": turn_id,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "inferencecenter.client": "ada",
        "inferencecenter.priority": 1,
        "inferencecenter.preempted": 0,
    }
    assert expected.items() <= trace.figures.items()


def test_traces_contain_no_text(world: SessionHarness, tracer: RecordingTracer) -> None:
    """A trace has no prompt, answer, stop string, metadata or message of an error."""
    session_id = world.create(system="Secret system", metadata={"name": "Secret name"})
    world.infer(session_id, "Secret question", params={"stop": ["Secret stop"]}, turn_key="Secret key")
    start(world)
    world.engine.generate("Secret answer")
    world.engine.finish(kept="Secret answer")
    world.infer(session_id, "Secret failure")
    world.engine.say(Failed(turn_id=world.engine.last.turn_id, code="internal", message="Secret", hint="Secret"))
    assert len(tracer.traces) == 2
    assert "Secret" not in str(tracer.traces)


def test_failed_turn_is_traced(world: SessionHarness, tracer: RecordingTracer) -> None:
    """Its trace ends with the code and the stages so far."""
    world.infer(world.create())
    start(world, QUEUE)
    world.engine.say(Failed(turn_id=world.engine.last.turn_id, code="internal", message="No.", stages=(PREFILL,)))
    assert tracer.last.ends == ["internal"]
    assert tracer.last.stages == [QUEUE, PREFILL]
    assert tracer.last.figures["gen_ai.response.finish_reasons"] == ()


def test_cancelled_turn_is_traced(world: SessionHarness, tracer: RecordingTracer) -> None:
    """Its trace ends with the session; late stages are ignored."""
    session_id = world.create()
    world.infer(session_id)
    start(world, QUEUE)
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=session_id))
    world.engine.finish("aborted", kept="", stages=(PREFILL,))
    assert tracer.last.ends == [None]
    assert tracer.last.figures["gen_ai.response.finish_reasons"] == ("aborted",)
    assert tracer.last.stages == [QUEUE]


def test_interrupted_turn_is_traced_once(world: SessionHarness, tracer: RecordingTracer) -> None:
    """The loss is an event, and the next engine adds its stages."""
    world.infer(world.create())
    start(world, QUEUE)
    world.engine.say(TokenDelta(world.engine.last.turn_id, packed("abc"), "abc"))
    world.engine.lose()
    world.engine.ready()
    assert world.engine.last.traced
    start(world, TraceStage("queue", 5.0, 6.0))
    world.engine.finish(kept="abc", stages=(DECODE,))
    (trace,) = tracer.traces
    assert trace.events == [("interrupted", {"inferencecenter.tokens": 3})]
    assert [stage.name for stage in trace.stages] == ["queue", "queue", "decode"]
    assert trace.ends == [None]


def test_shifted_turn_is_traced_once(world: SessionHarness, tracer: RecordingTracer) -> None:
    """The trace contains the stages before and after the shift."""
    session_id = world.create()
    for question in "abc":
        world.turn(session_id, question, question * 20)
    world.infer(session_id, "More")
    start(world, QUEUE)
    world.engine.generate("xyz")
    world.engine.overflow(1025, said="xyz", stages=(PREFILL, DECODE))
    start(world, TraceStage("queue", 5.0, 6.0))
    world.engine.finish(kept="xyz", stages=(DECODE,))
    trace = tracer.last
    assert trace.events == [("shifted", {"inferencecenter.tokens": 1025})]
    assert [stage.name for stage in trace.stages] == ["queue", "prefill", "decode", "queue", "decode"]
    assert trace.ends == [None]


def test_refused_turn_is_not_exported(world: SessionHarness, tracer: RecordingTracer) -> None:
    """Its trace never ends."""
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL)
    with pytest.raises(InferenceCenterError):
        world.infer(world.create())
    assert [trace.ends for trace in tracer.traces] == [[]]


def test_restored_turn_continues_its_trace(world: SessionHarness, tracer: RecordingTracer) -> None:
    """The client's trace parent was recorded with the request."""
    world.infer(world.create(), traceparent=PARENT)
    start(world, QUEUE)
    world.engine.generate("ab")
    restart(world)
    before, after = tracer.traces
    assert (before.ends, after.ends) == ([], [])
    assert after.traceparent == PARENT
    assert after.events == [("continued", {"inferencecenter.tokens": 2})]
    assert after.figures["gen_ai.response.id"] == before.figures["gen_ai.response.id"]
    assert world.engine.last.traced


def test_unsampled_turn_measures_no_stages(world: SessionHarness, tracer: RecordingTracer) -> None:
    """The engine does not measure its stages."""
    tracer.wanted = False
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello", traceparent=PARENT)
    assert not world.engine.last.traced
    assert tracer.last == RecordingTrace(PARENT, wanted=False)


def test_without_a_tracer_nothing_is_traced(world: SessionHarness) -> None:
    """One null object serves all turns."""
    world.turn(world.create(), "Hi", "Hello", traceparent=PARENT)
    assert not world.engine.last.traced
    untraced = NullTracer()
    assert untraced.begin(PARENT) is untraced
    untraced.set_attributes({})
    untraced.add_stages((QUEUE,))
    untraced.add_event("lost", {})
    untraced.end({}, error=None)
    assert vars(untraced) == {}


def test_trace_parent_is_not_sent_to_the_engine(world: SessionHarness, tracer: RecordingTracer) -> None:
    """It only measures stages."""
    world.infer(world.create(), traceparent=PARENT)
    assert tracer.last.wanted
    assert PARENT[3:35] not in str(structs.asdict(world.engine.last))
