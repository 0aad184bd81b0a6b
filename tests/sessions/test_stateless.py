"""Stateless sessions, for clients that send the whole conversation with each request."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol import requests
from inferencecenter.sessions.journal import StorageFault
from tests.sessions.conftest import SessionHarness
from tests.sessions.test_manager import EVE, refused
from tests.sessions.test_prefix_match import stateless


@pytest.fixture
def world() -> SessionHarness:
    """Sessions with a limit of four per client and six in total, all detached."""
    return SessionHarness()


def idle(world: SessionHarness) -> str:
    """A stateless session last used at its own time."""
    world.now += 1
    session_id = stateless(world)
    world.turn(session_id, "a", "b")
    return session_id


def there(world: SessionHarness, *session_ids: str) -> list[bool]:
    """The sessions that exist."""
    return [session_id in world.sessions.session_ids() for session_id in session_ids]


def test_stateless_session_is_not_counted(world: SessionHarness) -> None:
    """It is not listed, counted or stored, and its KV stays off the disk; its tokens count."""
    session_id = idle(world)
    assert world.sessions.list(world.client, requests.ListSessions(op="list_sessions")).sessions == ()
    assert world.sessions.session_counts("ada") == (0, 0)
    assert world.journal is not None
    assert [type(record).__name__ for record in world.journal.records] == ["UsageRecorded"] * len(world.journal.records)
    assert not world.engine.last.durable
    after = requests.ListSessions(op="list_sessions", after=session_id)
    refused(ErrorCode.SESSION_NOT_FOUND, world.sessions.list, world.client, after)


def test_stateless_session_opens_while_the_store_cannot_write(world: SessionHarness) -> None:
    """It needs no record."""
    assert world.journal is not None
    world.journal.fault = StorageFault("disk full")
    idle(world)


def test_least_recently_used_stateless_session_is_evicted(world: SessionHarness) -> None:
    """At the client's limit an idle one is closed; a busy one stays."""
    first, second, third, fourth = (idle(world) for _ in range(4))
    world.turn(first, "c", "d")
    world.infer(second, "busy")
    fifth = idle(world)
    assert there(world, first, second, third, fourth, fifth) == [True, True, False, True, True]


def test_busy_stateless_session_is_not_evicted(world: SessionHarness) -> None:
    """If all are busy, another is refused."""
    for _ in range(4):
        world.infer(stateless(world))
    refused(ErrorCode.SESSION_LIMIT, stateless, world)


def test_stateless_session_never_evicts_an_ordinary_one(world: SessionHarness) -> None:
    """If the daemon is full of ordinary sessions, it is refused."""
    world.reopen(max_sessions=2)
    own = [world.create(), world.create()]
    world.sessions.detach(world.sink)
    refused(ErrorCode.SESSION_LIMIT, stateless, world)
    assert there(world, *own) == [True, True]


def test_stateless_session_is_evicted_for_an_ordinary_one(world: SessionHarness) -> None:
    """It is the least recently used one of the same client, or else of any client."""
    world.reopen(max_sessions=3)
    mine = [idle(world) for _ in range(2)]
    own = world.create()
    world.sessions.detach(world.sink)
    theirs = world.create(EVE)
    assert there(world, *mine, own, theirs) == [False, True, True, True]
    another = stateless(world, EVE)
    assert there(world, *mine, own, theirs, another) == [False, False, True, True, True]
    world.create()
    assert there(world, own, theirs, another) == [True, True, False]


def test_stateless_session_is_not_evicted_at_a_clients_own_limit(world: SessionHarness) -> None:
    """Closing it would not help there."""
    world.reopen(when_full="evict")
    own = [world.create() for _ in range(4)]
    world.sessions.detach(world.sink)
    kept = idle(world)
    world.sessions.detach(world.sink)
    world.create()
    assert there(world, own[0], kept) == [False, True]


def test_stateless_session_expires_after_its_own_ttl(world: SessionHarness) -> None:
    """``stateless_ttl_s`` applies."""
    session_id = idle(world)
    assert world.timers[-1].delay_s == 900.0
    world.now += 901
    world.fire()
    assert there(world, session_id) == [False]
    assert world.engine.released == [session_id]


def test_fork_of_a_stateless_session_is_stateless(world: SessionHarness) -> None:
    """Forks serve several answers to one question."""
    forked = world.fork(idle(world))
    assert world.sessions.session_counts("ada") == (0, 0)
    world.turn(forked, "c", "d")


def test_purge_of_the_client_closes_its_stateless_sessions(world: SessionHarness) -> None:
    """They are closed like its other sessions."""
    session_id = idle(world)
    assert world.sessions.purge("client", "ada") == 1
    assert there(world, session_id) == [False]
