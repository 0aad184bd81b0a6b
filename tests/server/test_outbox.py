"""The bounded writer of a socket."""

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


class CallCounter:
    """Counts calls."""

    count = 0

    def __call__(self) -> None:
        """Count."""
        self.count += 1


@pytest.fixture
def wire() -> StubWire:
    """A socket that accepts frames."""
    return StubWire()


@pytest.fixture
def metrics() -> DaemonMetrics:
    """Metrics of this test."""
    return DaemonMetrics()


@pytest.fixture
def overflows() -> CallCounter:
    """The outbox's overflow callback."""
    return CallCounter()


@pytest.fixture
def outbox(wire: StubWire, metrics: DaemonMetrics, overflows: CallCounter) -> Outbox:
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
    """A frame equals the encoder's byte for byte, for any text and both protocol versions."""
    wire = StubWire()
    outbox = Outbox(wire, limit_bytes=1000, overflowed=CallCounter(), metrics=DaemonMetrics())
    if v1:
        outbox.enable_v1()
    event = token(content, seq, session=session, turn=turn)
    outbox.send(event)
    assert [frame.decode() for frame in wire.written] == [encode(event, first_protocol=not v1)]


def reasoning(content: str, seq: int, *, turn: str = "t") -> events.Reasoning:
    """Return a reasoning event."""
    return events.Reasoning(session_id="s", seq=seq, turn_id=turn, content=content)


def call(arguments: str, seq: int, *, index: int = 0, name: str | None = None) -> events.ToolCall:
    """Return a tool call delta."""
    return events.ToolCall(
        session_id="s", seq=seq, turn_id="t", index=index, call_id=f'"{index}', name=name, arguments=arguments
    )


@given(st.text(), st.integers(min_value=1, max_value=2**53), st.integers(0, 200))
def test_reasoning_and_call_frames_equal_the_codecs(text: str, seq: int, index: int) -> None:
    """A frame equals the encoder's byte for byte; sockets of protocol version 0 get none."""
    for event in (reasoning(text, seq), call(text, seq, index=index), call(text, seq, index=index, name="f")):
        for v1 in (True, False):
            wire = StubWire()
            outbox = Outbox(wire, limit_bytes=1000, overflowed=CallCounter(), metrics=DaemonMetrics())
            if v1:
                outbox.enable_v1()
            outbox.send(event)
            assert [frame.decode() for frame in wire.written] == ([encode(event)] if v1 else [])


def test_sent_reports_what_is_no_text(wire: StubWire, metrics: DaemonMetrics) -> None:
    """It is called with events that the socket's protocol lacks and with replayed ones, until the outbox is closed."""
    sent: list[Event] = []
    outbox = Outbox(wire, sent=sent.append, limit_bytes=1000, overflowed=CallCounter(), metrics=metrics)
    progress = events.Progress(session_id="s", seq=1, turn_id="t", done=1, total=2)
    outbox.send(progress)
    assert (sent, wire.written) == ([progress], [])
    outbox.enable_v1()
    for event in (token("a", 2), reasoning("b", 3)):
        outbox.send(event)
    assert sent == [progress]
    outbox.replay((PONG,))
    outbox.close(write_rest=False)
    outbox.send(progress)
    assert sent == [progress, PONG]


def test_pending_deltas_merge_by_kind(outbox: Outbox, wire: StubWire) -> None:
    """Adjacent deltas of reasoning, text or one call's arguments are joined; the delta with a call's name is not."""
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


def test_writable_socket_gets_frames_at_once(outbox: Outbox, wire: StubWire, metrics: DaemonMetrics) -> None:
    """Every event is a frame of its own."""
    for event in (token("a", 1), token("b", 2), PONG):
        outbox.send(event)
    assert [frame["op"] for frame in wire.frames] == ["token", "token", "pong"]
    assert outbox.waiting_bytes == 0
    assert metrics.registry.get_sample_value("inferencecenter_frames_out_total") == 3


def test_pending_text_is_merged(outbox: Outbox, wire: StubWire) -> None:
    """One frame has the whole text and the last number."""
    wire.takes_frames = False
    for seq, content in enumerate(['say "', "é\n", "\\u0041"], start=4):
        outbox.send(token(content, seq))
    wire.takes_frames = True
    outbox.flush()
    assert wire.written == [str(encode(token('say "é\n\\u0041', 6))).encode()]
    assert outbox.waiting_bytes == 0


def test_text_merges_per_session(outbox: Outbox, wire: StubWire) -> None:
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


def test_text_does_not_merge_across_events_of_its_session(outbox: Outbox, wire: StubWire) -> None:
    """Events of other sessions do not matter."""
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


def test_tokens_with_logprobs_are_not_merged(outbox: Outbox, wire: StubWire) -> None:
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


def test_flush_stops_when_the_socket_is_blocked(outbox: Outbox, wire: StubWire) -> None:
    """The rest stays queued in order."""
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


def test_merged_frames_are_bounded(wire: StubWire, metrics: DaemonMetrics) -> None:
    """Clients with an ordinary frame limit can read each frame."""
    outbox = Outbox(wire, limit_bytes=2**20, overflowed=CallCounter(), metrics=metrics)
    wire.takes_frames = False
    for seq in range(1, 301):
        outbox.send(token("x" * 1000, seq))
    wire.takes_frames = True
    outbox.flush()
    assert len(wire.written) == 5
    assert max(map(len, wire.written)) < MAX_JOINED_BYTES + 200
    assert sum(len(frame["content"]) for frame in wire.frames) == 300_000


def test_overflow_is_reported_once(
    outbox: Outbox, wire: StubWire, metrics: DaemonMetrics, overflows: CallCounter
) -> None:
    """Pending events are dropped, later ones refused, and the gauge is reset."""
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
def test_close_flushes_or_drops(
    outbox: Outbox, wire: StubWire, metrics: DaemonMetrics, write_rest: bool, n_written: int
) -> None:
    """An orderly close flushes; a lost socket drops."""
    wire.takes_frames = False
    outbox.send(PONG)
    outbox.close(write_rest=write_rest)
    assert len(wire.written) == n_written
    assert metrics.registry.get_sample_value("inferencecenter_outbox_bytes") == 0


def test_version_0_sockets_get_known_ops(wire: StubWire, metrics: DaemonMetrics) -> None:
    """After the switch to v1 tokens have their numbers."""
    outbox = Outbox(wire, limit_bytes=1000, overflowed=CallCounter(), metrics=metrics)
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


def test_replay_is_encoded_lazily(
    outbox: Outbox, wire: StubWire, overflows: CallCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events beyond the limit keep their order, and each is encoded when the peer has read the ones before."""
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
    """Return the reply to ``get_session``."""
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    messages = tuple(ChatMessage(role="user", content=content) for content in contents)
    turns = tuple(TranscriptTurn(turn_id="t", finish_reason="stop", messages=2, usage=usage) for _ in contents[:3])
    facts = {"epoch": "e", "seq": 1, "state": "idle", "model": "m", "n_ctx": 1, "n_tokens": 1, "on_full": "stop"}
    said = {"transcript": messages, "turns": turns, "usage": usage}
    return events.Session(session_id="s", **facts, **said, dropped_messages=0, params={}, metadata={})


@settings(deadline=None)
@given(st.lists(st.text()), st.sampled_from(["", "ä" * 200_000]), st.none() | st.text(max_size=9))
def test_pieces_equal_the_codecs(contents: list[str], last: str, request_id: str | None) -> None:
    """This holds for any content; only the last piece is shorter."""
    event = session(*contents, last).model_copy(update={"id": request_id})
    pieces = list(encode_in_pieces(event))
    assert json.loads(b"".join(piece for piece, _ in pieces)) == json.loads(encode(event) or "")
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {len(piece) for piece, _ in pieces[:-1]} <= {PIECE_BYTES}
    assert len(pieces[-1][0]) <= PIECE_BYTES + 2


async def test_long_message_is_sent_one_piece_per_iteration(outbox: Outbox, wire: StubWire) -> None:
    """Later events are sent after it."""
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


async def test_long_replay_yields_to_the_loop(outbox: Outbox, wire: StubWire) -> None:
    """Thousands of short events are sent over several iterations."""
    outbox.replay([token("x", seq) for seq in range(1, 1001)])
    seen = []
    while outbox.replay_pending:
        seen.append(len(wire.written))
        await asyncio.sleep(0)
    assert seen[0] == 64
    assert max(after - before for before, after in pairwise(seen)) == 64
    assert [frame["seq"] for frame in wire.frames] == list(range(1, 1001))


async def test_close_completes_a_long_message(outbox: Outbox, wire: StubWire) -> None:
    """A lost socket writes no more."""
    for write_rest in (True, False):
        wire.written.clear()
        wire.pieces.clear()
        made = Outbox(wire, limit_bytes=1000, overflowed=CallCounter(), metrics=DaemonMetrics())
        made.enable_v1()
        made.replay([session(*["x" * 1000] * 300)])
        made.close(write_rest=write_rest)
        await asyncio.sleep(0)
        assert len(wire.written) == write_rest


async def test_replay_waiters_are_notified(outbox: Outbox, wire: StubWire) -> None:
    """They are notified when the replay was sent, and when the socket closes."""
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


def test_frame_prefixes_of_ended_sessions_are_dropped(outbox: Outbox) -> None:
    """This holds for every way in which a session leaves the socket."""
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


def test_repr_shows_pending_events(outbox: Outbox, wire: StubWire) -> None:
    """The text is for debugging."""
    wire.takes_frames = False
    outbox.send(PONG)
    assert repr(outbox) == "<Outbox 1 frames, 13 bytes>"
