"""Finding the session that continues a conversation, and reading a single turn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol import requests
from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions import manager, prefix_match
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.history import History, HistoryView, TurnCheckpoint
from inferencecenter.sessions.prefix_match import ArgumentComparison, PrefixMatch, find_longest_prefix, same_message
from tests.sessions.conftest import SessionHarness
from tests.sessions.oracle import kept
from tests.sessions.test_manager import EVE, refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def said(*contents: str) -> tuple[ChatMessage, ...]:
    """Alternating messages of a user and an assistant."""
    return tuple(
        ChatMessage(role="assistant" if n % 2 else "user", content=content) for n, content in enumerate(contents)
    )


def stateless(world: SessionHarness, client: Principal | None = None, **fields: Any) -> str:
    """Open a stateless session and return its id."""
    request = requests.CreateSession(op="create_session", on_full="stop", **fields)
    return world.sessions.create(client or world.client, request, world.sink, stateless=True).session_id


def find(
    world: SessionHarness, *messages: ChatMessage, client: Principal | None = None, **fields: Any
) -> PrefixMatch | None:
    """Find the client's session with the longest prefix of ``messages``."""
    kind: dict[str, Any] = {"stateless": True, "model": None, "mode": "chat", "on_full": "stop"}
    return world.sessions.find(client or world.client, messages, **(kind | fields))


def test_prefix_match_continues_the_session_of_a_conversation(world: SessionHarness) -> None:
    """Only the messages after the session's history are new."""
    session_id = stateless(world)
    world.turn(session_id, "a", "b")
    assert find(world, *said("a", "b", "c")) == PrefixMatch(session_id, None, 2)
    world.turn(session_id, "c", "d")
    assert find(world, *said("a", "b", "c", "d", "e")) == PrefixMatch(session_id, None, 4)


def test_diverging_session_matches_up_to_a_turn(world: SessionHarness) -> None:
    """At least one message must remain, even if all are in the session."""
    session_id = stateless(world)
    turn = world.turn(session_id, "a", "b")
    world.turn(session_id, "c", "d")
    assert find(world, *said("a", "b", "other")) == PrefixMatch(session_id, turn, 2)
    assert find(world, *said("a", "b", "c")) == PrefixMatch(session_id, turn, 2)
    assert find(world, *said("a")) is None
    assert find(world, *said("z")) is None


def test_longest_prefix_match_wins_then_the_latest(world: SessionHarness) -> None:
    """A session that ends at the match is better than one to rewind."""
    short, long, other = (stateless(world) for _ in range(3))
    for session_id in (short, long, other):
        world.turn(session_id, "a", "b")
    world.turn(long, "c", "d")
    world.turn(other, "x", "y")
    assert find(world, *said("a", "b", "c", "d", "e")) == PrefixMatch(long, None, 4)
    assert find(world, *said("a", "b", "new")) == PrefixMatch(short, None, 2)
    world.now += 1
    again = stateless(world)
    world.turn(again, "a", "b")
    assert find(world, *said("a", "b", "new")) == PrefixMatch(again, None, 2)


def held(text: str, turns: int) -> History:
    """A history with one message per character and turns of that many messages."""
    ends = range(turns, len(text) + 1, turns)
    marks = tuple(TurnCheckpoint(f"t_{end}", end - turns, end, 0, 0, HistoryView()) for end in ends)
    return History(said(*text), turns=marks)


_TEXTS = st.text("ab", max_size=6)


@given(histories=st.lists(st.tuples(_TEXTS, st.integers(1, 3)), max_size=5), sent=st.text("ab", min_size=1, max_size=7))
def test_indexed_match_equals_a_full_search(histories: list[tuple[str, int]], sent: str) -> None:
    """The result is the first of the longest matches of a full search."""
    named = [(f"s_{n}", held(text, turns)) for n, (text, turns) in enumerate(histories)]
    alone = [found for each in named if (found := find_longest_prefix([each], said(*sent))) is not None]
    best = max(alone, key=lambda found: (found.n_messages, found.turn is None), default=None)
    assert find_longest_prefix(named, said(*sent)) == best


def test_similar_sessions_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fifty equal conversations one is read, and one message of each other."""
    compared: list[int] = []

    def counted(one: ChatMessage, other: ChatMessage, arguments: ArgumentComparison) -> bool:
        compared.append(1)
        return same_message(one, other, arguments)

    monkeypatch.setattr(prefix_match, "same_message", counted)
    histories = [(f"s_{n}", held("ab" * 500, 2)) for n in range(50)]
    assert find_longest_prefix(histories, said(*"ab" * 500, "c")) == PrefixMatch("s_0", None, 1000)
    assert len(compared) <= 1000 + 50


def test_one_message_of_each_other_conversation_is_compared(
    world: SessionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short conversations cost a request little, and those with only a question nothing."""
    for n in range(4):
        world.turn(stateless(world), f"question {n}", "answer")
    read: list[tuple[ChatMessage, ...]] = []

    def reading(histories: Iterable[tuple[str, History]], messages: Sequence[ChatMessage]) -> PrefixMatch | None:
        found = list(histories)
        read.extend(history.messages for _, history in found)
        return find_longest_prefix(found, messages)

    monkeypatch.setattr(manager, "find_longest_prefix", reading)
    assert find(world, *said("question 2", "answer", "more")) is not None
    assert read == [said("question 2", "answer")]
    assert find(world, *said("question 2")) is None
    assert len(read) == 1


def test_only_compatible_sessions_match(world: SessionHarness) -> None:
    """A session matches if it is idle and has the same client, kind, model, mode and policy."""
    session_id = stateless(world)
    world.turn(session_id, "a", "b")
    question = said("a", "b", "c")
    assert find(world, *question, client=EVE) is None
    for fields in ({"stateless": False}, {"model": "toy"}, {"mode": "raw"}, {"on_full": "shift"}):
        assert find(world, *question, **fields) is None
    world.infer(session_id, "c")
    assert find(world, *question) is None


def test_ordinary_sessions_can_be_found(world: SessionHarness) -> None:
    """The search covers them if it is not for stateless ones."""
    session_id = world.create()
    world.turn(session_id, "a", "b")
    assert find(world, *said("a", "b", "c"), stateless=False, on_full="shift") == PrefixMatch(session_id, None, 2)
    assert find(world, *said("a", "b", "c")) is None


def test_appended_messages_match(world: SessionHarness) -> None:
    """A conversation appended before the first turn matches if it is complete."""
    session_id = stateless(world, system="Be brief.")
    world.append(session_id, ("user", "a"), ("assistant", "b"))
    system = ChatMessage(role="system", content="Be brief.")
    assert find(world, system, *said("a", "b", "c")) == PrefixMatch(session_id, None, 3)
    assert find(world, system, *said("a", "z", "c")) is None


CALLS = (ToolCall(call_id="1", name="f", arguments='{"a": 1, "b": 2}'),)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"reasoning": None}, True),
        ({"content": "other"}, False),
        ({"tool_calls": None}, False),
        ({"tool_calls": (CALLS[0].model_copy(update={"arguments": '{"b":2,"a":1}'}),)}, True),
        ({"tool_calls": (CALLS[0].model_copy(update={"arguments": '{"a":1}'}),)}, False),
        ({"tool_calls": (CALLS[0].model_copy(update={"arguments": '{"a":'}),)}, False),
        ({"tool_calls": (CALLS[0].model_copy(update={"call_id": "2"}),)}, False),
        ({"tool_calls": (CALLS[0].model_copy(update={"call_id": "unnamed_0"}),)}, True),
        ({"tool_calls": CALLS * 2}, False),
        ({"role": "user"}, False),
        ({"tool_call_id": "1"}, False),
    ],
)
def test_messages_match_without_reasoning(changes: dict[str, Any], same: bool) -> None:
    """Arguments of tool calls are compared as JSON."""
    held = ChatMessage(role="assistant", content="x", reasoning="hm", tool_calls=CALLS)
    assert same_message(held, held.model_copy(update=changes), ArgumentComparison()) is same


def test_arguments_of_a_search_are_parsed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send megabytes of them, in many calls, which differ from the held ones in white space only."""
    parsed: list[str] = []

    def counted(text: str) -> Any:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr("inferencecenter.sessions.prefix_match.orjson.loads", counted)
    dense = "[" + "[]," * 4000 + "1]"
    calls = tuple(ToolCall(call_id=str(n), name="f", arguments=dense) for n in range(20))
    spaced = tuple(call.model_copy(update={"arguments": f"{dense} "}) for call in calls)
    history = History(messages=(ChatMessage(role="assistant", content="", tool_calls=calls),))
    sent = (ChatMessage(role="assistant", content="", tool_calls=spaced), *said("q"))
    assert find_longest_prefix([(f"s_{n}", history) for n in range(5)], sent) is None
    n_marks = sum(text.count(mark) for text in parsed for mark in "[{:,")
    assert 0 < n_marks <= prefix_match.MAX_COMPARED


def test_arguments_too_deep_to_be_compared_are_different() -> None:
    """Equality of lists in lists recurses."""
    deep = "[" * 1000 + "]" * 1000
    assert ArgumentComparison().equal(deep, deep)
    assert not ArgumentComparison().equal(deep, f"{deep} ")


def called(*ids: str) -> ChatMessage:
    """An answer with calls of the same tool."""
    calls = tuple(ToolCall(call_id=call_id, name="f", arguments="{}") for call_id in ids)
    return ChatMessage(role="assistant", content="", tool_calls=calls)


def result(call_id: str) -> ChatMessage:
    """The result of a call."""
    return ChatMessage(role="tool", content="x", tool_call_id=call_id)


@pytest.mark.parametrize(
    ("results", "n_messages"),
    [(("unnamed_0", "unnamed_1"), 4), (("unnamed_1", "unnamed_0"), 2), (("unnamed_0", "b"), 4), (("b", "a"), 2)],
)
def test_calls_without_ids_match_by_order(results: tuple[str, str], n_messages: int) -> None:
    """Results match by order of the calls, and the session's ids are returned."""
    messages = (*said("q"), called("a", "b"), result("a"), result("b"))
    turns = tuple(TurnCheckpoint(f"t_{n}", 0, n, 0, 0, HistoryView()) for n in (2, 4))
    sent = (*said("q"), called("unnamed_0", "unnamed_1"), *map(result, results), *said("next"))
    found = find_longest_prefix([("s", History(messages, turns=turns))], sent)
    assert found is not None
    assert found.n_messages == n_messages
    assert found.call_ids == {"unnamed_0": "a", "unnamed_1": "b"}


# A single turn.


def noted(world: SessionHarness, session_id: str, prompt: str, note: str) -> None:
    """Start a turn with a note."""
    request = requests.Infer(op="infer", session_id=session_id, prompt=prompt)
    world.sessions.infer(world.client, request, world.sink, note=note)


def test_turn_is_readable_while_running_and_after(world: SessionHarness) -> None:
    """The turn has the messages before it, its input, its answer and its note."""
    session_id = world.create(system="s")
    noted(world, session_id, "a", "first")
    turn_id = world.engine.last.turn_id
    running = world.sessions.get_turn(world.client, session_id, turn_id)
    assert (running.running, running.answer, running.note) == (True, None, "first")
    assert [message.content for message in (*running.before, *running.input_messages)] == ["s", "a"]
    world.engine.answer("b")
    world.append(session_id, ("user", "c"), ("assistant", "d"))
    later = world.turn(session_id, "e", "f")
    ended = world.sessions.get_turn(world.client, session_id, turn_id)
    assert (ended.running, ended.note, ended.finish_reason) == (False, "first", "stop")
    assert ended.answer == ChatMessage(role="assistant", content="b")
    assert ended.usage is not None
    assert [message.content for message in ended.input_messages] == ["a"]
    after = world.sessions.get_turn(world.client, session_id, later)
    assert [message.content for message in after.before] == ["s", "a", "b", "c", "d"]
    assert after.note == ""


def test_foreign_and_rewound_turns_are_unknown(world: SessionHarness) -> None:
    """A discarded turn has no messages."""
    session_id = world.create()
    turn_id = world.turn(session_id, "a", "b")
    refused(ErrorCode.SESSION_NOT_FOUND, world.sessions.get_turn, EVE, session_id, turn_id)
    refused(ErrorCode.TURN_NOT_FOUND, world.sessions.get_turn, world.client, session_id, "t_other")
    world.rewind(session_id, requests.START)
    refused(ErrorCode.TURN_NOT_FOUND, world.sessions.get_turn, world.client, session_id, turn_id)
    noted(world, session_id, "c", "note")
    world.engine.start()
    world.abort(session_id, discard=True)
    world.engine.finish("aborted", end_text="")
    discarded = world.sessions.get_turn(world.client, session_id, world.engine.last.turn_id)
    assert (discarded.finish_reason, discarded.input_messages, discarded.answer) == ("aborted", (), None)


def test_notes_survive_forks_and_restarts(world: SessionHarness) -> None:
    """They belong to running or to ended turns."""
    session_id = world.create()
    noted(world, session_id, "a", "first")
    first = world.engine.last.turn_id
    world.engine.answer("b")
    forked = world.fork(session_id)
    noted(world, session_id, "c", "second")
    second = world.engine.last.turn_id
    assert world.journal is not None
    world.reopen().restore(kept(world.journal.records), clean=True)
    for session, turn, note in ((session_id, first, "first"), (forked, first, "first"), (session_id, second, "second")):
        assert world.sessions.get_turn(world.client, session, turn).note == note
    world.rewind(forked, requests.START)
    refused(ErrorCode.TURN_NOT_FOUND, world.sessions.get_turn, world.client, forked, first)


def test_notes_are_limited(world: SessionHarness) -> None:
    """A note has its own limit, and all notes count with the history."""
    session_id = world.create()
    refused(ErrorCode.INVALID_REQUEST, noted, world, session_id, "a", "n" * (256 * 1024 + 1))
    noted(world, session_id, "a", "n" * (world.max_transcript_chars - 20))
    world.engine.answer("b")
    refused(ErrorCode.CONTEXT_FULL, noted, world, session_id, "c", "n" * 20)


def test_notes_are_not_sent_to_clients(world: SessionHarness) -> None:
    """Only the requester's API reads them."""
    session_id = world.create()
    noted(world, session_id, "a", "secret")
    world.engine.answer("b")
    world.resume(session_id)
    told = [event.model_dump_json() for event in (*world.sink.events, world.get(session_id))]
    assert not any("secret" in each for each in told)
