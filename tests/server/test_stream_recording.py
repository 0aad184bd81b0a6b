"""Recordings of streams: events by number, memory shared fairly, and their end."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import stream_recording
from inferencecenter.server.stream_recording import StreamRecording, StreamRecordings
from tests.api.http_client import tick

EVENT = b"x" * 1000


def read_all(recording: StreamRecording, start: int = 0) -> list[bytes]:
    """Return all events from a number on."""
    found: list[bytes] = []
    while some := recording.read(start + len(found)):
        found += some
    return found


def test_events_are_read_from_any_number() -> None:
    """They are read in parts of bounded size, up to the last."""
    recording = StreamRecordings().begin("ada")
    events = [b"%d" % number + EVENT for number in range(200)]
    for event in events:
        recording.add(event)
    assert len(recording.read(0)) < 100
    assert (read_all(recording), read_all(recording, 150)) == (events, events[150:])
    assert recording.read(200) == recording.read(500) == []


def test_client_with_more_than_its_share_loses_its_oldest_events() -> None:
    """Other clients lose none; of its recordings the oldest are dropped first."""
    recordings = StreamRecordings(room_bytes=100_000)
    modest, old, new = (recordings.begin(client_id) for client_id in ("bob", "ada", "ada"))
    modest.add(EVENT)
    for recording in (old, new):
        for _ in range(60):
            recording.add(EVENT)
    assert read_all(modest) == [EVENT]
    assert read_all(new) == [EVENT] * 60
    with pytest.raises(InferenceCenterError) as lost:
        old.read(0)
    assert (lost.value.code, lost.value.field) == (ErrorCode.OVERLOADED, "starting_after")
    assert sum(each.n_bytes for each in (modest, old, new)) <= 100_000
    assert 0 < len(read_all(old, 59)) <= 1


async def test_reader_is_woken_by_events_and_by_the_end() -> None:
    """One that has given up leaves nothing behind."""
    recording = StreamRecordings().begin("ada")
    first, gone = recording.changed(), recording.changed()
    gone.cancel()
    recording.add(b"a")
    assert first.done()
    second = recording.changed()
    recording.finish()
    assert second.done()


async def test_recording_is_found_by_its_client_until_it_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended recording is kept for some time, a discarded one not at all; it takes no later events."""
    monkeypatch.setattr(stream_recording, "KEPT_S", 0.0)
    recordings = StreamRecordings()
    ended, deleted = recordings.begin("ada"), recordings.begin("ada")
    recordings.publish(ended, "resp_1")
    recordings.publish(deleted, "resp_2")
    assert recordings.find("ada", "resp_1") is ended
    assert recordings.find("bob", "resp_1") is None
    recordings.finish(ended)
    await tick(10)
    recordings.discard(deleted)
    deleted.add(EVENT)
    recordings.discard(deleted)
    assert recordings.find("ada", "resp_1") is recordings.find("ada", "resp_2") is None
    assert len(recordings) == 0
