"""Metadata replaced by a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.codec import read_frame
from inferencecenter.sessions.journal import ConfigChanged, StorageFault
from tests.sessions.conftest import FakeJournal, SessionHarness
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from inferencecenter.protocol.events import MetadataSet
    from inferencecenter.protocol.values import SessionSummary


def describe(world: SessionHarness, session_id: str, **metadata: str) -> MetadataSet:
    """Replace the metadata of a session."""
    request = requests.SetMetadata(op="set_metadata", session_id=session_id, metadata=metadata)
    return world.sessions.set_metadata(world.client, request)


def listed(world: SessionHarness) -> SessionSummary:
    """The client's only session in the list."""
    (session,) = world.sessions.list(world.client, requests.ListSessions(op="list_sessions")).sessions
    return session


def test_metadata_is_replaced(world: SessionHarness) -> None:
    """The new metadata appears in the reply and everywhere else."""
    session_id = world.create(metadata={"title": "old", "color": "red"})
    told = describe(world, session_id, title="new")
    assert (told.session_id, told.metadata) == (session_id, {"title": "new"})
    assert world.get(session_id).metadata == listed(world).metadata == {"title": "new"}
    assert world.get(world.fork(session_id)).metadata == {"title": "new"}
    assert describe(world, session_id).metadata == {}


def test_metadata_is_neither_an_event_nor_a_use(world: SessionHarness) -> None:
    """Event numbers, last use and the subscriber are unchanged."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    before, seq, heard = listed(world), world.get(session_id).seq, list(world.sink.events)
    world.now += 60
    describe(world, session_id, title="new")
    assert listed(world) == before.model_copy(update={"metadata": {"title": "new"}})
    assert (world.get(session_id).seq, world.sink.events) == (seq, heard)


def test_metadata_can_change_during_a_turn(world: SessionHarness) -> None:
    """A session can get its title while the first answer is generated."""
    session_id = world.create()
    world.infer(session_id)
    describe(world, session_id, title="new")
    world.engine.answer("Hello")
    assert world.transcript(session_id)[-1] == ("assistant", "Hello")
    assert world.get(session_id).metadata == {"title": "new"}


def test_metadata_survives_a_restart(world: SessionHarness) -> None:
    """The stored metadata is restored."""
    session_id = world.create(metadata={"title": "old"})
    describe(world, session_id, title="new")
    assert isinstance(world.journal, FakeJournal)
    assert [record.config.metadata for record in world.journal.of(ConfigChanged)] == [{"title": "new"}]
    records = tuple(world.journal.records)
    world.reopen().restore(kept(records), clean=True)
    assert world.get(session_id).metadata == {"title": "new"}


def test_metadata_that_cannot_be_stored_is_refused(world: SessionHarness) -> None:
    """While the store cannot write, only sessions that are not stored accept it."""
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
def test_metadata_has_the_limits_of_creation(metadata: str) -> None:
    """The limits of `create_session` apply."""
    for op in ("set_metadata", "create_session"):
        if (op, metadata) == ("create_session", "null"):
            continue  # absent there
        name = '"session_id": "s", ' if op == "set_metadata" else ""
        with pytest.raises(InferenceCenterError) as caught:
            read_frame(f'{{"op": "{op}", {name}"metadata": {metadata}}}').parse()
        assert (caught.value.code, str(caught.value.field).split(".")[0]) == (ErrorCode.INVALID_REQUEST, "metadata")
