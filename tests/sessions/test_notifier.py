"""Notifications about sessions to the other sockets of a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.protocol import requests
from inferencecenter.protocol.events import MetadataSet, SessionClosed
from tests.sessions.conftest import FakeJournal, FakeSink, SessionHarness

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.context import EventSink


@dataclass
class Reader:
    """Records the client, the event and the sinks that already have it."""

    told: list[tuple[str, Event, tuple[EventSink | None, ...]]] = field(default_factory=list)

    def __call__(self, client_id: str, event: Event, knowing: tuple[EventSink | None, ...]) -> None:
        """Record the notification."""
        self.told.append((client_id, event, knowing))

    @property
    def events(self) -> list[Event]:
        """The events only."""
        return [event for _, event, _ in self.told]


@pytest.fixture
def reader(world: SessionHarness) -> Reader:
    """A subscriber to all notifications."""
    reader = Reader()
    world.sessions.subscribe(reader)
    return reader


def close(world: SessionHarness, session_id: str, by: FakeSink | None = None) -> None:
    """Close a session from a socket."""
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=session_id), by)


def test_session_closed_elsewhere_is_announced(world: SessionHarness, reader: Reader) -> None:
    """The subscriber is notified after the end of its turn; the requester receives only the reply."""
    session_id, elsewhere = world.create(), FakeSink()
    world.infer(session_id)
    close(world, session_id, elsewhere)
    assert world.sink.ops[-2:] == ["end", "session_closed"]
    assert (elsewhere.events, reader.events) == ([], [SessionClosed(session_id=session_id)])
    [(client_id, _, knowing)] = reader.told
    assert client_id == "ada"
    assert any(each is world.sink for each in knowing)
    assert any(each is elsewhere for each in knowing)


def test_closing_ones_own_session_is_announced_once(world: SessionHarness) -> None:
    """The requester receives the reply only."""
    session_id = world.create()
    close(world, session_id, world.sink)
    assert "session_closed" not in world.sink.ops


def test_every_end_of_a_session_is_announced(world: SessionHarness, reader: Reader) -> None:
    """A purge, an expiry, a closed socket and an eviction are announced."""
    purged = world.create()
    world.sessions.purge("session", purged)
    expiring = world.create(ttl_s=10)
    world.now += 11
    world.fire()
    lost = world.create(on_disconnect="close")
    world.sessions.detach(world.sink)
    sessions = [world.create(store=False) for _ in range(world.client.max_sessions)]
    world.sessions.detach(world.sink)
    world.create()
    gone = [event.session_id for event in reader.events if isinstance(event, SessionClosed)]
    assert gone == [purged, expiring, lost, sessions[0]]
    assert world.sink.ops.count("session_expired") == 1


def test_new_session_with_metadata_is_announced(world: SessionHarness, reader: Reader) -> None:
    """A fork is announced too, and a session without metadata is not."""
    world.create()
    first = world.create(metadata={"title": "Ada"})
    fork = world.fork(first)
    assert reader.events == [MetadataSet(session_id=each, metadata={"title": "Ada"}) for each in (first, fork)]


def test_nothing_is_announced_before_the_commit(world: SessionHarness, reader: Reader) -> None:
    """A record that is not committed may be lost."""
    session_id = world.create()
    assert isinstance(world.journal, FakeJournal)
    world.journal.holding = True
    close(world, session_id)
    assert (reader.events, "session_closed" in world.sink.ops) == ([], False)
    world.journal.let_go()
    assert reader.events == [SessionClosed(session_id=session_id)]
    assert world.sink.ops[-1] == "session_closed"


def test_stateless_sessions_are_not_announced(world: SessionHarness, reader: Reader) -> None:
    """They are not listed."""
    request = requests.CreateSession(op="create_session", metadata={"title": "x"})
    session_id = world.sessions.create(world.client, request, world.sink, stateless=True).session_id
    close(world, session_id)
    assert reader.events == []
