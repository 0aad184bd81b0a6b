"""What is told of sessions to whoever of their client is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.protocol import requests
from inferencecenter.protocol.events import MetadataSet, SessionClosed
from tests.sessions.conftest import FakeJournal, FakeSink, World

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.client import EventSink


@dataclass
class Reader:
    """Keeps what it is told: the client, the event, and which of the sinks know."""

    told: list[tuple[str, Event, tuple[EventSink | None, ...]]] = field(default_factory=list)

    def __call__(self, client_id: str, event: Event, knowing: tuple[EventSink | None, ...]) -> None:
        """Keep it."""
        self.told.append((client_id, event, knowing))

    @property
    def events(self) -> list[Event]:
        """The events alone."""
        return [event for _, event, _ in self.told]


@pytest.fixture
def reader(world: World) -> Reader:
    """Somebody who reads all there is to tell."""
    reader = Reader()
    world.sessions.subscribe(reader)
    return reader


def close(world: World, session_id: str, by: FakeSink | None = None) -> None:
    """Close a session from some socket."""
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=session_id), by)


def test_who_has_a_session_hears_that_it_was_closed_elsewhere(world: World, reader: Reader) -> None:
    """After the end of its turn; the others hear the same, and whoever closed it is only answered."""
    session_id, elsewhere = world.create(), FakeSink()
    world.infer(session_id)
    close(world, session_id, elsewhere)
    assert world.sink.ops[-2:] == ["end", "session_closed"]
    assert (elsewhere.events, reader.events) == ([], [SessionClosed(session_id=session_id)])
    [(client_id, _, knowing)] = reader.told
    assert client_id == "ada"
    assert any(each is world.sink for each in knowing)
    assert any(each is elsewhere for each in knowing)


def test_who_closes_its_own_session_hears_it_once(world: World) -> None:
    """By the answer."""
    session_id = world.create()
    close(world, session_id, world.sink)
    assert "session_closed" not in world.sink.ops


def test_it_is_told_however_a_session_ends(world: World, reader: Reader) -> None:
    """Purged, closed with its socket, to make room for another, or unused for too long."""
    purged = world.create()
    world.sessions.purge("session", purged)
    expiring = world.create(ttl_s=10)
    world.now += 11
    world.fire()
    lost = world.create(on_disconnect="close")
    world.sessions.detach(world.sink)
    crowd = [world.create(store=False) for _ in range(world.client.max_sessions)]
    world.sessions.detach(world.sink)
    world.create()
    gone = [event.session_id for event in reader.events if isinstance(event, SessionClosed)]
    assert gone == [purged, expiring, lost, crowd[0]]
    assert world.sink.ops.count("session_expired") == 1


def test_a_session_with_a_title_is_told_when_it_begins(world: World, reader: Reader) -> None:
    """Lists elsewhere can show it, also when it is a fork; of one without metadata there is nothing to show yet."""
    world.create()
    first = world.create(metadata={"title": "Ada"})
    fork = world.fork(first)
    assert reader.events == [MetadataSet(session_id=each, metadata={"title": "Ada"}) for each in (first, fork)]


def test_nothing_is_told_before_it_is_safe(world: World, reader: Reader) -> None:
    """What the store has not written may not have happened."""
    session_id = world.create()
    assert isinstance(world.journal, FakeJournal)
    world.journal.holding = True
    close(world, session_id)
    assert (reader.events, "session_closed" in world.sink.ops) == ([], False)
    world.journal.let_go()
    assert reader.events == [SessionClosed(session_id=session_id)]
    assert world.sink.ops[-1] == "session_closed"


def test_nobody_hears_of_stateless_sessions(world: World, reader: Reader) -> None:
    """They are in no list."""
    request = requests.CreateSession(op="create_session", metadata={"title": "x"})
    session_id = world.sessions.create(world.client, request, world.sink, stateless=True).session_id
    close(world, session_id)
    assert reader.events == []
