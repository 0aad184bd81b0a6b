"""The history of a session and its truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions.history import History, HistoryLimits, HistorySize, HistoryView
from tests.sessions.conftest import packed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sessions.conftest import SessionHarness


def grown(
    history: History, turn_id: str, text: str, *, extends_tokens: bool = True, view: HistoryView | None = None
) -> History:
    """The history with one more turn, which adds ``text`` or leaves only ``text``."""
    messages = (*history.messages, ChatMessage(role="user", content=text))
    covered = history.covered + text if extends_tokens else text
    return history.with_turn(
        turn_id, History(messages, packed(covered), covered, view or HistoryView()), extends_tokens=extends_tokens
    )


def test_view_drops_the_middle() -> None:
    """The first and the last messages stay; a view that resumes among the first drops none."""
    messages = tuple(ChatMessage(role="user", content=str(number)) for number in range(6))
    assert "".join(message.content for message in HistoryView(2, 4).of(messages)) == "0145"
    assert HistoryView(2, 4).n_dropped == 2
    for view in (HistoryView(), HistoryView(2), HistoryView(3, 2), HistoryView(9)):
        assert view.of(messages) == messages
        assert view.n_dropped == 0


@given(texts=st.lists(st.text(alphabet="ab", max_size=5), max_size=6), data=st.data())
def test_every_turn_can_be_restored(texts: list[str], data: st.DataObject) -> None:
    """A truncated history equals the history at that time."""
    histories = [History()]
    for number, text in enumerate(texts):
        histories.append(grown(histories[-1], f"t{number}", text))
    for number, then in enumerate(histories[1:]):
        assert histories[-1].until(f"t{number}") == then
    assert histories[-1].until(START) == History()
    picked = data.draw(st.integers(0, len(texts)))
    back = histories[picked]
    assert grown(back, "new", "x").until("new").messages[:-1] == back.messages


def test_new_rendering_clears_older_checkpoints() -> None:
    """Their messages and views stay, but none of the new tokens belong to them."""
    history = grown(grown(History(), "t0", "a"), "t1", "b")
    history = grown(history, "t2", "new", extends_tokens=False, view=HistoryView(0, 2))
    assert history.until("t2") == history
    back = history.until("t1")
    assert (len(back.messages), back.tokens, back.covered, back.view) == (2, b"", "", HistoryView())
    again = grown(grown(history, "t3", "c"), "t4", "d")
    assert again.until("t2").covered == "new"
    assert again.until("t3").n_tokens == 4


@pytest.mark.parametrize("turn", ["t1", "", "T0"])
def test_unknown_turn_is_reported(turn: str) -> None:
    """The error concerns the request and its hint names get_session."""
    with pytest.raises(InferenceCenterError, match="no turn") as caught:
        grown(History(), "t0", "a").until(turn)
    assert (caught.value.code, caught.value.field) == (ErrorCode.TURN_NOT_FOUND, "turn")
    assert "get_session" in (caught.value.hint or "")


class Counted(tuple[ChatMessage, ...]):
    """Messages that count how often they are iterated."""

    times = 0

    def __iter__(self) -> Iterator[ChatMessage]:
        type(self).times += 1
        return super().__iter__()


ROOM = HistoryLimits(max_chars=1000, max_entries=100)


def message(content: str = "", **fields: Any) -> ChatMessage:
    """A user message with optional ``fields``."""
    return ChatMessage(**{"role": "user", "content": content, **fields})


def call(call_id: str, name: str = "f") -> ToolCall:
    """A tool call without arguments."""
    return ToolCall(call_id=call_id, name=name, arguments="{}")


messages_of_any_kind = st.lists(
    st.builds(
        lambda text, thought: message(text, role="assistant", reasoning=thought),
        st.text(alphabet="ab", max_size=5),
        st.none() | st.text(alphabet="c", max_size=3),
    )
    | st.integers(1, 3).map(lambda n: message(role="assistant", tool_calls=[call(str(each)) for each in range(n)])),
    max_size=4,
)


@given(st.lists(messages_of_any_kind, max_size=5), st.data())
def test_carried_size_equals_the_measured_size(batches: list[list[ChatMessage]], data: st.DataObject) -> None:
    """After any growth or truncation the size is that of all messages."""
    history = History()
    for number, batch in enumerate(batches):
        if data.draw(st.booleans()):
            history = history.appended(tuple(batch), limits=ROOM)
        else:
            history = history.with_turn(f"t{number}", History((*history.messages, *batch)), extends_tokens=True)
        assert history.size == HistorySize.of(history.messages)
    for turn in history.turns:
        assert history.until(turn.turn_id).size == HistorySize.of(history.until(turn.turn_id).messages)


def test_appending_measures_only_new_messages() -> None:
    """A measured history is not measured again."""
    history = History(Counted([message("a")] * 50))
    assert history.size == HistorySize(50, 50)
    Counted.times = 0
    for _ in range(20):
        grown_history = history.appended((message("b"),), limits=ROOM)
    assert Counted.times == 0
    assert grown_history.size == HistorySize(51, 51)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ([message("x" * 1001)], "1001 characters; 1000"),
        ([message()] * 101, "101 messages, tool calls and images; 100"),
        (
            [message(role="assistant", tool_calls=[call(str(n)) for n in range(100)])],
            "101 messages, tool calls and images",
        ),
    ],
)
def test_history_limits_characters_messages_and_tool_calls(new: list[ChatMessage], says: str) -> None:
    """Characters are limited, and so is the number of messages and tool calls."""
    with pytest.raises(InferenceCenterError, match=says) as caught:
        History().appended(tuple(new), limits=ROOM)
    assert caught.value.code is ErrorCode.CONTEXT_FULL


def test_session_has_a_message_limit(world: SessionHarness) -> None:
    """One message too many is refused by ``append`` and ``infer`` and changes nothing."""
    world.reopen(max_messages=3)
    session_id = world.create(system="s")
    world.append(session_id, ("user", ""), ("user", ""))
    with pytest.raises(InferenceCenterError, match="4 messages, tool calls and images; 3 are allowed") as caught:
        world.append(session_id, ("user", ""))
    assert caught.value.code is ErrorCode.CONTEXT_FULL
    with pytest.raises(InferenceCenterError, match="4 messages, tool calls and images; 3 are allowed"):
        world.infer(session_id)
    assert len(world.transcript(session_id)) == 3


def test_tool_results_are_matched_from_the_end() -> None:
    """Results of the latest calls are matched without reading earlier messages."""
    asked = message(role="assistant", tool_calls=[call("a"), call("b")])
    history = History((message("early"), asked))
    history.check_tool_results((message(role="tool", tool_call_id="b"), message(role="tool", tool_call_id="a")))
    with pytest.raises(InferenceCenterError, match="tool_call_id is c"):
        history.check_tool_results((message(role="tool", tool_call_id="a"), message(role="tool", tool_call_id="c")))
