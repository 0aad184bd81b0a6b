"""Records survive the round trip through the file."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions.history import MAX_FAILURES, TOKEN_BYTES, History, HistoryView, TurnCheckpoint
from inferencecenter.sessions.journal import (
    ConfigChanged,
    EpochChanged,
    HistoryChanged,
    PendingTurn,
    SessionDeleted,
    SessionOpened,
    StoredSession,
    TokensAppended,
    TurnFailed,
    TurnQueued,
    UsageRecorded,
)
from inferencecenter.sessions.output_parsing.parts import ReasoningDelta
from inferencecenter.sessions.output_parsing.parts import TextDelta as SaidPart
from inferencecenter.sessions.store import recorder as recorder_module
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Purge, Recorder, UnwritableError
from tests.sessions.store.leftovers import assert_nothing_is_left
from tests.sessions.store.values import (
    CLOCK,
    ended,
    make_end,
    make_facts,
    make_failure,
    make_history,
    make_order,
    make_turn,
    make_usage,
    opened,
    ordered,
    packed,
    said,
    said_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.sessions.output_parsing.parts import Part
    from inferencecenter.sessions.store.recorder import Entry

_texts = st.text(max_size=6)
_tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(packed)
_calls = st.lists(
    st.builds(ToolCall, call_id=st.just("c"), name=st.just("f"), arguments=_texts), min_size=1, max_size=2
)
_messages = st.lists(
    st.one_of(
        st.builds(said_by, st.sampled_from(["system", "user", "assistant", "tool"]), _texts),
        st.builds(
            ChatMessage,
            role=st.just("assistant"),
            content=_texts,
            reasoning=st.none() | _texts,
            tool_calls=st.none() | _calls.map(tuple),
        ),
        st.builds(ChatMessage, role=st.just("tool"), content=_texts, tool_call_id=st.none() | st.just("c")),
    ),
    max_size=3,
).map(tuple)
_notes = st.sampled_from(["", "", "a note"])
_parts = st.none() | st.lists(
    st.one_of(st.builds(SaidPart, _texts), st.builds(ReasoningDelta, _texts)), max_size=2
).map(tuple)
_views = st.builds(HistoryView, st.integers(0, 9), st.integers(0, 9))
_histories = st.builds(History, _messages, _tokens, _texts, _views, st.just(()), st.sampled_from(["", "toy", "other"]))
_keys = st.none() | st.sampled_from(["k1", "k2"])


class Writing(RuleBasedStateMachine):
    """A model of the sessions in the file, written in transactions of any size, with restarts in between."""

    sessions = Bundle("sessions")

    @initialize()
    def begin(self) -> None:
        """Create a file."""
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "sessions.sqlite3"
        self.kept: dict[str, StoredSession] = {}
        self.pending: list[Entry] = []
        self.count = 0
        self.usage: dict[str, int] = {}
        self.database = open_writing(self.path)
        self.recorder = Recorder(self.database, {})
        # So little that a restart finds what was not deleted yet.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(recorder_module, "CHUNK_BYTES", 500)

    @rule(target=sessions, history=_histories, n_turns=st.integers(0, 2), note=_notes)
    def open(self, history: History, n_turns: int, note: str) -> str:
        """Create a session, possibly with turns."""
        session_id = self._name("s")
        config = make_facts(session_id)
        turns = tuple(make_turn(self._name("t")) for _ in range(n_turns))
        notes = {turn.turn_id: note for turn in turns[:1] if note}
        self.pending.append(SessionOpened(config=config, history=history, turns=turns, last_used_at=CLOCK, notes=notes))
        self.kept[session_id] = StoredSession(
            config=config,
            seq=0,
            last_used_at=CLOCK,
            history=history,
            turns=turns,
            ends={},
            pending_turn=None,
            notes=notes,
        )
        return session_id

    @rule(target=sessions, session_id=sessions, n_turns=st.none() | st.integers(0, 3))
    def fork(self, session_id: str, n_turns: int | None) -> str | MultipleResults[str]:
        """Fork a session at the end of a turn, or at its present state."""
        parent = self.kept[session_id]
        if parent.pending_turn is not None:
            return multiple()
        history, n_listed = (parent.history, len(parent.turns)) if n_turns is None else _rewound(parent, n_turns)
        config, turns = make_facts(self._name("s")), parent.turns[:n_listed]
        known = {turn.turn_id for turn in turns}
        notes = {turn_id: note for turn_id, note in parent.notes.items() if turn_id in known}
        self.pending.append(
            SessionOpened(
                config=config, history=history, turns=turns, last_used_at=CLOCK, notes=notes, parent=session_id
            )
        )
        self.kept[config.session_id] = StoredSession(
            config=config,
            seq=0,
            last_used_at=CLOCK,
            history=history,
            turns=turns,
            ends={},
            pending_turn=None,
            notes=notes,
        )
        return config.session_id

    @rule(session_id=sessions, view=st.none() | _views, note=_notes)
    def order(self, session_id: str, view: HistoryView | None, note: str) -> None:
        """Queue a turn, or queue it again with a shorter prompt."""
        kept = self.kept[session_id]
        running = kept.pending_turn
        order = make_order(running.spec.turn_id if running else self._name("t"), view=view, note=note)
        pending_turn = replace(running, spec=order) if running else PendingTurn(spec=order, tokens=b"", text="")
        at = kept.last_used_at + 1
        self.pending.append(TurnQueued(session_id=session_id, seq=kept.seq + 1, last_used_at=at, spec=order))
        self.kept[session_id] = replace(kept, seq=kept.seq + 1, last_used_at=at, pending_turn=pending_turn)

    @rule(session_id=sessions, tokens=_tokens, text=_texts, parts=_parts, tells=st.booleans(), times=st.integers(1, 70))
    def say(  # noqa: PLR0917 - hypothesis names them
        self, session_id: str, tokens: bytes, text: str, parts: tuple[Part, ...] | None, tells: bool, times: int
    ) -> None:
        """Generate output; not every token is an event, and parts may differ from the text."""
        for _ in range(times):
            kept = self.kept[session_id]
            if (running := kept.pending_turn) is None:
                return
            seq = kept.seq + tells
            turn_id = running.spec.turn_id
            self.pending.append(
                TokensAppended(session_id=session_id, seq=seq, turn_id=turn_id, tokens=tokens, text=text, parts=parts)
            )
            running = replace(running, tokens=running.tokens + tokens, text=running.text + text)
            if parts is not None:
                running = replace(running, parts=(*(running.parts or ()), *parts))
            self.kept[session_id] = replace(kept, seq=seq, pending_turn=running)

    @rule(session_id=sessions, more=_messages, tokens=_tokens, text=_texts, anew=st.booleans(), key=_keys)
    def end(  # noqa: PLR0917 - hypothesis names them
        self, session_id: str, more: tuple[ChatMessage, ...], tokens: bytes, text: str, anew: bool, key: str | None
    ) -> None:
        """Finish a turn; its tokens extend or replace the earlier ones."""
        kept = self.kept[session_id]
        if kept.pending_turn is None:
            return
        turn_id = kept.pending_turn.spec.turn_id
        held = kept.history
        now = History(held.messages + more, tokens, text, held.view, held.turns, "toy")
        if not anew:
            now = replace(now, tokens=held.tokens + tokens, covered=held.covered + text)
        now = replace(now, turns=()) if anew else now
        mark = TurnCheckpoint(turn_id, len(held.messages), len(now.messages), now.n_tokens, len(now.covered), now.view)
        now = replace(now, turns=(*now.turns, mark))
        turn, end, seq = make_turn(turn_id), make_end(turn_id, session_id=session_id), kept.seq + 1
        note = kept.pending_turn.spec.note
        record = ended(session_id, history=now, turn=turn, end=end, turn_key=key, seq=seq, note=note)
        ends = dict(kept.ends)
        if key is not None:
            ends.pop(key, None)
            ends[key] = end
        self.pending.append(record)
        self.usage["ada"] = self.usage.get("ada", 0) + 1
        self.kept[session_id] = replace(
            kept,
            seq=seq,
            last_used_at=CLOCK,
            history=now,
            turns=(*kept.turns, turn),
            ends=ends,
            pending_turn=None,
            notes={**kept.notes, turn_id: note} if note else kept.notes,
        )

    @rule(session_id=sessions)
    def drop(self, session_id: str) -> None:
        """Fail a turn."""
        kept = self.kept[session_id]
        if kept.pending_turn is None:
            return
        turn_id, note, seq = kept.pending_turn.spec.turn_id, kept.pending_turn.spec.note, kept.seq + 1
        failure = make_failure(turn_id, session_id=session_id, seq=seq, note=note)
        self.pending.append(
            TurnFailed(session_id=session_id, seq=seq, last_used_at=CLOCK, turn_id=turn_id, failure=failure)
        )
        failures = {**kept.failures, turn_id: failure} if note else kept.failures
        latest = dict(list(failures.items())[-MAX_FAILURES:])
        self.kept[session_id] = replace(kept, seq=seq, last_used_at=CLOCK, pending_turn=None, failures=latest)

    @rule(session_id=sessions, more=_messages)
    def append(self, session_id: str, more: tuple[ChatMessage, ...]) -> None:
        """Append to the history."""
        kept = self.kept[session_id]
        history = replace(kept.history, messages=kept.history.messages + more)
        self._change(kept, history, len(kept.turns), rewound=False)

    @rule(session_id=sessions, n_turns=st.integers(0, 3))
    def rewind(self, session_id: str, n_turns: int) -> None:
        """Rewind to the end of a turn."""
        kept = self.kept[session_id]
        self._change(kept, *_rewound(kept, n_turns))

    @rule(session_id=sessions)
    def rename(self, session_id: str) -> None:
        """Change a session's epoch."""
        epoch = self._name("e")
        self.pending.append(EpochChanged(session_id=session_id, epoch=epoch))
        kept = self.kept[session_id]
        self.kept[session_id] = replace(kept, config=replace(kept.config, epoch=epoch))

    @rule(session_id=sessions, title=st.text(max_size=8))
    def describe(self, session_id: str, title: str) -> None:
        """Change a session's metadata."""
        kept = self.kept[session_id]
        config = replace(kept.config, metadata={"title": title})
        self.pending.append(ConfigChanged(config=config))
        self.kept[session_id] = replace(kept, config=config)

    @rule(session_id=consumes(sessions), purges=st.booleans())
    def go(self, session_id: str, purges: bool) -> None:
        """Close a session."""
        self.pending.append(Purge("session", session_id) if purges else SessionDeleted(session_id=session_id))
        del self.kept[session_id]

    @rule(durable=st.booleans(), is_full=st.booleans())
    @precondition(lambda self: self.pending)
    def commit(self, durable: bool, is_full: bool) -> None:
        """Commit everything since the last commit, possibly after a failed attempt."""
        if is_full:
            (n_pages,) = self.database.execute("PRAGMA page_count").fetchone()
            self.database.execute(f"PRAGMA max_page_count = {n_pages}")
            with contextlib.suppress(sqlite3.OperationalError):
                self.recorder.commit(self.pending, durable=durable)
                self.pending = []
            self.database.execute("PRAGMA max_page_count = 1000000")
        if self.pending:
            self.recorder.commit(self.pending, durable=durable)
            self.pending = []

    @rule()
    @precondition(lambda self: not self.pending)
    def restart(self) -> None:
        """Assert that the file contains what was written, and continue with it."""
        self.database.close()
        self.database = open_writing(self.path)
        found = read_all(self.database).found
        assert {each.session.config.session_id: each.session for each in found} == self.kept
        turns = self.database.execute("SELECT client_id, turns FROM usage").fetchall()
        assert dict(turns) == self.usage
        self.recorder = Recorder(self.database, {each.session.config.session_id: each.location for each in found})
        self.recorder.sweep()
        assert_nothing_is_left(self.database)

    @rule()
    @precondition(lambda self: not self.pending)
    def sweep(self) -> None:
        """Assert that further commits delete detached rows."""
        while self.recorder.unswept:
            self.recorder.commit([], durable=False)
        assert_nothing_is_left(self.database)

    def teardown(self) -> None:
        """Check the file once more."""
        if self.pending:
            self.recorder.commit(self.pending, durable=False)
        self.restart()
        (rows,) = self.database.execute("SELECT count(*) FROM said WHERE session NOT IN (SELECT id FROM sessions)")
        assert rows == (0,)
        self.patch.undo()
        self.database.close()
        self.directory.cleanup()

    def _change(self, kept: StoredSession, history: History, n_turns: int, *, rewound: bool = True) -> None:
        if kept.pending_turn is not None:
            return
        turns = kept.turns[:n_turns]
        gone = {turn.turn_id for turn in kept.turns[n_turns:]}
        self.pending.append(
            HistoryChanged(
                session_id=kept.config.session_id,
                seq=kept.seq + 1,
                last_used_at=CLOCK,
                history=history,
                turns=turns,
                rewound=rewound,
            )
        )
        self.kept[kept.config.session_id] = replace(
            kept,
            seq=kept.seq + 1,
            last_used_at=CLOCK,
            history=history,
            turns=turns,
            ends={key: end for key, end in kept.ends.items() if end.turn_id not in gone},
            notes={turn_id: note for turn_id, note in kept.notes.items() if turn_id not in gone},
            failures={} if rewound else kept.failures,
        )

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}_{self.count}"


def _rewound(kept: StoredSession, n_turns: int) -> tuple[History, int]:
    """The history at the end of a turn and the number of turns then."""
    n_marks = min(n_turns, len(kept.history.turns))
    if not n_marks:
        return History(kept.history.messages[:1]), 0
    mark = kept.history.turns[n_marks - 1]
    history = replace(
        kept.history,
        messages=kept.history.messages[: mark.n_messages],
        tokens=kept.history.tokens[: mark.n_tokens * TOKEN_BYTES],
        covered=kept.history.covered[: mark.n_chars],
        turns=kept.history.turns[:n_marks],
    )
    return history, len(kept.turns) - len(kept.history.turns) + n_marks


@pytest.mark.parametrize("n_sequences", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_any_sequence_of_records(n_sequences: int) -> None:
    """The file has what was recorded, after each restart."""
    run_state_machine_as_test(Writing, settings=settings(max_examples=n_sequences, stateful_step_count=30))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An empty file."""
    with contextlib.closing(open_writing(tmp_path / "sessions.sqlite3")) as opened_file:
        yield opened_file


@pytest.fixture
def recorder(database: sqlite3.Connection) -> Recorder:
    """The recorder of the file."""
    return Recorder(database, {})


def _kept(database: sqlite3.Connection) -> dict[str, StoredSession]:
    return {found.session.config.session_id: found.session for found in read_all(database).found}


def test_running_turn_is_restored_with_its_text(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Its request, tokens, text, and the number of its last event are restored."""
    order = make_order(view=HistoryView(1, 4))
    entries: list[Entry] = [opened(), ordered(order=order), said("Hel", seq=2), said("lo\0 ", seq=3), said("", seq=3)]
    recorder.commit(entries, durable=True)
    kept = _kept(database)["s_1"]
    assert kept.pending_turn == PendingTurn(spec=order, tokens=packed([*b"Hello\0 "]), text="Hello\0 ")
    assert kept.seq == 3


def test_usage_is_counted_by_client_and_day(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Turns of a UTC day are one row."""
    turns = [ended(turn=make_turn("t_1")), ended(turn=make_turn("t_2", usage=make_usage(6)))]
    next_day = ended(turn=make_turn("t_3"), last_used_at=CLOCK + 86_400)
    recorder.commit([opened(), *turns, next_day], durable=True)
    assert database.execute("SELECT * FROM usage ORDER BY day").fetchall() == [
        ("ada", "", "2026-11-18", 2, 14, 4, 10),
        ("ada", "", "2026-11-19", 1, 7, 2, 4),
    ]


def test_failed_turn_counts_its_tokens(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Prompt and completion tokens are counted, but no turn."""
    read = UsageRecorded(client_id="ada", token_id="", at=CLOCK, prompt_tokens=7, cached_tokens=2)
    failed = replace(read, prompt_tokens=0, cached_tokens=0, completion_tokens=3)
    dropped = TurnFailed(session_id="s_1", seq=3, last_used_at=CLOCK, turn_id="t_1", usage=failed)
    recorder.commit([opened(), ordered(), read, dropped], durable=True)
    assert database.execute("SELECT * FROM usage").fetchall() == [("ada", "", "2026-11-18", 0, 7, 2, 3)]
    whole = ended(prompt_tokens=7, cached_tokens=2)
    recorder.commit([read, whole], durable=True)
    assert database.execute("SELECT * FROM usage").fetchall() == [("ada", "", "2026-11-18", 1, 14, 4, 7)]


def test_latest_turn_keys_are_restored(database: sqlite3.Connection, recorder: Recorder) -> None:
    """As many idempotency keys are known after a restart as before."""
    turns = [
        ended(turn_key=f"k{index}", turn=make_turn(f"t_{index}"), end=make_end(f"t_{index}")) for index in range(70)
    ]
    recorder.commit([opened(), *turns], durable=True)
    kept = _kept(database)["s_1"]
    assert list(kept.ends) == [f"k{index}" for index in range(6, 70)]
    assert len(kept.turns) == 70


def test_latest_failures_are_restored(database: sqlite3.Connection, recorder: Recorder) -> None:
    """As many failures with notes are restored as are kept in memory; others leave nothing."""

    def dropped(number: int, note: str) -> TurnFailed:
        failure = make_failure(f"t_{number}", seq=number, note=note)
        return TurnFailed(session_id="s_1", seq=number, last_used_at=CLOCK, turn_id=f"t_{number}", failure=failure)

    recorder.commit([opened(), *(dropped(number, "a note") for number in range(20)), dropped(20, "")], durable=True)
    kept = _kept(database)["s_1"]
    assert list(kept.failures) == [f"t_{number}" for number in range(20 - MAX_FAILURES, 20)]
    assert kept.failures["t_19"] == make_failure("t_19", seq=19)
    assert database.execute("SELECT count(*) FROM failures").fetchone() == (MAX_FAILURES,)


def test_purged_client_leaves_nothing(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Its sessions and usage are deleted; other clients' stay."""
    failed = TurnFailed(session_id="s_1", seq=1, last_used_at=CLOCK, turn_id="t_0", failure=make_failure("t_0"))
    recorder.commit([opened(), failed, ordered(), said("x"), opened("s_2", client_id="bob")], durable=True)
    recorder.commit([ended("s_2", client_id="bob"), ended(), ordered(), said("y")], durable=True)
    recorder.commit([Purge("client", "ada")], durable=True)
    assert set(_kept(database)) == {"s_2"}
    assert database.execute("SELECT client_id FROM usage").fetchall() == [("bob",)]
    for table in ("messages", "turns", "tokens", "orders", "said", "failures"):
        owners = database.execute(f"SELECT DISTINCT session FROM {table}").fetchall()
        assert owners in ([], [(2,)]), table
    with pytest.raises(UnwritableError):
        recorder.commit([said("z")], durable=False)


@pytest.mark.parametrize(
    "refused",
    [
        said("x", "s_unknown"),
        said("\ud800"),
        said("x", seq=2**70),
        ended("s_unknown"),
        opened(),
        EpochChanged(session_id="s_unknown", epoch="e_2"),
        ended(history=None),
    ],
    ids=[
        *("no session", "no text", "no number", "no session to end", "twice", "no session to rename"),
        "a defect of the record",
    ],
)
def test_unwritable_file_is_named(database: sqlite3.Connection, recorder: Recorder, refused: Entry) -> None:
    """The rejected record is identified and the transaction rolled back; the others can then be written."""
    recorder.commit([opened(), ordered()], durable=True)
    entries: list[Entry] = [said("a"), refused, said("b")]
    with pytest.raises(UnwritableError) as caught:
        recorder.commit(entries, durable=False)
    assert caught.value.entry is refused
    assert caught.value.__cause__ is not None
    assert database.execute("SELECT count(*) FROM said").fetchone() == (0,)
    entries.remove(refused)
    recorder.commit(entries, durable=False)
    pending_turn = _kept(database)["s_1"].pending_turn
    assert pending_turn is not None
    assert pending_turn.text == "ab"


def test_missing_history_is_rewritten(database: sqlite3.Connection, recorder: Recorder) -> None:
    """The next difference is computed from the stored rows, not from the missing record."""
    recorder.commit([opened(), ended(text="Hello")], durable=True)
    lost = ended(history=make_history("Hello you"), turn=make_turn("t_2"), end=make_end("t_2"), seq=2**70)
    with pytest.raises(UnwritableError):
        recorder.commit([lost], durable=True)
    now = make_history("Hello you there")
    recorder.commit([ended(history=now, turn=make_turn("t_3"), end=make_end("t_3"))], durable=True)
    assert _kept(database)["s_1"].history == now


def test_file_is_marked_in_use_while_open(database: sqlite3.Connection, recorder: Recorder) -> None:
    """The file is marked as in use from the first transaction until the end."""
    clean = "SELECT clean FROM meta"
    assert database.execute(clean).fetchone() == (1,)
    recorder.commit([opened()], durable=False)
    assert database.execute(clean).fetchone() == (0,)
    assert database.execute("PRAGMA synchronous").fetchone() == (2,), "the mark survives a power cut"
    recorder.commit([ordered()], durable=False)
    assert database.execute("PRAGMA synchronous").fetchone() == (1,)
    recorder.finish()
    assert database.execute(clean).fetchone() == (1,)


def test_deleted_content_is_overwritten(database: sqlite3.Connection, recorder: Recorder, tmp_path: Path) -> None:
    """A closed conversation is not in the file after a checkpoint."""
    secret = "a very particular sentence"
    recorder.commit([opened(), ordered(), said(secret)], durable=True)
    recorder.commit([ended(text=secret), SessionDeleted(session_id="s_1")], durable=True)
    recorder.finish()
    contents = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.encode() not in contents


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM messages WHERE n = 0",
        "UPDATE messages SET role = 'wizard' WHERE n = 0",
        "UPDATE tokens SET ids = x'010203'",
        "UPDATE sessions SET facts = '{}' WHERE session_id = 's_1'",
        "UPDATE sessions SET facts = 'x' WHERE session_id = 's_1'",
        "UPDATE turns SET n = 3 WHERE n = 1",
        "UPDATE turns SET ending = '{}'",
        "UPDATE orders SET warnings = '[1]'",
        "UPDATE orders SET request = '{}'",
    ],
)
def test_invalid_session_is_skipped(database: sqlite3.Connection, recorder: Recorder, damage: str) -> None:
    """Other sessions are loaded, and its rows stay for repair."""
    turns = [ended(turn_key="k"), ended(turn=make_turn("t_2"), turn_key="l")]
    entries: list[Entry] = [opened(), *turns, ordered(), opened("s_2")]
    recorder.commit(entries, durable=True)
    database.execute(damage)
    assert set(_kept(database)) == {"s_2"}
    assert database.execute("SELECT count(*) FROM sessions").fetchone() == (2,)
