"""Context shifts: which turns are dropped when the context is full."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.ipc.messages import pack_tokens
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import History, HistoryView
from inferencecenter.sessions.prompt.plan import ContextShift, Prompt, n_kept, plan_context_shift


def said(*messages: tuple[Any, int]) -> tuple[ChatMessage, ...]:
    """Messages, each given as a role and its number of characters."""
    return tuple(ChatMessage(role=role, content="x" * n_chars) for role, n_chars in messages)


def turns(n_turns: int, n_chars: int = 84) -> tuple[ChatMessage, ...]:
    """Questions and answers of equal length, 100 characters each with the template overhead."""
    return said(*[("user", n_chars), ("assistant", n_chars)] * n_turns)


def plan(
    messages: tuple[ChatMessage, ...],
    *,
    total: int,
    answered: int = 0,
    n_ctx: int,
    view: HistoryView | None = None,
    history: History | None = None,
) -> ContextShift | None:
    """The shift of a prompt of ``messages``, which extends the history's tokens if there is a history."""
    history = history or History()
    prompt = Prompt(messages, view or HistoryView(n_kept(messages, 0)), "", history.tokens, ())
    return plan_context_shift(history, prompt, total=total, answered=answered, n_ctx=n_ctx)


def test_oldest_turns_are_dropped_to_half() -> None:
    """Ten equal messages and a question fill the context: three of five turns are dropped."""
    messages = turns(5) + said(("user", 84))
    shift = plan(messages, total=110, n_ctx=110)
    assert shift == ContextShift(HistoryView(0, 6), dropped_turns=3, dropped_tokens=60)


def test_context_shift_keeps_the_system_prompt() -> None:
    """All leading system messages are kept, and their tokens do not count as freed."""
    messages = said(("system", 184), ("system", 184)) + turns(5) + said(("user", 84))
    shift = plan(messages, total=150, n_ctx=150)
    assert shift == ContextShift(HistoryView(2, 10), dropped_turns=4, dropped_tokens=80)


def test_first_messages_can_be_kept() -> None:
    """``n_keep`` messages after the system prompt are kept too, at most as many as there are."""
    messages = said(("system", 84)) + turns(5) + said(("user", 84))
    shift = plan(messages, total=120, n_ctx=120, view=HistoryView(n_kept(messages, 2)))
    assert shift == ContextShift(HistoryView(3, 9), dropped_turns=3, dropped_tokens=60)
    assert plan(messages, total=120, n_ctx=120, view=HistoryView(n_kept(messages, 1000))) is None


def test_turn_is_dropped_as_a_whole() -> None:
    """Tool results and consecutive answers are dropped with their question."""
    messages = said(("user", 84), ("assistant", 84), ("tool", 84), ("assistant", 84), ("user", 84), ("assistant", 84))
    messages += said(("user", 84))
    shift = plan(messages, total=70, n_ctx=70)
    assert shift == ContextShift(HistoryView(0, 4), dropped_turns=1, dropped_tokens=40)


def test_messages_before_the_first_question_are_dropped_first() -> None:
    """A greeting of the model does not count as a turn."""
    messages = said(("assistant", 984), ("user", 84), ("assistant", 84), ("user", 84))
    shift = plan(messages, total=130, n_ctx=130)
    assert shift == ContextShift(HistoryView(0, 1), dropped_turns=0, dropped_tokens=100)


def test_context_shift_keeps_the_current_question() -> None:
    """With nothing before the question there is nothing to drop, however long it is."""
    assert plan(said(("user", 1000)), total=100, n_ctx=100) is None
    assert plan(said(("system", 10), ("user", 1000)), total=500, n_ctx=100) is None
    assert plan(said(("user", 10), ("assistant", 10), ("tool", 1000)), total=500, n_ctx=100) is None


def test_shift_must_free_enough() -> None:
    """If a shift frees less than an eighth of the context, the turn ends instead."""
    messages = turns(1) + said(("user", 784))
    assert plan(messages, total=100, n_ctx=100) == ContextShift(HistoryView(0, 2), dropped_turns=1, dropped_tokens=20)
    assert plan(messages, total=100, answered=50, n_ctx=100) is None


def test_partial_answer_counts_as_kept() -> None:
    """A long answer drops more turns than its prompt alone would."""
    messages = turns(5) + said(("user", 84))
    shift = plan(messages, total=150, answered=40, n_ctx=150)
    assert shift is not None
    assert shift.dropped_turns == 4


def test_second_shift_continues_the_first() -> None:
    """Messages that were dropped before cost nothing and are not dropped twice."""
    messages = said(("system", 84)) + turns(8) + said(("user", 84))
    shift = plan(messages, total=100, n_ctx=100, view=HistoryView(1, 9))
    assert shift == ContextShift(HistoryView(1, 15), dropped_turns=3, dropped_tokens=60)


def test_token_counts_are_preferred_to_characters() -> None:
    """A turn with known tokens is costed by them, not by its characters."""
    history = History()
    for number, n_tokens in ((1, 90), (2, 95)):
        messages = turns(number)
        now = History(messages, pack_tokens([0] * n_tokens), "")
        history = history.with_turn(f"t{number}", now, extends_tokens=True)
    shift = plan(turns(2) + said(("user", 84)), total=100, n_ctx=100, history=history)
    assert shift == ContextShift(HistoryView(0, 2), dropped_turns=1, dropped_tokens=90)


LINES = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.integers(0, 300)), min_size=1, max_size=20
)


@given(lines=LINES, n_keep=st.integers(0, 3), gap=st.integers(0, 10), data=st.data())
def test_every_shift_drops_old_messages_and_frees_room(
    lines: list[tuple[str, int]], n_keep: int, gap: int, data: st.DataObject
) -> None:
    """Any shift drops a contiguous run of messages up to a question and frees an eighth of the context."""
    messages = (*said(*lines), *said(("user", 5)))
    view = HistoryView(n_kept(messages, n_keep), min(gap, len(messages) - 1))
    answered = data.draw(st.integers(0, 100))
    total = answered + data.draw(st.integers(1, 2000))
    n_ctx = data.draw(st.integers(1, total))
    shift = plan(messages, total=total, answered=answered, n_ctx=n_ctx, view=view)
    if shift is None:
        return
    assert shift.view.kept == view.kept
    assert shift.view.resumes_at > max(view.kept, view.resumes_at)
    assert messages[shift.view.resumes_at].role == "user"
    assert 0 < shift.dropped_tokens <= total - answered
    assert total - shift.dropped_tokens <= n_ctx * 7 / 8
    dropped = messages[max(view.kept, view.resumes_at) : shift.view.resumes_at]
    assert shift.dropped_turns == sum(message.role == "user" for message in dropped)
    assert shift.view.of(messages)[-1] == messages[-1]
