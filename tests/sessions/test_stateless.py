"""Sessions for clients that send the whole conversation: kept for a while, and in nobody's way."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol import requests
from inferencecenter.sessions.journal import StorageFault
from tests.sessions.conftest import World
from tests.sessions.test_manager import EVE, refused
from tests.sessions.test_prefix_match import stateless


@pytest.fixture
def world() -> World:
    """Sessions, of which a client may have four, and all clients together six; nobody listens to them."""
    return World()


def idle(world: World) -> str:
    """A stateless session that has been used at its own time."""
    world.now += 1
    session_id = stateless(world)
    world.turn(session_id, "a", "b")
    return session_id


def there(world: World, *session_ids: str) -> list[bool]:
    """Which of the sessions are there."""
    return [session_id in world.sessions.session_ids() for session_id in session_ids]


def test_it_is_none_of_the_clients_sessions(world: World) -> None:
    """It is not listed, not counted, not written down, and its KV stays off the disk; its tokens count."""
    session_id = idle(world)
    assert world.sessions.list(world.client, requests.ListSessions(op="list_sessions")).sessions == ()
    assert world.sessions.session_counts("ada") == (0, 0)
    assert world.journal is not None
    assert [type(record).__name__ for record in world.journal.records] == ["UsageRecorded"] * len(world.journal.records)
    assert not world.engine.last.durable
    after = requests.ListSessions(op="list_sessions", after=session_id)
    refused(ErrorCode.SESSION_NOT_FOUND, world.sessions.list, world.client, after)


def test_it_is_opened_also_while_nothing_can_be_written(world: World) -> None:
    """Nothing of it would be."""
    assert world.journal is not None
    world.journal.fault = StorageFault("disk full")
    idle(world)


def test_the_one_used_longest_ago_makes_room(world: World) -> None:
    """A client has as many of them as of others; one that answers stays."""
    first, second, third, fourth = (idle(world) for _ in range(4))
    world.turn(first, "c", "d")
    world.infer(second, "busy")
    fifth = idle(world)
    assert there(world, first, second, third, fourth, fifth) == [True, True, False, True, True]


def test_where_all_answer_another_has_to_wait(world: World) -> None:
    """Nobody's turn is cut."""
    for _ in range(4):
        world.infer(stateless(world))
    refused(ErrorCode.SESSION_LIMIT, stateless, world)


def test_it_takes_no_other_sessions_place(world: World) -> None:
    """Where the daemon is full of sessions of their own, there is none for it."""
    world.max_sessions = 2
    world.reopen()
    own = [world.create(), world.create()]
    world.sessions.detach(world.sink)
    refused(ErrorCode.SESSION_LIMIT, stateless, world)
    assert there(world, *own) == [True, True]


def test_it_makes_room_for_every_other_session(world: World) -> None:
    """Whoever has it, the one used longest ago first; the client's own before others'."""
    world.max_sessions = 3
    world.reopen()
    mine = [idle(world) for _ in range(2)]
    own = world.create()
    world.sessions.detach(world.sink)
    theirs = world.create(EVE)
    assert there(world, *mine, own, theirs) == [False, True, True, True]
    another = stateless(world, EVE)
    assert there(world, *mine, own, theirs, another) == [False, False, True, True, True]
    world.create()
    assert there(world, own, theirs, another) == [True, True, False]


def test_a_clients_own_limit_is_its_own(world: World) -> None:
    """Where it has as many sessions as it may, closing a stateless one would not help."""
    world.evicts_stored = True
    world.reopen()
    own = [world.create() for _ in range(4)]
    world.sessions.detach(world.sink)
    kept = idle(world)
    world.sessions.detach(world.sink)
    world.create()
    assert there(world, own[0], kept) == [False, True]


def test_it_expires_soon(world: World) -> None:
    """After its own time without use."""
    session_id = idle(world)
    assert world.timers[-1].delay_s == 900.0
    world.now += 901
    world.fire()
    assert there(world, session_id) == [False]
    assert world.engine.released == [session_id]


def test_a_fork_of_it_is_one_too(world: World) -> None:
    """As several answers to one question are made."""
    forked = world.fork(idle(world))
    assert world.sessions.session_counts("ada") == (0, 0)
    world.turn(forked, "c", "d")


def test_it_goes_with_its_client(world: World) -> None:
    """A purge takes it as all others."""
    session_id = idle(world)
    assert world.sessions.purge("client", "ada") == 1
    assert there(world, session_id) == [False]
