"""What waits for a slow reader: joined, bounded, and counted on without a gap."""

from __future__ import annotations

import json

import pytest

from inferencecenter.api.responses.outbox import ResponseOutbox
from inferencecenter.api.responses.response_events import ResponseEvent, ResponseEventBuilder
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.api.responses.test_response_events import echo, end, queued, thought, token
from tests.server.harness import StubWire


def builder() -> ResponseEventBuilder:
    """Return what tells a response."""
    return ResponseEventBuilder(echo(), top_logprobs=0, clock=lambda: 0.0)


class Slow:
    """An outbox to a peer that a test has read."""

    def __init__(self, *, limit_bytes: int = 10_000) -> None:
        self.wire, self.metrics, self.overflows = StubWire(), DaemonMetrics(), 0
        self.broken: list[ResponseEventBuilder] = []
        self.outbox = ResponseOutbox(
            self.wire,
            limit_bytes=limit_bytes,
            overflowed=self._overflowed,
            broken=self.broken.append,
            metrics=self.metrics,
        )

    def _overflowed(self) -> None:
        self.overflows += 1

    @property
    def waiting_bytes(self) -> float | None:
        """What the metrics say that waits."""
        return self.metrics.registry.get_sample_value("inferencecenter_outbox_bytes")


def test_a_peer_that_reads_gets_each_piece_at_once() -> None:
    """Nothing waits."""
    slow, one = Slow(), builder()
    for event in (queued(), token("a"), token("b")):
        slow.outbox.send_event(one, event)
    assert [frame["delta"] for frame in slow.wire.frames if "delta" in frame] == ["a", "b"]
    assert slow.waiting_bytes == 0


def test_text_that_waits_is_joined_by_response_and_kind() -> None:
    """Each response's frames are in order and numbered without a gap; what is no frame of one keeps its place."""
    slow, one, other = Slow(), builder(), builder()
    slow.outbox.send_event(one, queued())
    slow.outbox.send_event(other, queued())
    slow.wire.takes_frames = False
    for event in (thought("h"), thought("m"), token("a"), token("b")):
        slow.outbox.send_event(one, event)
        slow.outbox.send_event(other, token("x"))
    slow.outbox.send_frame(b'{"type":"error"}')
    slow.outbox.send_event(one, end())
    n_before = len(slow.wire.frames)
    slow.wire.takes_frames = True
    slow.outbox.flush()
    later = slow.wire.frames[n_before:]
    assert [frame["delta"] for frame in later if "delta" in frame] == ["hm", "xxxx", "ab"]
    assert [frame["type"] for frame in later][-1] == "response.completed"
    numbers = [frame["sequence_number"] for frame in slow.wire.frames if frame.get("sequence_number") is not None]
    assert sorted(numbers) == sorted([*range(numbers[-1] + 1), *range(len(numbers) - numbers[-1] - 1)])
    assert (slow.waiting_bytes, slow.outbox.waiting_bytes) == (0, 0)


def test_a_peer_that_stops_reading_is_given_up_once() -> None:
    """Nothing is kept for it any more."""
    slow, one = Slow(limit_bytes=1000), builder()
    slow.wire.takes_frames = False
    for _ in range(100):
        slow.outbox.send_event(one, token("x" * 100))
    slow.outbox.send_frame(b"{}")
    assert (slow.overflows, slow.outbox.waiting_bytes, slow.waiting_bytes) == (1, 0, 0)
    assert slow.wire.written == []


def test_what_waits_is_written_when_the_socket_closes_well() -> None:
    """And forgotten when it does not."""
    for write_rest in (True, False):
        slow, one = Slow(), builder()
        slow.wire.takes_frames = False
        slow.outbox.send_event(one, queued())
        slow.outbox.send_frame(json.dumps({"type": "error"}).encode())
        slow.outbox.close(write_rest=write_rest)
        assert len(slow.wire.frames) == (3 if write_rest else 0)
        assert slow.waiting_bytes == 0


def test_a_response_that_cannot_be_told_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits of it is dropped without a word, and it is reported once."""
    slow, one, other = Slow(), builder(), builder()
    slow.outbox.send_event(one, queued())
    slow.outbox.send_event(other, queued())
    slow.wire.takes_frames = False
    monkeypatch.setattr(one, "feed", failing)
    for event in (token("a"), end()):
        slow.outbox.send_event(one, event)
        slow.outbox.send_event(other, event)
    slow.wire.takes_frames = True
    slow.outbox.flush()
    assert slow.broken == [one]
    assert [frame["delta"] for frame in slow.wire.frames if "delta" in frame] == ["a"]
    assert slow.wire.frames[-1]["type"] == "response.completed"
    assert slow.waiting_bytes == 0


def failing(_event: object) -> list[ResponseEvent]:
    """Fail as a defect does."""
    raise RuntimeError
