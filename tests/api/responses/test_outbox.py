"""The outbox of a slow reader: coalescing, limits and gapless sequence numbers."""

from __future__ import annotations

import json

import pytest

from inferencecenter.api.responses.response_events import ResponseEvent, ResponseEventBuilder
from inferencecenter.api.responses.socket import ResponseOutbox
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.api.responses.test_response_events import echo, end, queued, reasoning_token, token
from tests.server.harness import StubWire


def builder() -> ResponseEventBuilder:
    """Return an event builder of a response."""
    return ResponseEventBuilder(echo(), top_logprobs=0, clock=lambda: 0.0)


class SlowPeerOutbox:
    """An outbox whose peer reads only when a test says so."""

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
        """The waiting bytes that the metrics report."""
        return self.metrics.registry.get_sample_value("inferencecenter_outbox_bytes")


def test_reading_peer_receives_each_piece_at_once() -> None:
    """Nothing waits."""
    slow, one = SlowPeerOutbox(), builder()
    for event in (queued(), token("a"), token("b")):
        slow.outbox.send_event(one, event)
    assert [frame["delta"] for frame in slow.wire.frames if "delta" in frame] == ["a", "b"]
    assert slow.waiting_bytes == 0


def test_waiting_text_is_coalesced_by_response_and_kind() -> None:
    """Frames of each response stay in order and gapless, and other frames keep their position."""
    slow, one, other = SlowPeerOutbox(), builder(), builder()
    slow.outbox.send_event(one, queued())
    slow.outbox.send_event(other, queued())
    slow.wire.takes_frames = False
    for event in (reasoning_token("h"), reasoning_token("m"), token("a"), token("b")):
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


def test_stalled_peer_is_dropped_once() -> None:
    """Nothing is queued for it afterwards."""
    slow, one = SlowPeerOutbox(limit_bytes=1000), builder()
    slow.wire.takes_frames = False
    for _ in range(100):
        slow.outbox.send_event(one, token("x" * 100))
    slow.outbox.send_frame(b"{}")
    assert (slow.overflows, slow.outbox.waiting_bytes, slow.waiting_bytes) == (1, 0, 0)
    assert slow.wire.written == []


def test_waiting_frames_are_sent_on_a_clean_close() -> None:
    """They are discarded on any other close."""
    for write_rest in (True, False):
        slow, one = SlowPeerOutbox(), builder()
        slow.wire.takes_frames = False
        slow.outbox.send_event(one, queued())
        slow.outbox.send_frame(json.dumps({"type": "error"}).encode())
        slow.outbox.close(write_rest=write_rest)
        assert len(slow.wire.frames) == (3 if write_rest else 0)
        assert slow.waiting_bytes == 0


def test_failing_builder_affects_only_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queued events are dropped and the failure is reported once."""
    slow, one, other = SlowPeerOutbox(), builder(), builder()
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
    """Raise as a defect does."""
    raise RuntimeError
