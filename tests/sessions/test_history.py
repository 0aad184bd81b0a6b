"""What a session holds, and how it is cut back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import History, View
from tests.sessions.conftest import packed


def grown(history: History, turn_id: str, text: str, *, goes_on: bool = True, view: View | None = None) -> History:
    """The history with a turn more, which adds ``text`` or has only ``text`` left."""
    messages = (*history.messages, ChatMessage(role="user", content=text))
    covered = history.covered + text if goes_on else text
    return history.after(turn_id, History(messages, packed(covered), covered, view or View()), goes_on=goes_on)


def test_a_view_leaves_out_the_middle() -> None:
    """The first messages and the last are given; a view that resumes among the first leaves out none."""
    messages = tuple(ChatMessage(role="user", content=str(number)) for number in range(6))
    assert "".join(message.content for message in View(2, 4).of(messages)) == "0145"
    assert View(2, 4).n_dropped == 2
    for view in (View(), View(2), View(3, 2), View(9)):
        assert view.of(messages) == messages
        assert view.n_dropped == 0


@given(texts=st.lists(st.text(alphabet="ab", max_size=5), max_size=6), data=st.data())
def test_every_turn_can_be_gone_back_to(texts: list[str], data: st.DataObject) -> None:
    """What a history is cut back to equals what it was then."""
    histories = [History()]
    for number, text in enumerate(texts):
        histories.append(grown(histories[-1], f"t{number}", text))
    for number, then in enumerate(histories[1:]):
        assert histories[-1].until(f"t{number}") == then
    assert histories[-1].until(START) == History()
    picked = data.draw(st.integers(0, len(texts)))
    back = histories[picked]
    assert grown(back, "new", "x").until("new").messages[:-1] == back.messages


def test_a_new_rendering_leaves_older_turns_without_tokens() -> None:
    """Their messages and what was read of them are known, but no token is taken for one of theirs."""
    history = grown(grown(History(), "t0", "a"), "t1", "b")
    history = grown(history, "t2", "new", goes_on=False, view=View(0, 2))
    assert history.until("t2") == history
    back = history.until("t1")
    assert (len(back.messages), back.tokens, back.covered, back.view) == (2, b"", "", View())
    again = grown(grown(history, "t3", "c"), "t4", "d")
    assert again.until("t2").covered == "new"
    assert again.until("t3").n_tokens == 4


@pytest.mark.parametrize("turn", ["t1", "", "T0"])
def test_a_turn_that_is_not_there_is_named(turn: str) -> None:
    """The error is the request's, and says where turns are listed."""
    with pytest.raises(InferenceCenterError, match="no turn") as caught:
        grown(History(), "t0", "a").until(turn)
    assert (caught.value.code, caught.value.field) == (ErrorCode.TURN_NOT_FOUND, "turn")
    assert "get_session" in (caught.value.hint or "")
