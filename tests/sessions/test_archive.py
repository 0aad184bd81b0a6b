"""Archived sessions: what leaves memory, comes back on use, is counted, listed and deleted."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.daemon import _purge
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.sessions import archive
from inferencecenter.sessions.archive import SessionArchive
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.journal import StorageFault
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.schema import DATABASE_NAME
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.conftest import SETTINGS, FakeSink, SessionHarness
from tests.sessions.store.stores import settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from inferencecenter.config.settings import SessionSettings
    from inferencecenter.protocol import events
    from inferencecenter.sessions.store.recorder import PurgeKind

DAY_S = 86_400.0
EVE = Principal("eve", 4, "normal", frozenset({"user"}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / DATABASE_NAME


class ArchiveHarness(SessionHarness):
    """Sessions in a real store."""

    @property
    def kept(self) -> SessionArchive:
        """The archive."""
        return self.sessions.archive

    async def use(self, session_id: str, client: Principal | None = None) -> bool:
        """Load a session if it is archived."""
        return await self.kept.load(client or self.client, session_id)

    async def committed(self) -> None:
        """Wait until everything written is committed, and every event delivered."""
        assert self.store is not None
        await settled(self.store.of_client("ada"))

    async def page(self, client: Principal | None = None, **fields: Any) -> events.Sessions:
        """A page of the client's sessions."""
        return await self.kept.list(client or self.client, requests.ListSessions(op="list_sessions", **fields))

    async def archived(self) -> set[str]:
        """The ids of the client's archived sessions."""
        return {each.session_id for each in (await self.page(limit=1000)).sessions if each.archived}

    def conversation(self, question: str = "Hi", answer: str = "Hello", **fields: Any) -> str:
        """A detached session with one turn; a second passes."""
        session_id = self.create(**fields)
        self.turn(session_id, question, answer)
        self.sessions.detach(self.sink)
        self.now += 1
        return session_id

    def many(self, number: int) -> list[str]:
        """Detached sessions with one turn each."""
        return [self.conversation(f"Question {n}") for n in range(number)]


@asynccontextmanager
async def storing(
    path: Path, *, clean: bool = True, settings: SessionSettings = SETTINGS, **fields: Any
) -> AsyncIterator[ArchiveHarness]:
    """Sessions as a daemon has them that starts with the file; ``clean`` if it stops in order."""
    store = SessionStore.open(path)
    world = ArchiveHarness(store=store, settings=settings, **fields)
    world.sessions.restore(store.load(), clean=store.was_clean)
    try:
        yield world
    finally:
        await world.kept.close()
        await store.close(clean=clean)


async def refused(code: ErrorCode, call: Callable[..., Any], *args: Any, **fields: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        await _called(call, *args, **fields)
    assert caught.value.code is code
    return caught.value


async def _called(call: Callable[..., Any], *args: Any, **fields: Any) -> None:
    result = call(*args, **fields)
    if asyncio.iscoroutine(result):
        await result


async def test_least_recently_used_session_is_archived_at_the_limit(path: Path) -> None:
    """The oldest one stays, and no session is deleted."""
    async with storing(path) as world:
        oldest, second, third, fourth = world.many(4)
        world.turn(oldest, "Again", "Yes")
        world.sessions.detach(world.sink)
        fifth = world.conversation()
        page = await world.page()
        assert [each.session_id for each in page.sessions] == [oldest, second, third, fourth, fifth]
        assert await world.archived() == {second}
        assert page.session_usage is not None
        assert (page.session_usage.live, page.session_usage.max_sessions, page.session_usage.archived) == (4, 4, 1)
        assert page.session_usage.max_stored_chars == 1024**3


async def test_attached_session_is_archived_last_and_continues(path: Path) -> None:
    """A client that stays attached to all its sessions is not refused, and its position stays valid."""
    async with storing(path) as world:
        names = [world.create() for _ in range(5)]
        assert await world.archived() == {names[0]}
        assert await world.use(names[0])
        world.turn(names[0], "Hi", "Hello")
        await world.committed()
        assert world.sink.ops == ["queued", "token", "end"]


async def test_busy_sessions_are_not_archived(path: Path) -> None:
    """The refusal names the limit, and says what helps."""
    async with storing(path) as world:
        for _ in range(4):
            world.infer(world.create())
        error = await refused(ErrorCode.SESSION_LIMIT, world.create)
        assert "4 sessions of 4" in error.message
        assert "wait" in (error.hint or "")


async def test_archived_session_keeps_its_epoch_and_numbers(path: Path) -> None:
    """A client that resumes with its last position misses nothing, and the next event has the next number."""
    async with storing(path) as world:
        first = world.conversation("Who?", "Me")
        before, transcript = world.get(first), world.transcript(first)
        world.many(4)
        assert world.sessions.session_chars(world.client, first) == 0
        assert await world.use(first)
        assert (world.get(first), world.transcript(first)) == (before, transcript)
        sink = FakeSink()
        world.resume(first, sink, epoch=before.epoch, last_seq=before.seq)
        await world.committed()
        assert (sink.last.resumed, sink.last.seq) == (True, before.seq)
        world.sink = sink
        world.turn(first, "And?", "You")
        await world.committed()
        numbered = [event for event in sink.events if isinstance(event, SessionEvent)]
        assert numbered[0].seq == before.seq + 1
        world.resume(first, sink, epoch=before.epoch, last_seq=before.seq - 1)
        await world.committed()
        assert (sink.last.resumed, sink.last.reason) == (False, "too_old")


async def test_archived_session_is_modified_after_loading(path: Path) -> None:
    """Later turns, rewinds, forks and metadata are stored in the same session."""
    async with storing(path) as world:
        first = world.conversation("Who?", "Me")
        world.many(4)
        await world.use(first)
        turn = world.turn(first, "And?", "You")
        world.turn(first, "More?", "No")
        request = requests.RewindSession(op="rewind_session", session_id=first, turn=turn)
        world.sessions.rewind(world.client, request, world.sink)
        forked = world.fork(first)
        world.sessions.set_metadata(
            world.client, requests.SetMetadata(op="set_metadata", session_id=first, metadata={"title": "We"})
        )
    async with storing(path) as world:
        await world.use(first)
        await world.use(forked)
        assert world.transcript(first) == world.transcript(forked)
        assert [content for _, content in world.transcript(first)] == ["Who?", "Me", "And?", "You"]
        assert world.get(first).metadata == {"title": "We"}


async def test_archived_session_of_another_client_is_not_found(path: Path) -> None:
    """This holds for a client with an archive of its own."""
    async with storing(path) as world:
        (first, *_) = world.many(5)
        for _ in range(5):
            world.create(EVE)
        assert not await world.use(first, EVE)
        await refused(ErrorCode.SESSION_NOT_FOUND, world.page, EVE, after=first)
        assert first not in {each.session_id for each in (await world.page(EVE)).sessions}
        assert await world.archived() == {first}


async def test_loading_archives_another_one_but_not_what_was_just_loaded(path: Path) -> None:
    """The number of live sessions stays within the limit; a loaded session counts as used."""
    async with storing(path) as world:
        names = world.many(6)
        world.now += 1
        await world.use(names[0])
        world.now += 1
        await world.use(names[1])
        assert await world.archived() == {names[2], names[3]}
        assert world.sessions.session_counts("ada") == (4, 0)


async def test_memory_limit_archives(path: Path) -> None:
    """Beyond ``max_client_mib`` idle sessions leave memory."""
    settings = SETTINGS.model_copy(update={"max_client_mib": 1})
    async with storing(path, settings=settings, max_transcript_chars=10_000_000) as world:
        first = world.create(system="x" * 700_000)
        second = world.create(system="y" * 700_000)
        assert await world.archived() == {first}
        await world.use(first)
        assert await world.archived() == {second}


async def test_longer_session_archives_idle_ones(path: Path) -> None:
    """A turn or a message beyond ``max_client_mib`` is refused only if no idle session can leave memory."""
    settings = SETTINGS.model_copy(update={"max_client_mib": 1})
    async with storing(path, settings=settings, max_transcript_chars=10_000_000) as world:
        first = world.create(system="x" * 700_000)
        second = world.create()
        world.append(second, ("user", "y" * 700_000))
        assert await world.archived() == {first}
        third = world.create()
        world.infer(third, "z" * 700_000)
        assert await world.archived() == {first, second}
        world.engine.answer("Yes")
        world.create(system="a" * 700_000, store=False)
        assert third in await world.archived()
        error = await refused(ErrorCode.QUOTA_EXCEEDED, world.append, world.create(), ("user", "b" * 700_000))
        assert "1048576" in error.message


async def test_subscriber_of_an_archived_session_is_told_that_another_has_it(path: Path) -> None:
    """The event is the same as for a session in memory; a closed socket is dropped."""
    async with storing(path) as world:
        watched = world.create()
        world.turn(watched, "Hi", "Hello")
        first, other = world.sink, FakeSink()
        world.sink = other
        for _ in range(4):
            world.now += 1
            world.create()
        assert watched in await world.archived()
        await world.committed()
        n_before = len(first.events)
        await world.use(watched)
        world.resume(watched, other)
        await world.committed()
        assert [event.op for event in first.events[n_before:]] == ["session_detached"]
        world.sink = FakeSink()
        for _ in range(4):
            world.now += 1
            world.create()
        assert watched in await world.archived()
        world.sessions.detach(other)
        await world.use(watched)
        assert world.sessions._table.get_owned(world.client, watched).sink is None


async def test_full_archive_refuses_stored_sessions_only(path: Path) -> None:
    """The error names the limit and what to do; a warning comes before it, and nothing is deleted."""
    settings = SETTINGS.model_copy(update={"archive_mib": 1})
    async with storing(path, settings=settings, max_transcript_chars=10_000_000) as world:
        request = requests.CreateSession(op="create_session", system="x" * 1_000_000)
        first = world.sessions.create(world.client, request, world.sink)
        assert first.warnings == ()
        warned = world.sessions.create(world.client, request, world.sink)
        assert "95 %" in warned.warnings[-1]
        error = await refused(ErrorCode.QUOTA_EXCEEDED, world.create)
        assert error.field == "store"
        assert "close_session" in (error.hint or "")
        assert "sessions.archive_mib" in (error.hint or "")
        world.create(store=False)
        world.close(first.session_id)
        world.create()
        assert len((await world.page()).sessions) == 3


async def test_eviction_deletes_archived_sessions_if_the_operator_chose_it(path: Path) -> None:
    """The least recently used ones are deleted before the archive is full, and the client is notified."""
    settings = SETTINGS.model_copy(update={"archive_mib": 1, "when_full": "evict"})
    async with storing(path, settings=settings, max_transcript_chars=10_000_000) as world:
        told: list[tuple[str, Any]] = []
        world.sessions.subscribe(lambda client_id, event, _: told.append((client_id, event)))
        names = []
        for _ in range(8):
            names.append(world.create(system="x" * 140_000))
            world.sessions.detach(world.sink)
            world.now += 1
        await world.kept.settled()
        left = {each.session_id for each in (await world.page()).sessions}
        assert left == set(names[len(names) - len(left) :])
        assert len(left) == 6
        assert [(client_id, event.op) for client_id, event in told] == [("ada", "session_closed")] * 2


async def test_start_loads_recent_and_unfinished_sessions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are archived, with their sizes, and are loaded on use."""
    monkeypatch.setattr("inferencecenter.sessions.store.loader.RECENT_PER_CLIENT", 2)
    large = Principal("ada", 100, "normal", frozenset({"user"}))
    async with storing(path, client=large, settings=SETTINGS.model_copy(update={"max_sessions": 100})) as world:
        running = world.create()
        world.infer(running, "Run")
        world.sessions.detach(world.sink)
        world.now += 1
        names = world.many(6)
        before = world.get(names[0])
        summaries = {each.session_id: each for each in (await world.page()).sessions}
    async with storing(path, client=large) as world:
        assert set(world.sessions.session_ids()) == {running, names[4], names[5]}
        assert await world.archived() == set(names[:4])
        for each in (await world.page()).sessions:
            assert each.model_copy(update={"archived": False}) == summaries[each.session_id]
        assert set(world.sessions.kv_owners()) == {running, *names}
        await world.use(names[0])
        assert world.get(names[0]) == before


async def test_archived_session_has_a_new_epoch_after_a_crash(path: Path) -> None:
    """Its client may have seen events that were lost."""
    async with storing(path, clean=False) as world:
        (first, *_) = world.many(5)
        await world.use(first)
        epoch = world.get(first).epoch
        world.now += 1
        world.many(1)
        world.many(3)
        assert first in await world.archived()
    async with storing(path) as world:
        await world.use(first)
        renewed = world.get(first).epoch
        assert renewed != epoch
    async with storing(path) as world:
        await world.use(first)
        assert world.get(first).epoch == renewed


async def test_pages_have_live_and_archived_sessions_in_order(path: Path) -> None:
    """Each session is on one page, in both orders and for any size of a page."""
    async with storing(path) as world:
        names = world.many(9)
        await world.use(names[2])
        for order, expected in (("oldest", names), ("recent", names[::-1])):
            for limit in (1, 2, 4, 20):
                found: list[str] = []
                after = None
                while True:
                    page = await world.page(order=order, limit=limit, after=after)
                    found += [each.session_id for each in page.sessions]
                    if (after := page.next) is None:
                        break
                assert found == expected
        error = await refused(ErrorCode.INVALID_REQUEST, world.page, order="recent", after="s_1")
        assert error.field == "after"
        await refused(ErrorCode.SESSION_NOT_FOUND, world.page, after="s_1")


async def test_archived_session_is_closed_at_the_limit(path: Path) -> None:
    """Deleting needs no place, and leaves nothing in the file."""
    async with storing(path) as world:
        (first, *_) = world.many(5)
        for name in world.sessions.session_ids():
            world.infer(name)
        await refused(ErrorCode.SESSION_LIMIT, world.use, first)
        await world.kept.load(world.client, first, closing=True)
        world.close(first)
        assert await world.archived() == set()
        assert world.kept.size_of("ada").n_sessions == 0
    with Archive.open(path) as stored:
        assert first not in {line.session_id for line in stored.sessions()}


@pytest.mark.parametrize("kind", ["session", "client"])
async def test_purge_deletes_archived_sessions(path: Path, kind: Any) -> None:
    """A session that is being loaded is deleted, too."""
    async with storing(path) as world:
        (first, *_) = world.many(6)
        name = first if kind == "session" else "ada"
        tasks = TaskGroup("test")
        tasks.spawn(_called(world.use, first), name="load")
        await asyncio.sleep(0)
        while world.sessions.purge(kind, name):
            pass
        owner = await world.kept.purged(kind, name)
        assert world.store is not None
        world.store.purge(kind, name, client_id=owner or "")
        await tasks.join()
        while world.sessions.purge(kind, name):
            pass
        assert not await world.use(first)
        n_left = world.sessions.session_counts("ada")[0] + len(await world.archived())
        assert n_left == (5 if kind == "session" else 0)
    with Archive.open(path) as stored:
        left = {line.session_id for line in stored.sessions()}
        assert first not in left
        assert len(left) == (5 if kind == "session" else 0)


@pytest.mark.parametrize("kind", ["session", "client"])
async def test_purge_is_complete_when_it_returns(path: Path, kind: PurgeKind) -> None:
    """It is committed, and a session that is loaded at the same time is neither live nor stored afterwards."""
    async with storing(path) as world:
        (first, *_) = world.many(6)
        tasks = TaskGroup("test")
        tasks.spawn(_called(world.use, first), name="load")
        await world.committed()
        assert await _purge(kind, first if kind == "session" else "ada", world.sessions, world.store)
        with Archive.open(path) as stored:
            assert first not in {line.session_id for line in stored.sessions()}
        await tasks.join()
        assert first not in world.sessions.session_ids()
        usage = (await world.page()).session_usage
        assert usage is not None
        assert usage.live + usage.archived == (5 if kind == "session" else 0)
        assert usage.archived == len(await world.archived())


@pytest.mark.parametrize("kind", ["session", "client"])
async def test_kv_of_a_deleted_archived_session_is_dropped(path: Path, kind: PurgeKind) -> None:
    """Running engines drop it, and engines that start later are not given it."""
    async with storing(path) as world:
        (first, *_) = world.many(6)
        assert first in world.sessions.kv_owners()
        await _purge(kind, first if kind == "session" else "ada", world.sessions, world.store)
        assert first in world.engine.released
        assert first not in world.sessions.kv_owners()


async def test_idle_limit_deletes_archived_sessions(path: Path) -> None:
    """The session's own limit and the client's retention apply; a change of the wall clock does not count."""
    async with storing(path) as world:
        world.sessions.subscribe(lambda _client_id, event, _: told.append(event))
        told: list[Any] = []
        short = world.conversation(ttl_s=3600)
        long = world.conversation()
        world.many(4)
        assert await world.archived() == {short, long}
        assert await world.kept.expire() == 0
        world.wall = lambda: world.now + 10 * DAY_S
        assert await world.kept.expire() == 0
        world.now += 3600
        assert await world.kept.expire() == 1
        assert await world.archived() == {long}
        assert [event.session_id for event in told] == [short]
        world.client = Principal("ada", 4, "normal", frozenset({"user"}), retention_days=2)
        world.create()
        world.now += 2 * DAY_S
        await world.kept.expire()
        assert long not in await world.archived()


async def test_expired_shares_are_deleted(path: Path) -> None:
    """A share is deleted although its client never lists its shares; one without an expiry stays."""
    async with storing(path) as world:
        session_id = world.conversation()
        made = [
            await world.sessions.shares.create(
                world.client,
                requests.CreateShare(op="create_share", session_id=session_id, expires_in_s=expires_in_s),
                max_shares=5,
            )
            for expires_in_s in (None, 10)
        ]
        await world.committed()
        assert await world.kept.expire_shares() == 0
        world.now += 20
        assert await world.kept.expire_shares() == 1
        assert world.store is not None
        left = [world.store.reader.share(each.share.share_id) is not None for each in made]
        assert left == [True, False]


async def test_concurrent_loads_are_one(path: Path) -> None:
    """Several sockets that name a session at once share it."""
    async with storing(path) as world:
        (first, *_) = world.many(5)
        assert sorted(await asyncio.gather(*(world.use(first) for _ in range(5)))) == [False] * 4 + [True]
        assert world.kept.n_loaded == 1
        assert world.sessions.session_counts("ada") == (4, 0)


async def test_unknown_id_costs_no_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without an archive is answered at once."""
    async with storing(path) as world:
        assert world.store is not None
        monkeypatch.setattr(world.store.reader, "read", None)
        assert not await world.use("s_unknown")


async def test_unreadable_archived_session_leaves_the_others(path: Path) -> None:
    """Its client gets an error, not an empty conversation, and it stays in the file."""
    async with storing(path) as world:
        first, second, *_ = world.many(6)
        assert world.store is not None
    store = SessionStore.open(path)
    assert store._writer is not None
    store._writer._database.execute("DELETE FROM messages WHERE n = 0 AND session = 1")
    await store.close()
    async with storing(path) as world:
        await refused(ErrorCode.STORAGE_UNAVAILABLE, world.use, first)
        assert await world.use(second)
        assert first in await world.archived()


async def test_sessions_are_not_archived_while_the_store_is_faulty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that only memory has stays there."""
    async with storing(path) as world:
        world.many(4)
        monkeypatch.setattr(SessionStore, "fault", StorageFault("the disk is full"))
        await refused(ErrorCode.SESSION_LIMIT, world.create, store=False)
        assert world.sessions.session_counts("ada") == (4, 0)


async def test_kv_owners_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are told the live sessions and the archived ones used last."""
    monkeypatch.setattr(archive, "MAX_RETAINED", 2)
    async with storing(path) as world:
        names = world.many(8)
        assert set(world.sessions.kv_owners()) == set(names[2:])
