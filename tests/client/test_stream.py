"""Tests of ``TurnStream``: one turn, disconnected anywhere, any number of times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferencecenter.client.answer import StreamState, TurnStream
from inferencecenter.client.session import SequenceStatus, SequenceTracker
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End, Error, Progress, Queued, SessionResumed, Token
from inferencecenter.protocol.values import ChatMessage, TranscriptTurn, Usage
from tests.client.model_daemon import ModelClient, ModelDaemon
from tests.client.peer import STATS, USAGE


def queued(turn_id: str = "t", *, seq: int = 1, request_id: str | None = "c1") -> Queued:
    """An acknowledgment."""
    return Queued(id=request_id, session_id="s", seq=seq, turn_id=turn_id, position=0)


def token(content: str, *, seq: int = 2, turn_id: str = "t") -> Token:
    """A piece of an answer."""
    return Token(session_id="s", seq=seq, turn_id=turn_id, content=content)


def end(*, seq: int = 9, turn_id: str = "t", request_id: str | None = None) -> End:
    """The end of a turn."""
    body = {"finish_reason": "stop", "warnings": (), "usage": USAGE, "stats": STATS}
    return End.model_validate({"id": request_id, "session_id": "s", "seq": seq, "turn_id": turn_id, **body})


def refusal(code: str, *, request_id: str | None = "c1", turn_id: str | None = None) -> Error:
    """An error."""
    return Error(id=request_id, code=code, message=code, error=code, turn_id=turn_id, retryable=False)


def events_lost(**fields: Any) -> SessionResumed:
    """A resume without the missed events."""
    body: dict[str, Any] = {"state": "idle", "epoch": "e2", "seq": 20, "reason": "other_epoch", **fields}
    return SessionResumed(session_id="s", resumed=False, **body)


def ended(turn_id: str, messages: int, finish_reason: str = "stop") -> TranscriptTurn:
    """A line of the transcript."""
    usage = Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=2)
    return TranscriptTurn(turn_id=turn_id, finish_reason=finish_reason, messages=messages, usage=usage)


def transcript(*answers: str) -> tuple[ChatMessage, ...]:
    """A transcript of questions and these answers."""
    return tuple(
        message
        for answer in answers
        for message in (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content=answer))
    )


KEPT = SessionResumed(session_id="s", resumed=True, state="busy", epoch="e", seq=9)


def sent_stream() -> TurnStream:
    """A stream whose ``infer`` was sent as c1."""
    stream = TurnStream("s")
    stream.requested("c1")
    return stream


def running(*pieces: str) -> TurnStream:
    """A stream of turn ``t`` that has shown these pieces."""
    stream = sent_stream()
    assert list(stream.apply(queued()))
    for piece in pieces:
        assert list(stream.apply(token(piece)))
    return stream


class RandomDisconnects(RuleBasedStateMachine):
    """A reader of an answer while every loss occurs at random."""

    @initialize(pieces=st.lists(st.text(min_size=1, max_size=3), max_size=8))
    def begin(self, pieces: list[str]) -> None:
        """Request a turn with this answer."""
        self.daemon = ModelDaemon(pieces)
        self.client = ModelClient(self.daemon)

    @rule(arrives=st.booleans())
    def send(self, arrives: bool) -> None:
        """The client sends what is due; a lost frame is followed by the loss of its socket."""
        was_due = self.client.stream.must_send and not self.client.inbound
        self.client.send_if_due(arrives=arrives)
        if was_due and not arrives:
            self.client.disconnect(lambda: None, joined=False)

    @rule(n_frames=st.integers(1, 4))
    def read(self, n_frames: int) -> None:
        """Some frames in flight arrive."""
        self.client.read(n_frames)

    @rule(n_steps=st.integers(1, 4))
    def advance(self, n_steps: int) -> None:
        """The daemon produces output while the client is attached."""
        for _ in range(n_steps):
            self.client.inbound += self.daemon.step()

    @rule(n_steps=st.integers(0, 12), memory=st.sampled_from(["kept", "ring", "epoch"]), joined=st.booleans())
    def disconnect(self, n_steps: int, memory: str, joined: bool) -> None:
        """The socket is lost; meanwhile the turn continues, perhaps to its end, and events may be lost."""

        def run_daemon() -> None:
            for _ in range(n_steps):
                self.daemon.step()
            if memory != "kept":
                self.daemon.forget(restarted=memory == "epoch")

        self.client.disconnect(run_daemon, joined=joined)

    @precondition(lambda self: self.client.stream.is_over)
    @rule()
    def ended_stream_sends_nothing(self) -> None:
        """An ended stream requests nothing."""
        assert not self.client.stream.must_send

    @invariant()
    def shown_text_is_a_prefix(self) -> None:
        """The shown text is always a prefix of the answer."""
        assert "".join(self.daemon.pieces).startswith(self.client.text)
        assert self.daemon.turns_begun <= 1

    def teardown(self) -> None:
        """Without further losses the stream reaches its one end with the whole text."""
        if not hasattr(self, "client"):
            return
        for _ in range(100):
            self.client.send_if_due()
            self.client.read(100)
            self.client.inbound += self.daemon.step()
        assert self.client.stream.is_over
        assert self.client.text == "".join(self.daemon.pieces)
        assert [type(event) for event in self.client.events].count(End) == 1
        assert isinstance(self.client.events[-1], End)
        assert self.client.events[-1].stats.tokens == 2


@pytest.mark.parametrize("n_sequences", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_any_sequence_of_losses(n_sequences: int) -> None:
    """An answer is read once and ends once, whatever is lost."""
    run_state_machine_as_test(RandomDisconnects, settings=settings(max_examples=n_sequences))


@given(st.text(max_size=6), st.integers(0, 6), st.booleans())
def test_turn_failed_while_disconnected_raises_once(text: str, at: int, forgotten: bool) -> None:
    """The stream raises for every error, repeatable or not, and no turn runs twice."""
    daemon = ModelDaemon(list(text))
    client = ModelClient(daemon)
    client.send_if_due()
    for _ in range(min(at, len(text))):
        client.inbound += daemon.step()
    client.read(100)

    def fail() -> None:
        daemon.fail()
        if forgotten:
            daemon.forget(restarted=True)

    client.disconnect(fail, joined=True)
    with pytest.raises(InferenceCenterError) as caught:
        client.read(100)
    assert caught.value.code is (ErrorCode.TURN_NOT_FOUND if forgotten else ErrorCode.INTERNAL)
    assert client.stream.is_over
    assert daemon.turns_begun == 1


def test_undisturbed_turn_is_passed_through() -> None:
    """Events are unchanged, and those of other turns and requests are dropped."""
    stream = sent_stream()
    progress = Progress(session_id="s", seq=2, turn_id="t", done=1, total=2)
    taken = [queued(), progress, token("a"), token("b"), end()]
    others = [token("x", turn_id="t0"), queued("t9", request_id="c9"), refusal("internal", request_id="c9")]
    given_out = [event for given in (*others, *taken[:2], *others, *taken[2:]) for event in stream.apply(given)]
    assert given_out == taken
    assert stream.is_over
    assert stream.turn_id == "t"


def test_changed_answer_is_rejected() -> None:
    """A daemon that breaks the prefix guarantee causes an error."""
    stream = running("Hel")
    with pytest.raises(InferenceCenterError, match="not a prefix of its answer") as caught:
        list(stream.apply(events_lost(turn_id="t", content="Yes")))
    assert caught.value.code is ErrorCode.INTERNAL
    assert stream.is_over


def test_running_turn_continues_after_the_shown_text() -> None:
    """Without the missed events only the new part of the text is yielded."""
    stream = running("Hel")
    assert [event.content for event in stream.apply(events_lost(turn_id="t", content="Hello"))] == ["lo"]  # type: ignore[union-attr]
    assert list(stream.apply(events_lost(turn_id="t", content="Hello"))) == []
    assert list(stream.apply(KEPT)) == []
    assert not stream.must_send


def test_ended_turn_is_completed_from_the_transcript() -> None:
    """The rest of its text comes from the transcript, and its end from the repeated request."""
    stream = running("He")
    messages = (*transcript("Before.", "Hello"), ChatMessage(role="user", content="appended later"))
    turns = (ended("t0", 2), ended("t", 4))
    assert [event.content for event in stream.apply(events_lost(transcript=messages, turns=turns))] == ["llo"]  # type: ignore[union-attr]
    assert (stream.state, stream.must_send) == (StreamState.ENDING, True)
    assert list(stream.apply(KEPT)) == []
    assert stream.must_send, "disconnected again before the end came"
    stream.requested("c2")
    assert list(stream.apply(end(request_id="c1"))) == [], "an answer to an earlier frame"
    assert [type(event) for event in stream.apply(end(request_id="c2"))] == [End]
    assert stream.is_over


@pytest.mark.parametrize("messages", [2, 0, 9])
def test_discarded_turn_is_not_completed(messages: int) -> None:
    """The previous turn's messages are not taken for its own."""
    stream = running()
    turns = (ended("t0", 2), ended("t", messages, "aborted"))
    assert list(stream.apply(events_lost(transcript=transcript("Before."), turns=turns))) == []
    assert stream.state is StreamState.ENDING


def test_vanished_turn_is_lost() -> None:
    """A failed or rewound turn is neither running nor in the transcript."""
    stream = running("He")
    with pytest.raises(InferenceCenterError, match="rest of turn t is lost") as caught:
        list(stream.apply(events_lost(transcript=transcript("Other."), turns=(ended("t0", 2),))))
    assert caught.value.code is ErrorCode.TURN_NOT_FOUND


def test_forgotten_key_is_not_accepted() -> None:
    """The daemon would run the turn again, so its answer is not the end."""
    stream = running()
    list(stream.apply(events_lost(transcript=transcript(""), turns=(ended("t", 2),))))
    stream.requested("c2")
    with pytest.raises(InferenceCenterError, match="no longer has it"):
        list(stream.apply(queued("t2", request_id="c2")))


def test_turn_of_another_client_is_not_adopted() -> None:
    """The request id tells whether the running turn belongs to the unacknowledged request."""
    stream = sent_stream()
    list(stream.apply(events_lost(turn_id="theirs", content="Theirs")))
    stream.requested("c2")
    assert list(stream.apply(token(" goes on", turn_id="theirs"))) == []
    with pytest.raises(InferenceCenterError) as caught:
        list(stream.apply(refusal("session_busy", request_id="c2")))
    assert caught.value.code is ErrorCode.SESSION_BUSY


def test_unacknowledged_running_turn_is_adopted() -> None:
    """With its id, its text so far comes first, then the events since."""
    stream = sent_stream()
    list(stream.apply(events_lost(turn_id="t", content="Hel")))
    stream.requested("c2")
    list(stream.apply(token("lo", seq=21)))
    given_out = list(stream.apply(queued(seq=22, request_id="c2")))
    assert "".join(event.content for event in given_out if isinstance(event, Token)) == "Hello"
    assert isinstance(given_out[-1], Queued)


def test_starting_daemon_is_retried_after_a_reconnect_only() -> None:
    """A first request is refused, and so is a final error."""
    with pytest.raises(InferenceCenterError):
        list(sent_stream().apply(refusal("model_loading")))
    stream = sent_stream()
    list(stream.apply(KEPT))
    stream.requested("c2")
    assert list(stream.apply(refusal("model_loading", request_id="c2"))) == []
    assert stream.must_send
    assert stream.refusal is not None
    stream.requested("c3")
    assert stream.refusal is None
    with pytest.raises(InferenceCenterError):
        list(stream.apply(refusal("session_busy", request_id="c3")))
    assert stream.is_over


def test_followed_turn() -> None:
    """Its text so far comes first; if it ends while disconnected, its end has no times but a warning."""
    stream = TurnStream.following("s", "t")
    assert not stream.must_send
    assert [event.content for event in stream.apply(events_lost(turn_id="t", content="Hel"))] == ["Hel"]  # type: ignore[union-attr]
    *rest, last = stream.apply(events_lost(transcript=transcript("Hello"), turns=(ended("t", 2, "length"),)))
    assert [event.content for event in rest] == ["lo"]  # type: ignore[union-attr]
    assert isinstance(last, End)
    assert (last.finish_reason, last.usage.completion_tokens, last.stats.tokens) == ("length", 2, 2)
    assert "timings" in last.warnings[0]
    assert stream.is_over
    assert "t, OVER" in repr(stream)


def test_sequence_numbers() -> None:
    """Known numbers repeat; a token may cover several; any other skip is a gap."""
    position = SequenceTracker("e")
    assert position.admit(queued(seq=1)) is SequenceStatus.NEXT
    assert position.admit(queued(seq=1)) is SequenceStatus.REPEATED
    assert position.admit(token("joined", seq=5)) is SequenceStatus.NEXT
    assert position.admit(end(seq=7)) is SequenceStatus.AFTER_A_GAP
    assert repr(position) == "SequenceTracker(e, 5)"
    position.record(3)
    assert position.seq == 5


def test_persistent_gap_is_accepted() -> None:
    """Events missing right after a resume were not meant for this client."""
    position = SequenceTracker("e")
    position.record(5)
    position.resume(KEPT)
    assert position.seq == 5
    assert position.admit(end(seq=7)) is SequenceStatus.NEXT
    assert position.admit(end(seq=9)) is SequenceStatus.AFTER_A_GAP


def test_position_is_reset() -> None:
    """After lost events the daemon's numbers apply; after a takeover any number is new."""
    position = SequenceTracker("e")
    position.record(50)
    position.resume(events_lost())
    assert (position.epoch, position.seq) == ("e2", 20)
    position.reset()
    assert position.epoch is None
    assert position.admit(end(seq=3)) is SequenceStatus.NEXT
