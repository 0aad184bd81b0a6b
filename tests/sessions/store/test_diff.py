"""Differences between histories and stored rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.sessions.history import History, HistoryView, TurnCheckpoint
from inferencecenter.sessions.store.diff import PersistedState, history_diff, turns_diff
from tests.sessions.store.values import make_history, make_turn, packed, said_by

if TYPE_CHECKING:
    from inferencecenter.protocol.values import TranscriptTurn

_messages = st.lists(st.sampled_from([said_by("user", text) for text in ("a", "b", "c")]), max_size=4).map(tuple)
_tokens = st.lists(st.integers(0, 2), max_size=4).map(packed)
_texts = st.text("ab", max_size=4)
_marks = st.lists(
    st.builds(TurnCheckpoint, st.sampled_from(["t_1", "t_2"]), *[st.integers(0, 1)] * 4, st.just(HistoryView())),
    max_size=3,
).map(tuple)
_histories = st.builds(History, _messages, _tokens, _texts, st.just(HistoryView()), _marks)
_turns = st.lists(st.sampled_from([make_turn(f"t_{index}") for index in range(6)]), max_size=5, unique=True).map(tuple)


@given(st.lists(_histories, max_size=5), st.booleans())
def test_differences_one_after_another_give_each_history(histories: list[History], grows: bool) -> None:
    """After any sequence of changes the stored pieces spell the latest history."""
    written = PersistedState()
    pieces: list[tuple[bytes, str]] = []
    for history in histories:
        held = written.history
        now = replace(history, tokens=held.tokens + history.tokens, covered=held.covered + history.covered)
        now = now if grows else history
        change = history_diff(written, now)
        assert held.messages[: change.n_messages] + change.messages == now.messages
        assert held.turns[: change.n_marks] + change.marks == now.turns
        del pieces[change.n_pieces :]
        if change.piece is not None:
            pieces.append(change.piece)
        assert b"".join(tokens for tokens, _ in pieces) == now.tokens
        assert "".join(text for _, text in pieces) == now.covered
        assert len(pieces) == len(change.pieces)
        written = replace(written, history=now, pieces=change.pieces)


@given(_turns, _turns, st.integers(0, 9))
def test_turns_become_any_others(
    before: tuple[TranscriptTurn, ...], now: tuple[TranscriptTurn, ...], first: int
) -> None:
    """The kept rows are contiguous; with the appended ones they are the current turns in order."""
    rows = dict(enumerate(before, first))
    change = turns_diff(PersistedState(turns=before, first_turn=first), now)
    left = {n: turn for n, turn in rows.items() if change.first <= n < change.end}
    assert len(left) == change.end - change.first
    left |= dict(enumerate(change.turns, change.end))
    assert tuple(left[n] for n in sorted(left)) == now
    assert not left or min(left) == change.first


def test_answer_is_appended() -> None:
    """The common case: one piece, two messages and one mark are appended."""
    before = make_history("Hi")
    mark = TurnCheckpoint("t_2", 2, 4, 5, 5, HistoryView())
    more = (said_by("user", "?"), said_by("assistant", "you"))
    now = replace(
        before, messages=before.messages + more, tokens=before.tokens + packed([1, 2]), covered="Hi you", turns=(mark,)
    )
    change = history_diff(PersistedState(before, ((8, 2),)), now)
    assert (change.n_messages, change.messages) == (2, more)
    assert (change.n_pieces, change.piece) == (1, (packed([1, 2]), " you"))
    assert (change.n_marks, change.marks) == (0, (mark,))


def test_rewind_to_the_end_of_a_turn_only_deletes() -> None:
    """A rewind to the end of a piece writes nothing."""
    held = replace(make_history("Hi you"), messages=())
    change = history_diff(PersistedState(held, ((8, 2), (24, 6))), replace(held, tokens=held.tokens[:8], covered="Hi"))
    assert (change.n_pieces, change.piece) == (1, None)


def test_rewind_into_a_piece_rewrites_the_rest_of_it() -> None:
    """The rest of a truncated piece is written as a piece."""
    held = replace(make_history("Hi you"), messages=())
    change = history_diff(
        PersistedState(held, ((8, 2), (24, 6))), replace(held, tokens=held.tokens[:12], covered="Hi ")
    )
    assert (change.n_pieces, change.piece) == (1, (held.tokens[8:12], " "))


def test_other_tokens_for_the_same_text_replace_them() -> None:
    """A conversation that was rendered again, or by another model, shares no pieces."""
    held = make_history("Hi you")
    change = history_diff(PersistedState(held, ((8, 2), (24, 6))), replace(held, tokens=packed([9])))
    assert (change.n_pieces, change.piece) == (0, (packed([9]), "Hi you"))


def test_rewind_keeps_pieces_complete_in_text_and_tokens() -> None:
    """The pieces that both the tokens and the text contain completely are kept."""
    held = replace(make_history("abcdef"), messages=())
    pieces = tuple((4 * n, n) for n in range(1, 7))
    for n in range(7):
        now = replace(held, tokens=held.tokens[: 4 * n], covered=held.covered[:n])
        change = history_diff(PersistedState(held, pieces), now)
        assert (change.n_pieces, change.piece, change.pieces) == (n, None, pieces[:n])
