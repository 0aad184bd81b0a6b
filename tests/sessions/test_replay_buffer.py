"""The replay buffer: bounded by bytes, and replayed completely or not at all."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.protocol.events import MAX_JOINED_BYTES, Error, Progress, Queued, Token
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from inferencecenter.sessions.event_log import ReplayBuffer

if TYPE_CHECKING:
    from inferencecenter.sessions.event_log import NumberedEvent


def token(seq: int, content: str, *, turn: str = "t", logprobs: int = 0) -> Token:
    """A token with that many alternatives."""
    alternatives = tuple(TokenProbability(token=content, token_id=seq, logprob=-1.0) for _ in range(logprobs))
    entry = TokenLogprobs(token=content, token_id=seq, logprob=-1.0, top=alternatives)
    return Token(session_id="s", seq=seq, turn_id=turn, content=content, logprobs=(entry,) if logprobs else None)


def progress(seq: int) -> Progress:
    """An event that is not text."""
    return Progress(session_id="s", seq=seq, turn_id="t", done=seq, total=99)


def filled(*events: NumberedEvent, limit_bytes: int = 2**20) -> ReplayBuffer:
    """A buffer with these events."""
    replay = ReplayBuffer(limit_bytes)
    for event in events:
        replay.add(event)
    return replay


def test_adjacent_tokens_of_a_turn_are_joined() -> None:
    """The event has the last number; other events and turns separate runs."""
    replay = filled(token(1, "a"), token(2, "b"), progress(3), token(4, "c"), token(5, "d", turn="u"))
    missing = replay.events_after(0)
    assert missing == [token(2, "ab"), progress(3), token(4, "c"), token(5, "d", turn="u")]
    assert replay.events_after(1) == [token(2, "b"), progress(3), token(4, "c"), token(5, "d", turn="u")]
    assert replay.events_after(5) == []


def test_logprobs_are_joined_with_their_tokens() -> None:
    """They are in the order of the tokens."""
    (together,) = filled(token(1, "a", logprobs=2), token(2, "b", logprobs=1)).events_after(0) or []
    assert isinstance(together, Token)
    assert together.content == "ab"
    assert [(entry.token, len(entry.top)) for entry in together.logprobs or ()] == [("a", 2), ("b", 1)]


def test_turn_error_is_replayed() -> None:
    """It is a numbered event."""
    error = Error(code="internal", message="m", error="m", session_id="s", seq=2, turn_id="t", retryable=False)
    assert filled(token(1, "a"), error).events_after(1) == [error]


def test_joined_text_stays_below_the_client_limit() -> None:
    """Long text is split into several events without loss."""
    replay = filled(*(token(seq, "x" * 10_000) for seq in range(1, 31)))
    missing = replay.events_after(0) or []
    contents = [event.content for event in missing if isinstance(event, Token)]
    assert "".join(contents) == "x" * 300_000
    assert max(map(len, contents)) <= MAX_JOINED_BYTES + 10_000
    assert missing[-1].seq == 30


def test_replay_buffer_of_size_zero_keeps_no_events() -> None:
    """Only the current position can be resumed."""
    replay = filled(token(1, "a"), progress(2), limit_bytes=0)
    assert (replay.events_after(1), replay.events_after(2), replay.size_bytes) == (None, [], 0)


def test_disabled_replay_buffer_drops_events() -> None:
    """Numbers continue meanwhile."""
    replay = filled(token(1, "a"))
    replay.disable()
    replay.add(token(2, "b"))
    assert (replay.events_after(1), replay.events_after(2), replay.size_bytes) == (None, [], 0)
    replay.enable()
    replay.add(token(3, "c"))
    assert replay.events_after(2) == [token(3, "c")]


def test_events_of_an_earlier_daemon_are_lost() -> None:
    """A restored session continues its numbers."""
    replay = ReplayBuffer(1000, seq=7)
    assert (replay.events_after(6), replay.events_after(7)) == (None, [])
    replay.add(token(8, "a"))
    assert replay.events_after(7) == [token(8, "a")]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["token", "logprobs", "other turn", "progress", "queued"]), st.text(max_size=20)),
    max_size=60,
)


@given(events=EVENTS, limit_bytes=st.integers(0, 3000))
def test_replay_is_complete_or_refused(events: list[tuple[str, str]], limit_bytes: int) -> None:
    """Every position gets the same text and events in order, within the limit."""
    replay = ReplayBuffer(limit_bytes)
    told: list[NumberedEvent] = []
    for seq, (kind, text) in enumerate(events, start=1):
        made: dict[str, NumberedEvent] = {
            "token": token(seq, text),
            "logprobs": token(seq, text, logprobs=1),
            "other turn": token(seq, text, turn="u"),
            "progress": progress(seq),
            "queued": Queued(session_id="s", seq=seq, turn_id="t", position=len(text)),
        }
        told.append(made[kind])
        replay.add(told[-1])
        assert replay.size_bytes <= limit_bytes
    complete = []
    for last_seq in range(len(told) + 1):
        missing = replay.events_after(last_seq)
        complete.append(missing is not None)
        if missing is None:
            continue
        numbers = [event.seq or 0 for event in missing]
        assert all(earlier < later for earlier, later in pairwise([last_seq, *numbers]))
        assert (numbers[-1] if numbers else last_seq) == len(told)
        expected = told[last_seq:]
        for turn in ("t", "u"):
            assert spoken(missing, turn) == spoken(expected, turn)
        assert others(missing) == others(expected)
    assert complete == sorted(complete), "what is too old for one position is so for all before it"
    assert complete[-1]


def spoken(events: list[NumberedEvent], turn: str) -> tuple[str, list[str]]:
    """The text and the tokens with logprobs of a turn."""
    tokens = [event for event in events if isinstance(event, Token) and event.turn_id == turn]
    entries = [entry.token for event in tokens for entry in event.logprobs or ()]
    return "".join(event.content for event in tokens), entries


def others(events: list[NumberedEvent]) -> list[NumberedEvent]:
    """All events but tokens."""
    return [event for event in events if not isinstance(event, Token)]
