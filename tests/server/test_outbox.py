"""Tests of the bounded writer."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol import events
from inferencecenter.protocol.codec import PIECE_BYTES, encode, encode_in_pieces
from inferencecenter.protocol.events import MAX_JOINED_BYTES
from inferencecenter.protocol.values import ChatMessage, TokenLogprobs, TranscriptTurn, TurnStats, Usage
from inferencecenter.server import outbox as outbox_module
from inferencecenter.server.outbox import Outbox
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.server.harness import StubWire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.protocol.base import Event


class Overflows:
    """Counts calls."""

    count = 0

    def __call__(self) -> None:
        """Count."""
        self.count += 1


@pytest.fixture
def wire() -> StubWire:
    """A socket that takes frames."""
    return StubWire()


@pytest.fixture
def metrics() -> DaemonMetrics:
    """Metrics of nobody else."""
    return DaemonMetrics()


@pytest.fixture
def overflows() -> Overflows:
    """What the outbox calls when it is full."""
    return Overflows()


@pytest.fixture
def outbox(wire: StubWire, metrics: DaemonMetrics, overflows: Overflows) -> Outbox:
    """An outbox of a v1 socket, for 1,000 bytes."""
    outbox = Outbox(wire, limit_bytes=1000, overflowed=overflows, metrics=metrics)
    outbox.enable_v1()
    return outbox


def token(content: str, seq: int, *, session: str = "s", turn: str = "t", **fields: Any) -> events.Token:
    """Return a token event."""
    return events.Token.model_construct(session_id=session, seq=seq, turn_id=turn, content=content, **fields)


PONG = events.Pong()


@settings(deadline=None)
@given(st.text(), st.text(min_size=1), st.text(min_size=1), st.integers(min_value=1, max_value=2**53), st.booleans())
def test_token_frames_equal_the_codecs(content: str, session: str, turn: str, seq: int, v1: bool) -> None:
    """Byte for byte, for any text and both dialects."""
    wire = StubWire()
    outbox = Outbox(wire, limit_bytes=1000, overflowed=Overflows(), metrics=DaemonMetrics())
    if v1:
        outbox.enable_v1()
    event = token(content, seq, session=session, turn=turn)
    outbox.send(event)
    assert [frame.decode() for frame in wire.written] == [encode(event, dagger_only=not v1)]


def reasoning(content: str, seq: int, *, turn: str = "t") -> events.Reasoning:
    """Return what is thought."""
    return events.Reasoning(session_id="s", seq=seq, turn_id=turn, content=content)


def call(arguments: str, seq: int, *, index: int = 0, name: str | None = None) -> events.ToolCall:
    """Return a piece of a call."""
    return events.ToolCall(
        session_id="s", seq=seq, turn_id="t", index=index, call_id=f'"{index}', name=name, arguments=arguments
    )


@given(st.text(), st.integers(min_value=1, max_value=2**53), st.integers(0, 200))
def test_frames_of_thoughts_and_calls_equal_the_codecs(text: str, seq: int, index: int) -> None:
    """Byte for byte; sockets of the first protocol get none."""
    for event in (reasoning(text, seq), call(text, seq, index=index), call(text, seq, index=index, name="f")):
        for v1 in (True, False):
            wire = StubWire()
            outbox = Outbox(wire, limit_bytes=1000, overflowed=Overflows(), metrics=DaemonMetrics())
            if v1:
                outbox.enable_v1()
            outbox.send(event)
            assert [frame.decode() for frame in wire.written] == ([encode(event)] if v1 else [])


def test_what_waits_is_joined_by_what_it_is(outbox: Outbox, wire: StubWire) -> None:
    """Thoughts with thoughts, text with text, arguments with those of the same call; the name stands by itself."""
    wire.takes_frames = False
    for event in (
        *(reasoning("a", 1), reasoning("b", 2), token("c", 3), token("d", 4)),
        *(call("", 5, name="f"), call("{", 6), call("}", 7), call("[", 8, index=1)),
    ):
        outbox.send(event)
    wire.takes_frames = True
    outbox.flush()
    told = [(frame["op"], frame["seq"], frame.get("content", frame.get("arguments"))) for frame in wire.frames]
    assert told == [
        ("reasoning", 2, "ab"),
        ("token", 4, "cd"),
        ("tool_call", 5, ""),
        ("tool_call", 7, "{}"),
        ("tool_call", 8, "["),
    ]


def test_a_reading_socket_is_written_to_at_once(outbox: Outbox, wire: StubWire, metrics: DaemonMetrics) -> None:
    """Every event is a frame of its own, and none waits."""
    for event in (token("a", 1), token("b", 2), PONG):
        outbox.send(event)
    assert [frame["op"] for frame in wire.frames] == ["token", "token", "pong"]
    assert outbox.waiting_bytes == 0
    assert metrics.registry.get_sample_value("inferencecenter_frames_out_total") == 3


def test_text_that_waits_is_joined(outbox: Outbox, wire: StubWire) -> None:
    """One frame with the whole text and the last number."""
    wire.takes_frames = False
    for seq, content in enumerate(['say "', "é\n", "\\u0041"], start=4):
        outbox.send(token(content, seq))
    wire.takes_frames = True
    outbox.flush()
    assert wire.written == [str(encode(token('say "é\n\\u0041', 6))).encode()]
    assert outbox.waiting_bytes == 0


def test_sessions_are_joined_apart(outbox: Outbox, wire: StubWire) -> None:
    """Text of two sessions that alternates becomes two frames."""
    wire.takes_frames = False
    for seq in range(1, 4):
        outbox.send(token("a", seq, session="one", turn="t1"))
        outbox.send(token("b", seq, session="two", turn="t2"))
    wire.takes_frames = True
    outbox.flush()
    assert [(frame["session_id"], frame["content"], frame["seq"]) for frame in wire.frames] == [
        ("one", "aaa", 3),
        ("two", "bbb", 3),
    ]


def test_text_is_not_joined_across_another_event_of_its_session(outbox: Outbox, wire: StubWire) -> None:
    """The order within a session is kept; events of other sessions and of none do not matter."""
    wire.takes_frames = False
    outbox.send(token("a", 1))
    outbox.send(PONG)
    outbox.send(events.Progress(session_id="other", seq=9, turn_id="o", done=1, total=2))
    outbox.send(token("b", 2))
    outbox.send(events.Progress(session_id="s", seq=3, turn_id="t", done=1, total=2))
    outbox.send(token("c", 4))
    outbox.send(token("d", 5, turn="next"))
    wire.takes_frames = True
    outbox.flush()
    assert [(frame["op"], frame.get("content")) for frame in wire.frames] == [
        ("token", "ab"), ("pong", None), ("progress", None), ("progress", None), ("token", "c"), ("token", "d"),
    ]  # fmt: skip


def test_tokens_with_logprobs_are_not_joined(outbox: Outbox, wire: StubWire) -> None:
    """Each keeps its own probabilities."""
    logprobs = (TokenLogprobs(token="a", token_id=1, logprob=-0.5, top=()),)
    wire.takes_frames = False
    outbox.send(token("a", 1, logprobs=logprobs))
    outbox.send(token("b", 2, logprobs=logprobs))
    outbox.send(token("c", 3))
    wire.takes_frames = True
    outbox.flush()
    assert [(frame["content"], len(frame.get("logprobs", ()))) for frame in wire.frames] == [
        ("a", 1),
        ("b", 1),
        ("c", 0),
    ]


def test_flushing_stops_when_the_socket_is_behind_again(outbox: Outbox, wire: StubWire) -> None:
    """The rest waits for the next time, and what comes later queues behind it."""
    wire.takes_frames = False
    for _ in range(3):
        outbox.send(PONG)
    write = wire.write_text

    def write_one(frame: bytes) -> None:
        write(frame)
        wire.takes_frames = False

    wire.write_text = write_one  # type: ignore[method-assign]
    wire.takes_frames = True
    outbox.flush()
    assert len(wire.written) == 1
    wire.takes_frames = True
    outbox.flush()
    assert len(wire.written) == 2
    outbox.send(token("a", 1))
    assert len(wire.written) == 2
    for _ in range(2):
        wire.takes_frames = True
        outbox.flush()
    assert [frame["op"] for frame in wire.frames] == ["pong", "pong", "pong", "token"]


def test_joined_frames_stay_small(wire: StubWire, metrics: DaemonMetrics) -> None:
    """However much waits, a client with an ordinary frame limit can read each frame."""
    outbox = Outbox(wire, limit_bytes=2**20, overflowed=Overflows(), metrics=metrics)
    wire.takes_frames = False
    for seq in range(1, 301):
        outbox.send(token("x" * 1000, seq))
    wire.takes_frames = True
    outbox.flush()
    assert len(wire.written) == 5
    assert max(map(len, wire.written)) < MAX_JOINED_BYTES + 200
    assert sum(len(frame["content"]) for frame in wire.frames) == 300_000


def test_past_the_limit_the_outbox_gives_up_once(
    outbox: Outbox, wire: StubWire, metrics: DaemonMetrics, overflows: Overflows
) -> None:
    """What waited is forgotten, what comes later is not taken, and the bytes are given back to the gauge."""
    wire.takes_frames = False
    outbox.send(token("x" * 1000, 1))
    assert overflows.count == 0
    assert metrics.registry.get_sample_value("inferencecenter_outbox_bytes") == 1000
    outbox.send(PONG)
    outbox.send(PONG)
    assert overflows.count == 1
    assert outbox.waiting_bytes == 0
    wire.takes_frames = True
    outbox.flush()
    outbox.send(PONG)
    assert wire.written == []
    assert metrics.registry.get_sample_value("inferencecenter_outbox_bytes") == 0
    assert metrics.registry.get_sample_value("inferencecenter_outbox_overflows_total") == 1


@pytest.mark.parametrize(("write_rest", "n_written"), [(True, 1), (False, 0)])
def test_closing_writes_the_rest_or_forgets_it(
    outbox: Outbox, wire: StubWire, metrics: DaemonMetrics, write_rest: bool, n_written: int
) -> None:
    """Before a good-bye what waits goes out, ready or not; after a loss it does not."""
    wire.takes_frames = False
    outbox.send(PONG)
    outbox.close(write_rest=write_rest)
    assert len(wire.written) == n_written
    assert metrics.registry.get_sample_value("inferencecenter_outbox_bytes") == 0


def test_old_sockets_are_sent_only_what_they_know(wire: StubWire, metrics: DaemonMetrics) -> None:
    """Until the socket speaks v1, other ops are left out; afterwards tokens carry their numbers."""
    outbox = Outbox(wire, limit_bytes=1000, overflowed=Overflows(), metrics=metrics)
    outbox.send(PONG)
    outbox.send(token("a", 1))
    outbox.enable_v1()
    outbox.send(PONG)
    outbox.send(token("b", 2))
    assert wire.frames == [
        {"op": "token", "session_id": "s", "content": "a"},
        {"op": "pong"},
        {"op": "token", "session_id": "s", "seq": 2, "turn_id": "t", "content": "b"},
    ]


def test_a_replay_is_encoded_as_the_peer_reads(
    outbox: Outbox, wire: StubWire, overflows: Overflows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events far beyond the limit keep their place, and none is encoded before the peer has read what is before it."""
    encoded: list[int] = []

    def counted(event: Any) -> Iterator[tuple[bytes, bool]]:
        encoded.append(event.seq)
        return encode_in_pieces(event)

    monkeypatch.setattr(outbox_module, "encode_in_pieces", counted)
    wire.takes_frames = False
    outbox.replay([token("x" * 5000, seq) for seq in (1, 2, 3)])
    outbox.send(token("live", 4))
    assert (encoded, overflows.count, outbox.replay_pending) == ([], 0, True)
    monkeypatch.setattr(wire, "write_text", _shut_after_each(wire))
    for n_read in (1, 2, 3):
        wire.takes_frames = True
        outbox.flush()
        assert encoded == list(range(1, n_read + 1))
    assert not outbox.replay_pending
    wire.takes_frames = True
    outbox.flush()
    assert [frame["seq"] for frame in wire.frames] == [1, 2, 3, 4]


def _shut_after_each(wire: StubWire) -> Callable[[bytes], None]:
    def write(frame: bytes) -> None:
        wire.written.append(frame)
        wire.takes_frames = False

    return write


def session(*contents: str) -> events.Session:
    """Return the answer to ``get_session``."""
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    messages = tuple(ChatMessage(role="user", content=content) for content in contents)
    turns = tuple(TranscriptTurn(turn_id="t", finish_reason="stop", messages=2, usage=usage) for _ in contents[:3])
    facts = {"epoch": "e", "seq": 1, "state": "idle", "model": "m", "n_ctx": 1, "n_tokens": 1, "on_full": "stop"}
    said = {"transcript": messages, "turns": turns, "usage": usage}
    return events.Session(session_id="s", **facts, **said, dropped_messages=0, params={}, metadata={})


@settings(deadline=None)
@given(st.lists(st.text()), st.sampled_from(["", "ä" * 200_000]), st.none() | st.text(max_size=9))
def test_pieces_are_what_the_codec_writes(contents: list[str], last: str, request_id: str | None) -> None:
    """Whatever is said; only the last is shorter than the others."""
    event = session(*contents, last).model_copy(update={"id": request_id})
    pieces = list(encode_in_pieces(event))
    assert json.loads(b"".join(piece for piece, _ in pieces)) == json.loads(encode(event) or "")
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {len(piece) for piece, _ in pieces[:-1]} <= {PIECE_BYTES}
    assert len(pieces[-1][0]) <= PIECE_BYTES + 2


async def test_a_long_answer_goes_out_a_piece_in_a_turn_of_the_loop(outbox: Outbox, wire: StubWire) -> None:
    """However fast the peer reads; what is said meanwhile comes after it."""
    outbox.replay([session(*["x" * 1000] * 300)])
    outbox.send(PONG)
    seen = []
    while outbox.replay_pending:
        seen.append(len(wire.pieces))
        await asyncio.sleep(0)
    assert seen == [1, 2, 3, 4]
    await asyncio.sleep(0)
    assert [frame["op"] for frame in wire.frames] == ["session", "pong"]
    assert len(wire.frames[0]["transcript"]) == 300


async def test_many_short_events_go_out_in_turns(outbox: Outbox, wire: StubWire) -> None:
    """A replay of thousands leaves the event loop to others between them."""
    outbox.replay([token("x", seq) for seq in range(1, 1001)])
    seen = []
    while outbox.replay_pending:
        seen.append(len(wire.written))
        await asyncio.sleep(0)
    assert seen[0] == 64
    assert max(after - before for before, after in pairwise(seen)) == 64
    assert [frame["seq"] for frame in wire.frames] == list(range(1, 1001))


async def test_the_rest_of_a_long_answer_is_written_before_the_end(outbox: Outbox, wire: StubWire) -> None:
    """A socket that is closed after all that was sent ends with a whole message; one that is lost writes no more."""
    for write_rest in (True, False):
        wire.written.clear()
        wire.pieces.clear()
        made = Outbox(wire, limit_bytes=1000, overflowed=Overflows(), metrics=DaemonMetrics())
        made.enable_v1()
        made.replay([session(*["x" * 1000] * 300)])
        made.close(write_rest=write_rest)
        await asyncio.sleep(0)
        assert len(wire.written) == write_rest


async def test_who_waits_for_a_replay_is_told_when_it_has_gone_or_never_will(outbox: Outbox, wire: StubWire) -> None:
    """The next bulk answer is made when the last one was read, or the socket is closed."""
    tasks = TaskGroup("test")
    for ends in (outbox.flush, lambda: outbox.close(write_rest=False)):
        wire.takes_frames = False
        outbox.replay([token("x", 1)])
        waiting = tasks.spawn(outbox.wait_replayed(), name="replayed")
        await asyncio.sleep(0)
        assert not waiting.done()
        wire.takes_frames = True
        ends()
        async with asyncio.timeout(60):
            await waiting


def test_frames_of_sessions_that_ended_are_forgotten(outbox: Outbox) -> None:
    """However a session leaves a socket, the beginning of its frames goes with it."""
    stats = TurnStats(ttft_ms=0, total_ms=0, tokens=0, tps=0, prompt_tokens=0, cached_tokens=0, queue_ms=0, preempted=0)
    usage = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    common: dict[str, Any] = {"session_id": "s", "seq": 2}
    endings: list[Event] = [
        events.SessionExpired(**common),
        events.SessionClosed(session_id="s"),
        events.SessionDetached(session_id="s", reason="resumed_elsewhere"),
        events.End(**common, turn_id="t", finish_reason="stop", warnings=(), usage=usage, stats=stats),
        events.Error(**common, turn_id="t", code="internal", message="", error="", retryable=False),
    ]
    for ending in endings:
        outbox.send(token("a", 1))
        assert outbox._frames
        outbox.send(ending)
        assert not outbox._frames, ending.op


def test_repr_shows_what_waits(outbox: Outbox, wire: StubWire) -> None:
    """An outbox can be looked at in a debugger."""
    wire.takes_frames = False
    outbox.send(PONG)
    assert repr(outbox) == "<Outbox 1 frames, 13 bytes>"
