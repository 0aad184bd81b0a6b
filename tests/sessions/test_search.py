"""Search of stored sessions: what is found, shown, and kept from others."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.values import TextRange
from inferencecenter.sessions.search import (
    MAX_EXCERPT_COST,
    MAX_TERMS,
    SNIPPET_CHARS,
    Excerpts,
    SearchTerm,
    search_terms,
)
from inferencecenter.sessions.store import reader, search_index
from inferencecenter.sessions.store.archive import purge_file
from inferencecenter.sessions.store.reader import ArchiveReader
from inferencecenter.sessions.store.schema import DATABASE_NAME
from inferencecenter.sessions.store.search_index import (
    SearchMaintenance,
    has_index,
    prepare_index,
    search_file,
)
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.test_archive import EVE, ArchiveHarness, refused, storing

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.protocol.events import SessionsFound
    from inferencecenter.sessions.context import Principal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / DATABASE_NAME


async def search(world: ArchiveHarness, query: str, client: Principal | None = None, **fields: Any) -> SessionsFound:
    """A page of the sessions with these words."""
    request = requests.SearchSessions(op="search_sessions", query=query, **fields)
    return await world.kept.search(client or world.client, request)


async def names(world: ArchiveHarness, query: str, client: Principal | None = None) -> list[str]:
    """The ids of the sessions with these words."""
    return [each.session.session_id for each in (await search(world, query, client)).results]


def rewind(world: ArchiveHarness, session: str, turn: str) -> None:
    """Rewind a session to a turn."""
    request = requests.RewindSession(op="rewind_session", session_id=session, turn=turn)
    world.sessions.rewind(world.client, request, world.sink)


def indexed(database: sqlite3.Connection) -> set[tuple[object, ...]]:
    """Each occurrence of a word in the index: the word, the document and the place in it."""
    database.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, search, instance)")
    found = set(database.execute("SELECT term, doc, offset FROM temp.words"))
    database.execute("DROP TABLE temp.words")
    return found


def finish(database: sqlite3.Connection, **fields: Any) -> int:
    """Maintain the index until nothing is left to do, and return the number of steps."""
    maintenance, n_steps = SearchMaintenance(database, **fields), 0
    while maintenance.is_due:
        maintenance.step()
        n_steps += 1
    return n_steps


def open_database(path: Path) -> sqlite3.Connection:
    """A connection with the daemon's settings."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA secure_delete = ON")
    return database


def content_of(path: Path) -> bytes:
    """The bytes of the file."""
    return path.read_bytes()


def check_against_texts(path: Path) -> None:
    """Assert that the index equals one built from the texts."""
    with closing(open_database(path)) as database:
        held = indexed(database)
        prepare_index(database, is_wanted=False)
        prepare_index(database, is_wanted=True)
        assert not indexed(database)
        finish(database)
        assert held
        assert indexed(database) == held


async def test_words_of_live_and_archived_sessions_are_found(path: Path) -> None:
    """Questions and answers match in any case and without accents; the latest come first, and none is loaded."""
    async with storing(path) as world:
        first = world.conversation("Wie macht man Crème brûlée?", "With sugar and a torch.")
        others = world.many(4)
        last = world.conversation("What burns?", "A TORCH.")
        assert first in await world.archived()
        found = await search(world, "torch")
        assert [(each.session.session_id, each.session.archived) for each in found.results] == [
            (last, False),
            (first, True),
        ]
        assert await names(world, "creme BRULEE") == [first]
        assert await names(world, "nothing") == []
        assert first in await world.archived()
        assert found.indexed is None
        assert set(await names(world, "question")) == set(others)


async def test_hits_are_shown_with_their_turns(path: Path) -> None:
    """The message with all words comes first, then those with one; the title is a hit of its own."""
    async with storing(path) as world:
        session = world.create(metadata={"title": "About lemons"}, system="Be a lemon.")
        turns = [world.turn(session, "Sour?", "A lemon is."), world.turn(session, "And?", "The lemon tree.")]
        (found,) = (await search(world, "lemon tree")).results
        assert found.session.metadata == {"title": "About lemons"}
        assert [(hit.message_index, hit.role, hit.turn_id) for hit in found.hits] == [
            (4, "assistant", turns[1]),
            (0, "system", turns[0]),
        ]
        assert [(hit.snippet, hit.marks) for hit in found.hits] == [
            ("The lemon tree.", (TextRange(start=4, end=9), TextRange(start=10, end=14))),
            ("Be a lemon.", (TextRange(start=5, end=10),)),
        ]
        (by_title,) = (await search(world, "about sour")).results
        assert [(hit.message_index, hit.turn_id, hit.snippet) for hit in by_title.hits] == [
            (1, turns[0], "Sour?"),
            (None, None, "About lemons"),
        ]


async def test_words_may_be_in_different_messages_and_phrases_may_not(path: Path) -> None:
    """Only the last word matches as a prefix."""
    async with storing(path) as world:
        session = world.conversation("The quick brown fox", "jumps over the lazy dog")
        assert await names(world, "fox dog") == [session]
        assert await names(world, '"brown fox" laz') == [session]
        assert await names(world, '"fox brown"') == []
        assert await names(world, '"fox jumps"') == []
        assert await names(world, "qui fox") == []
        assert await names(world, '"quick bro"') == []
        assert await names(world, "lazy-dog") == [session]
        assert await names(world, "fox cat") == []


SPACELESS = {
    # Simplified and traditional Chinese, Japanese, Korean, Thai, Lao, Khmer, Burmese; and Han beyond 16 bits.
    "我们昨天在北京的图书馆里学习机器学习。": ("北京", "图书馆", "机器学习", "馆", "昨天 机器"),
    "請問臺北車站附近有什麼好吃的?": ("臺北", "車站附近", "好吃的?"),
    "東京の図書館でプログラミングを勉強しています。": ("図書館", "プログラミング", "勉強", "東京 勉強"),
    "대한민국의 수도는 서울입니다. 학교에서 배웠어요.": ("서울", "민국", "학교", "수도 학교", "배웠어요"),
    "สวัสดีครับ ผมเรียนภาษาไทยที่โรงเรียน": ("ภาษาไทย", "โรงเรียน", "เรียน", "ที่", "สวัสดี"),
    "ຂ້ອຍຮຽນພາສາລາວຢູ່ໂຮງຮຽນ": ("ພາສາ", "ໂຮງຮຽນ"),
    "ខ្ញុំរៀនភាសាខ្មែរ": ("ភាសា", "ខ្មែរ"),
    "ကျွန်တော် မြန်မာစာ လေ့လာနေတယ်": ("မြန်မာ", "လေ့လာ"),
    "這個字是𠮷野家的𠮷": ("𠮷野家", "𠮷"),
    "我的iPhone15在2024年买的": ("iphone15", "2024", "买", "我的iPhone15在2024", "ipho"),
}
ABSENT = ("京北", "图书机", "馆図", "울서", "ดีสวัส", "ทิ่", "野𠮷家", "phone15", "ガ")


async def test_parts_of_texts_without_spaces_are_found(path: Path) -> None:
    """Any run of characters is found in messages and titles, and marked in the text."""
    async with storing(path) as world:
        sessions = {text: world.conversation(text, "Ja, カ.") for text in SPACELESS}
        titled = {text: world.create(metadata={"title": text}) for text in SPACELESS}
        await world.committed()
        for text, queries in SPACELESS.items():
            for query in queries:
                found = (await search(world, query, limit=50)).results
                of_text = [each for each in found if each.session.session_id in (sessions[text], titled[text])]
                assert len(of_text) == 2, query
                for each in of_text:
                    marked = "".join(each.hits[0].snippet[mark.start : mark.end] for mark in each.hits[0].marks)
                    assert set(query.replace(" ", "").lower()) - {"?"} <= set(marked.lower()), query
        for query in ABSENT:
            assert await names(world, query) == [], query
        world.close(titled.popitem()[1])
        await world.committed()
        assert await names(world, "买的") == [sessions.popitem()[1]]
    check_against_texts(path)


async def test_characters_are_found_at_any_place_of_a_long_text(path: Path) -> None:
    """It is divided into parts before its characters are set apart."""
    async with storing(path) as world:
        text = "".join(f"{chr(0x4E00 + n)}x y" for n in range(2400))
        session = world.conversation(text)
        await world.committed()
        with closing(open_database(path)) as database:
            found = {word for word, _, _ in indexed(database)}
        assert {chr(0x4E00 + n) for n in range(2400)} <= found
        assert max(len(str(word)) for word in found) < 10
        assert await names(world, text[4090:4102]) == [session]


async def test_index_of_words_only_is_built_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that takes a sentence without spaces for a word is replaced while the daemon runs."""
    with monkeypatch.context() as earlier:
        earlier.setattr(search_index, "_OBJECTS", search_index._OBJECTS[:1])
        earlier.setattr(
            search_index, "_TABLE", "CREATE VIRTUAL TABLE search USING fts5(text, content='', columnsize=0)"
        )
        async with storing(path) as world:
            session = world.conversation("我们昨天在北京的图书馆里学习。")
    async with storing(path) as world:
        while (found := await search(world, "图书馆")).indexed is not None:
            pass
        assert [each.session.session_id for each in found.results] == [session]
    check_against_texts(path)


async def test_other_clients_find_nothing(path: Path) -> None:
    """Sessions of other clients with the same words are not found."""
    async with storing(path) as world:
        own = world.conversation("A secret", "Indeed")
        theirs = world.create(EVE, metadata={"title": "A secret of Eve"})
        await world.committed()
        assert await names(world, "secret") == [own]
        assert await names(world, "secret", EVE) == [theirs]
        assert await names(world, "indeed", EVE) == []
        await refused(ErrorCode.INVALID_REQUEST, search, world, "secret", EVE, after="x")


async def test_pages_have_all_results_once(path: Path) -> None:
    """Pages are ordered by last use, and no result occurs twice."""
    async with storing(path) as world:
        wanted = [world.conversation(f"Number {n}") for n in range(7)][::-1]
        found: list[str] = []
        page = await search(world, "number", limit=3)
        while True:
            found += [each.session.session_id for each in page.results]
            if page.next is None:
                break
            page = await search(world, "number", limit=3, after=page.next)
        assert found == wanted


async def test_forks_find_what_they_share_and_not_what_was_rewound(path: Path) -> None:
    """A fork has the words of its parent up to where it was made, and its own."""
    async with storing(path) as world:
        session = world.create()
        first = world.turn(session, "Apples", "Pears")
        world.turn(session, "Plums", "Cherries")
        fork = world.fork(session, first)
        world.turn(fork, "Quinces", "Figs")
        nested = world.fork(fork)
        await world.committed()
        assert set(await names(world, "pears")) == {session, fork, nested}
        assert await names(world, "plums") == [session]
        assert set(await names(world, "pears figs")) == {fork, nested}
        (found,) = [each for each in (await search(world, "pears")).results if each.session.session_id == nested]
        assert [(hit.message_index, hit.turn_id, hit.snippet) for hit in found.hits] == [(1, first, "Pears")]
        rewind(world, session, first)
        await world.committed()
        assert await names(world, "plums") == []
        world.close(session)
        await world.committed()
        assert set(await names(world, "pears")) == {fork, nested}
        world.close(fork)
        world.close(nested)
        await world.committed()
        assert await names(world, "pears") == []


async def test_titles_follow_their_changes(path: Path) -> None:
    """The old title is not found."""
    async with storing(path) as world:
        session = world.conversation(metadata={"title": "Draft"})
        request = requests.SetMetadata(op="set_metadata", session_id=session, metadata={"title": "Final"})
        world.sessions.set_metadata(world.client, request)
        await world.committed()
        assert (await names(world, "draft"), await names(world, "final")) == ([], [session])
    check_against_texts(path)


async def test_index_equals_the_texts_after_any_changes(path: Path) -> None:
    """Changes are turns, rewinds, forks, moved bases, archiving, loading and deletions."""
    async with storing(path) as world:
        session = world.create(metadata={"title": "Tree"}, system="System words")
        turns = [world.turn(session, f"Question {n}", f"Answer {n} apple") for n in range(5)]
        forks = [world.fork(session, turn) for turn in turns[1:3]]
        for fork in forks:
            world.turn(fork, "Forked", "Differently")
        world.sessions.detach(world.sink)
        rewind(world, session, turns[0])
        world.turn(session, "Other", "Text")
        world.many(5)
        await world.use(session)
        world.append(session, ("user", "Appended"), ("assistant", "Too"))
        await world.use(forks[0])
        world.close(forks[0])
        await world.committed()
    check_against_texts(path)


async def test_existing_file_is_indexed_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without an index opens; it is built from the latest session on, and says how far it is."""
    monkeypatch.setattr(search_index, "BUILD_CHARS", 10_000)
    async with storing(path) as world:
        sessions = [world.conversation(f"Word{n} " + "filler " * 800, "Yes") for n in range(6)]
    with closing(open_database(path)) as database:
        whole = indexed(database)
        prepare_index(database, is_wanted=False)
        assert not has_index(database)
        prepare_index(database, is_wanted=True)
        terms = search_terms("yes")
        assert not search_file(database, "ada", terms, after=None, limit=10).found
        SearchMaintenance(database).step()
        part = search_file(database, "ada", terms, after=None, limit=10)
        assert [each.session.config.session_id for each in part.found] == sessions[:-3:-1]
        assert part.indexed is not None
        assert 0 < part.indexed < 1
        # Changes of what is not indexed yet.
        database.execute("DELETE FROM messages WHERE session = 1 AND n = 1")
        database.execute("INSERT INTO messages VALUES (1, 1, 'assistant', 'Later', NULL)")
        assert finish(database) > 2
        assert search_file(database, "ada", terms, after=None, limit=10).indexed is None
        assert {word for word, _, _ in indexed(database)} == {word for word, _, _ in whole} | {"later"}
    check_against_texts(path)


async def test_daemon_builds_the_index_of_an_older_file(path: Path) -> None:
    """An existing file is indexed in the background while the daemon runs."""
    async with storing(path) as world:
        session = world.conversation("Ancient", "Wisdom")
    with closing(open_database(path)) as database:
        prepare_index(database, is_wanted=False)
    async with storing(path) as world:
        while (found := await search(world, "ancient wisdom")).indexed is not None:
            assert found.indexed < 1
        assert [each.session.session_id for each in found.results] == [session]


async def test_words_of_deleted_sessions_leave_the_file(path: Path) -> None:
    """They are overwritten in steps some time after the deletion; another deletion meanwhile begins a new pass."""
    now = 0.0
    async with storing(path) as world:
        world.conversation("Visible", "Yes")
        for n in range(8):
            gone = world.conversation(f"Xylophonesecret{n}", "Zebrasecret", metadata={"title": "Quaggasecret"})
            await world.committed()
            world.close(gone)
    secrets = (b"ylophonesecret", b"ebrasecret", b"uaggasecret")
    assert any(secret in content_of(path) for secret in secrets)
    with closing(open_database(path)) as database:
        maintenance = SearchMaintenance(database, monotonic=lambda: now, scrub_delay_s=600)
        while maintenance.is_due:
            maintenance.step()
        now = 599.0
        assert not maintenance.is_due
        now = 600.0
        assert maintenance.is_due
        maintenance.step()
        database.execute("DELETE FROM messages WHERE content = 'Visible'")
        maintenance.note_changes()
        while maintenance.is_due:
            maintenance.step()
        assert database.execute("SELECT stale FROM search_state").fetchone() == (1,)
        now = 1200.0
        while maintenance.is_due:
            maintenance.step()
        assert database.execute("SELECT stale FROM search_state").fetchone() == (0,)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert {word for word, _, _ in indexed(database)} == {"yes"}
    content = content_of(path)
    assert not any(secret in content for secret in (*secrets, b"visible"))


async def test_purge_without_a_daemon_removes_the_words_at_once(path: Path) -> None:
    """The file has neither the text nor its words afterwards."""
    async with storing(path) as world:
        gone = world.conversation("Xylophonesecret", "Zebrasecret")
        world.conversation("Visible", "Yes")
    assert b"ebrasecret" in content_of(path)
    purge_file(path, "session", gone)
    content = content_of(path)
    assert b"ylophonesecret" not in content
    assert b"ebrasecret" not in content
    check_against_texts(path)


async def test_switched_off_index_is_deleted(path: Path) -> None:
    """Enabling search again rebuilds the index."""
    async with storing(path) as world:
        world.conversation("Hello", "World")
    store = SessionStore.open(path, search=False)
    await store.close()
    with closing(open_database(path)) as database:
        assert not has_index(database)
        assert not database.execute("SELECT name FROM sqlite_master WHERE name GLOB 'search*'").fetchall()
    async with storing(path) as world:
        while not await names(world, "hello"):
            pass
    check_against_texts(path)


async def test_search_without_an_index_is_refused(path: Path) -> None:
    """Without an index the op is unknown."""
    async with storing(path) as world:
        world.conversation()
        await world.committed()
        with closing(open_database(path)) as database:
            prepare_index(database, is_wanted=False)
        error = await refused(ErrorCode.UNKNOWN_OP, search, world, "hello")
        assert "sessions.search" in (error.hint or "")


async def test_search_with_too_many_hits_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused after a number of steps; a search with fewer hits is not affected, and neither is a later one."""
    async with storing(path) as world:
        for _ in range(40):
            world.conversation("frequent", "rest")
        rare = world.conversation("rare", "rest")
        await world.committed()
        monkeypatch.setattr(reader, "MAX_SEARCH_STEPS", 1000)
        monkeypatch.setattr(reader, "_COUNTED_STEPS", 100)
        error = await refused(ErrorCode.INVALID_REQUEST, search, world, "frequent rest")
        assert error.field == "query"
        assert await names(world, "rare") == [rare]
        monkeypatch.undo()
        assert len((await search(world, "frequent rest", limit=50)).results) == 40


async def test_other_reads_do_not_wait_for_a_search(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a search runs, another account's archived session is loaded and listed."""
    may_end, has_begun = threading.Event(), threading.Event()

    def wait(*_args: object, **_kwargs: object) -> None:
        has_begun.set()
        may_end.wait()

    async with storing(path) as world:
        first = world.conversation()
        world.many(4)
        monkeypatch.setattr(ArchiveReader, "search", wait)
        searching = asyncio.ensure_future(search(world, "hello", EVE))  # noqa: TID251 - it is awaited below
        try:
            while not has_begun.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0)
            assert first in await world.archived()
            assert await world.use(first)
        finally:
            may_end.set()
            await asyncio.wait([searching])


async def test_search_costs_by_its_words_and_the_texts(path: Path) -> None:
    """Each word or phrase costs a share of all texts of the client."""
    async with storing(path) as world:
        assert world.kept.searched_chars("ada", "one word") == 0
        world.conversation("x" * 5000)
        costs = [world.kept.searched_chars("ada", query) for query in ("one", "one two", 'one "two three"', "!")]
        assert costs[0] > 0
        assert costs[1:] == [pytest.approx(2 * costs[0], abs=1), costs[1], 0]


async def test_damaged_index_does_not_stop_the_daemon(path: Path) -> None:
    """Maintenance stops, and is not retried."""
    async with storing(path) as world:
        world.conversation("Hello", "World")
    with closing(open_database(path)) as database:
        finish(database)
        database.execute("UPDATE search_data SET block = x'00'")
        assert finish(database) == 1


def test_query_is_words_and_phrases() -> None:
    """Signs alone are no words, an open quotation mark ends with the query, and only a last word is incomplete."""
    assert search_terms('a "b c" d') == (SearchTerm("a"), SearchTerm("b c"), SearchTerm("d"))
    assert search_terms("a de") == (SearchTerm("a"), SearchTerm("de", is_prefix=True))
    assert search_terms('de "fg hi') == (SearchTerm("de"), SearchTerm("fg hi"))
    assert search_terms('!? * "" -- ') == ()
    with pytest.raises(InferenceCenterError) as caught:
        search_terms("x " * (MAX_TERMS + 1))
    assert caught.value.field == "query"


@given(st.text(max_size=60) | st.text('"*():^-+{}~ANDORNET\0 a\u0301é', max_size=40), st.text(max_size=200))
def test_any_query_can_be_searched(query: str, text: str) -> None:
    """None is an error of SQLite, and the excerpt of any text has its hits inside."""
    try:
        terms = search_terms(query)
    except InferenceCenterError:
        return
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE VIRTUAL TABLE search USING fts5(text, content='', columnsize=0)")
        for term in terms:
            database.execute("SELECT rowid FROM search WHERE search MATCH ?", (term.expression,)).fetchall()
    if terms:
        snippet, marks = Excerpts(terms).of(text)
        assert len(snippet) <= SNIPPET_CHARS
        assert all(0 <= start < end <= len(snippet) for start, end in marks)


def test_excerpt_is_around_the_first_hit() -> None:
    """It is one line with the hits, and has the letters of the text."""
    text = "x" * 1000 + " Some words\nbefore the Ünïcode place, and after " + "y" * 1000
    snippet, marks = Excerpts(search_terms("unicode")).of(text)
    assert len(snippet) == SNIPPET_CHARS
    assert [snippet[start:end] for start, end in marks] == ["Ünïcode"]
    assert "words before the" in snippet
    assert Excerpts(search_terms("else")).of("Nothing of it") == ("Nothing of it", ())


def test_marks_of_letters_cost_no_exponential_time() -> None:
    """A phrase of 20 words is searched in a text whose runs of marks could be divided in many ways."""
    phrase = "a " * 20 + "b"
    excerpts = Excerpts(search_terms(f'"{phrase}"'))
    snippet, marks = excerpts.of(("a" + "\u0301" * 10) * 1000 + f" x {phrase}")
    assert [snippet[start:end] for start, end in marks] == ["a " * 15 + "a"]


def test_excerpts_of_a_search_are_bounded_in_sum() -> None:
    """When the cost is used up, the beginnings of texts are shown; a hit at the border of two parts is found."""
    text = "word " * 20_000
    excerpts = Excerpts(search_terms("needle"))
    assert excerpts.of("x" * 8190 + " needle.")[1]
    found = [bool(excerpts.of(text + "needle")[1]) for _ in range(MAX_EXCERPT_COST // len(text) + 2)]
    assert found[0]
    assert not found[-1]
    assert found == sorted(found, reverse=True)
    assert excerpts.of("the needle")[1]


async def test_search_that_runs_when_the_store_closes_fails_cleanly(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection closes under it, on another thread."""
    async with storing(path) as world:
        world.conversation("What burns?", "A torch.")
    archive = ArchiveReader(path)

    def close_meanwhile(database: sqlite3.Connection, *_: Any, **__: Any) -> None:
        archive.close()
        database.execute("SELECT 1")

    monkeypatch.setattr(reader, "search_file", close_meanwhile)
    with pytest.raises(InferenceCenterError) as failed:
        archive.search("ada", [], after=None, limit=1)
    assert failed.value.code is ErrorCode.STORAGE_UNAVAILABLE
