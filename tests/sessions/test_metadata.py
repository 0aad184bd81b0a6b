"""Metadata that a client changes after the session has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.codec import read_frame
from inferencecenter.sessions.journal import MetadataChanged, StorageFault
from tests.sessions.conftest import FakeJournal, World
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from inferencecenter.protocol.events import MetadataSet
    from inferencecenter.protocol.values import SessionSummary


def describe(world: World, session_id: str, **metadata: str) -> MetadataSet:
    """Give a session other metadata."""
    request = requests.SetMetadata(op="set_metadata", session_id=session_id, metadata=metadata)
    return world.sessions.set_metadata(world.client, request)


def listed(world: World) -> SessionSummary:
    """The client's only session, as a list shows it."""
    (session,) = world.sessions.list(world.client, requests.ListSessions(op="list_sessions")).sessions
    return session


def test_metadata_is_replaced(world: World) -> None:
    """All of it, wherever it is shown; and it is answered."""
    session_id = world.create(metadata={"title": "old", "color": "red"})
    told = describe(world, session_id, title="new")
    assert (told.session_id, told.metadata) == (session_id, {"title": "new"})
    assert world.get(session_id).metadata == listed(world).metadata == {"title": "new"}
    assert world.get(world.fork(session_id)).metadata == {"title": "new"}
    assert describe(world, session_id).metadata == {}


def test_it_is_no_event_and_no_use_of_the_session(world: World) -> None:
    """Numbers, the place in a list by last use, and who hears of the session stay as they are."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    before, seq, heard = listed(world), world.get(session_id).seq, list(world.sink.events)
    world.now += 60
    describe(world, session_id, title="new")
    assert listed(world) == before.model_copy(update={"metadata": {"title": "new"}})
    assert (world.get(session_id).seq, world.sink.events) == (seq, heard)


def test_a_running_turn_goes_on(world: World) -> None:
    """A session can have its title while the first answer is still being written."""
    session_id = world.create()
    world.infer(session_id)
    describe(world, session_id, title="new")
    world.engine.answer("Hello")
    assert world.transcript(session_id)[-1] == ("assistant", "Hello")
    assert world.get(session_id).metadata == {"title": "new"}


def test_it_is_there_after_a_restart(world: World) -> None:
    """As it was written down."""
    session_id = world.create(metadata={"title": "old"})
    describe(world, session_id, title="new")
    assert isinstance(world.journal, FakeJournal)
    assert [record.config.metadata for record in world.journal.of(MetadataChanged)] == [{"title": "new"}]
    records = tuple(world.journal.records)
    world.reopen().restore(kept(records), clean=True)
    assert world.get(session_id).metadata == {"title": "new"}


def test_what_cannot_be_kept_is_refused(world: World) -> None:
    """While the store cannot write, a stored session keeps what it has; another one does as it is told."""
    stored, not_stored = world.create(metadata={"title": "old"}), world.create(store=False)
    assert isinstance(world.journal, FakeJournal)
    world.journal.fault = StorageFault("the disk is full")
    with pytest.raises(InferenceCenterError) as caught:
        describe(world, stored, title="new")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert world.get(stored).metadata == {"title": "old"}
    assert describe(world, not_stored, title="new").metadata == {"title": "new"}


@pytest.mark.parametrize(
    "metadata",
    [
        "null",
        '["title"]',
        '{"title": 1}',
        '{"": "x"}',
        '{"' + "k" * 65 + '": "x"}',
        '{"title": "' + "x" * 513 + '"}',
        "{" + ", ".join(f'"{n}": ""' for n in range(17)) + "}",
    ],
)
def test_it_is_bounded_as_at_creation(metadata: str) -> None:
    """The same that `create_session` refuses."""
    for op in ("set_metadata", "create_session"):
        if (op, metadata) == ("create_session", "null"):
            continue  # absent there
        name = '"session_id": "s", ' if op == "set_metadata" else ""
        with pytest.raises(InferenceCenterError) as caught:
            read_frame(f'{{"op": "{op}", {name}"metadata": {metadata}}}').parse()
        assert (caught.value.code, str(caught.value.field).split(".")[0]) == (ErrorCode.INVALID_REQUEST, "metadata")
