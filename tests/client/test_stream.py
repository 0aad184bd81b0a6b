"""Tests of ``client.stream`` and ``client.position``: one turn, cut anywhere, any number of times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferencecenter.client.session import SequenceStatus, SequenceTracker
from inferencecenter.client.stream import StreamState, TurnStream
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End, Error, Progress, Queued, SessionResumed, Token
from inferencecenter.protocol.values import ChatMessage, TranscriptTurn, Usage
from tests.client.model_daemon import ModelClient, ModelDaemon
from tests.client.peer import STATS, USAGE


def queued(turn_id: str = "t", *, seq: int = 1, request_id: str | None = "c1") -> Queued:
    """An acknowledgement."""
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


def lost(**fields: Any) -> SessionResumed:
    """A resumption without the missing events."""
    body: dict[str, Any] = {"state": "idle", "epoch": "e2", "seq": 20, "reason": "other_epoch", **fields}
    return SessionResumed(session_id="s", resumed=False, **body)


def ended(turn_id: str, messages: int, finish_reason: str = "stop") -> TranscriptTurn:
    """A line of the transcript."""
    usage = Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=2)
    return TranscriptTurn(turn_id=turn_id, finish_reason=finish_reason, messages=messages, usage=usage)


def said(*answers: str) -> tuple[ChatMessage, ...]:
    """A transcript of questions and these answers."""
    return tuple(
        message
        for answer in answers
        for message in (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content=answer))
    )


KEPT = SessionResumed(session_id="s", resumed=True, state="busy", epoch="e", seq=9)


def asking() -> TurnStream:
    """A stream whose ``infer`` went out as c1."""
    stream = TurnStream("s")
    stream.asked("c1")
    return stream


def running(*pieces: str) -> TurnStream:
    """A stream of turn ``t`` that has shown these pieces."""
    stream = asking()
    assert list(stream.take(queued()))
    for piece in pieces:
        assert list(stream.take(token(piece)))
    return stream


class CutAnywhere(RuleBasedStateMachine):
    """A person reads an answer while everything that can be lost is lost, again and again."""

    @initialize(pieces=st.lists(st.text(min_size=1, max_size=3), max_size=8))
    def begin(self, pieces: list[str]) -> None:
        """Ask a question that is answered so."""
        self.daemon = ModelDaemon(pieces)
        self.client = ModelClient(self.daemon)

    @rule(arrives=st.booleans())
    def ask(self, arrives: bool) -> None:
        """The client sends what is due; a frame that is lost is followed by the loss of its socket."""
        was_due = self.client.stream.due and not self.client.inbound
        self.client.ask_if_due(arrives=arrives)
        if was_due and not arrives:
            self.client.cut(lambda: None, joined=False)

    @rule(n_frames=st.integers(1, 4))
    def read(self, n_frames: int) -> None:
        """Some of what is on its way arrives."""
        self.client.read(n_frames)

    @rule(n_steps=st.integers(1, 4))
    def go_on(self, n_steps: int) -> None:
        """The daemon says more, and the client is attached."""
        for _ in range(n_steps):
            self.client.inbound += self.daemon.step()

    @rule(n_steps=st.integers(0, 12), memory=st.sampled_from(["kept", "ring", "epoch"]), joined=st.booleans())
    def cut(self, n_steps: int, memory: str, joined: bool) -> None:
        """The socket is lost; meanwhile the turn goes on, perhaps to its end, and the daemon may forget events."""

        def meanwhile() -> None:
            for _ in range(n_steps):
                self.daemon.step()
            if memory != "kept":
                self.daemon.forget(restarted=memory == "epoch")

        self.client.cut(meanwhile, joined=joined)

    @precondition(lambda self: self.client.stream.over)
    @rule()
    def nothing_follows(self) -> None:
        """Once it is over, nothing is asked for."""
        assert not self.client.stream.due

    @invariant()
    def what_was_shown_is_a_prefix(self) -> None:
        """At no moment is anything shown that the answer does not begin with."""
        assert "".join(self.daemon.pieces).startswith(self.client.text)
        assert self.daemon.turns_begun <= 1

    def teardown(self) -> None:
        """Left alone, the stream comes to the one end with the whole text."""
        if not hasattr(self, "client"):
            return
        for _ in range(100):
            self.client.ask_if_due()
            self.client.read(100)
            self.client.inbound += self.daemon.step()
        assert self.client.stream.over
        assert self.client.text == "".join(self.daemon.pieces)
        assert [type(event) for event in self.client.events].count(End) == 1
        assert isinstance(self.client.events[-1], End)
        assert self.client.events[-1].stats.tokens == 2


TestCutAnywhere = CutAnywhere.TestCase


@given(st.text(max_size=6), st.integers(0, 6), st.booleans())
def test_a_turn_that_fails_in_a_gap_ends_the_stream_once(text: str, at: int, forgotten: bool) -> None:
    """Whether its error can be sent again or not, the stream raises, and nothing is run a second time."""
    daemon = ModelDaemon(list(text))
    client = ModelClient(daemon)
    client.ask_if_due()
    for _ in range(min(at, len(text))):
        client.inbound += daemon.step()
    client.read(100)

    def fail() -> None:
        daemon.fail()
        if forgotten:
            daemon.forget(restarted=True)

    client.cut(fail, joined=True)
    with pytest.raises(InferenceCenterError) as caught:
        client.read(100)
    assert caught.value.code is (ErrorCode.TURN_NOT_FOUND if forgotten else ErrorCode.INTERNAL)
    assert client.stream.over
    assert daemon.turns_begun == 1


def test_an_undisturbed_turn_is_passed_through() -> None:
    """Each event comes as it is; what belongs to other turns or requests does not come."""
    stream = asking()
    progress = Progress(session_id="s", seq=2, turn_id="t", done=1, total=2)
    taken = [queued(), progress, token("a"), token("b"), end()]
    others = [token("x", turn_id="t0"), queued("t9", request_id="c9"), refusal("internal", request_id="c9")]
    given_out = [event for given in (*others, *taken[:2], *others, *taken[2:]) for event in stream.take(given)]
    assert given_out == taken
    assert stream.over
    assert stream.turn_id == "t"


def test_an_answer_that_changed_is_not_shown() -> None:
    """A daemon that breaks the promise of the prefix is told, not hidden."""
    stream = running("Hel")
    with pytest.raises(InferenceCenterError, match="not a prefix of its answer") as caught:
        list(stream.take(lost(turn_id="t", content="Yes")))
    assert caught.value.code is ErrorCode.INTERNAL
    assert stream.over


def test_a_running_turn_goes_on_after_what_was_shown() -> None:
    """Without the missing events only the rest of what was said is given, and nothing when nothing is new."""
    stream = running("Hel")
    assert [event.content for event in stream.take(lost(turn_id="t", content="Hello"))] == ["lo"]  # type: ignore[union-attr]
    assert list(stream.take(lost(turn_id="t", content="Hello"))) == []
    assert list(stream.take(KEPT)) == []
    assert not stream.due


def test_the_rest_of_an_ended_turn_comes_from_the_transcript() -> None:
    """Its text from where the turn stopped in the transcript, its end from asking again with the same key."""
    stream = running("He")
    transcript = (*said("Before.", "Hello"), ChatMessage(role="user", content="appended later"))
    turns = (ended("t0", 2), ended("t", 4))
    assert [event.content for event in stream.take(lost(transcript=transcript, turns=turns))] == ["llo"]  # type: ignore[union-attr]
    assert (stream.state, stream.due) == (StreamState.ENDING, True)
    assert list(stream.take(KEPT)) == []
    assert stream.due, "cut again before the end came"
    stream.asked("c2")
    assert list(stream.take(end(request_id="c1"))) == [], "an answer to an earlier frame"
    assert [type(event) for event in stream.take(end(request_id="c2"))] == [End]
    assert stream.over


@pytest.mark.parametrize("messages", [2, 0, 9])
def test_a_turn_that_was_discarded_has_no_rest(messages: int) -> None:
    """It left no messages: those of the turn before are not taken for its own."""
    stream = running()
    turns = (ended("t0", 2), ended("t", messages, "aborted"))
    assert list(stream.take(lost(transcript=said("Before."), turns=turns))) == []
    assert stream.state is StreamState.ENDING


def test_a_turn_that_is_gone_is_lost() -> None:
    """One that failed or was taken back in a gap without events is neither running nor in the transcript."""
    stream = running("He")
    with pytest.raises(InferenceCenterError, match="rest of turn t is lost") as caught:
        list(stream.take(lost(transcript=said("Other."), turns=(ended("t0", 2),))))
    assert caught.value.code is ErrorCode.TURN_NOT_FOUND


def test_a_daemon_that_forgot_the_key_is_not_believed() -> None:
    """It would run the turn again: that is not its end."""
    stream = running()
    list(stream.take(lost(transcript=said(""), turns=(ended("t", 2),))))
    stream.asked("c2")
    with pytest.raises(InferenceCenterError, match="does not know it any more"):
        list(stream.take(queued("t2", request_id="c2")))


def test_another_clients_turn_is_not_taken_for_the_answer() -> None:
    """A turn that runs when an unacknowledged question comes back may be another's: the daemon says whose it is."""
    stream = asking()
    list(stream.take(lost(turn_id="theirs", content="Theirs")))
    stream.asked("c2")
    assert list(stream.take(token(" goes on", turn_id="theirs"))) == []
    with pytest.raises(InferenceCenterError) as caught:
        list(stream.take(refusal("session_busy", request_id="c2")))
    assert caught.value.code is ErrorCode.SESSION_BUSY


def test_an_unacknowledged_turn_that_runs_is_begun_with_what_it_said() -> None:
    """Once the daemon names it, what it had said comes first, then what came meanwhile."""
    stream = asking()
    list(stream.take(lost(turn_id="t", content="Hel")))
    stream.asked("c2")
    list(stream.take(token("lo", seq=21)))
    given_out = list(stream.take(queued(seq=22, request_id="c2")))
    assert "".join(event.content for event in given_out if isinstance(event, Token)) == "Hello"
    assert isinstance(given_out[-1], Queued)


def test_a_daemon_that_is_just_starting_is_asked_again() -> None:
    """Only after a cut: a first question that the daemon cannot take is refused, and so is what will not pass."""
    with pytest.raises(InferenceCenterError):
        list(asking().take(refusal("model_loading")))
    stream = asking()
    list(stream.take(KEPT))
    stream.asked("c2")
    assert list(stream.take(refusal("model_loading", request_id="c2"))) == []
    assert stream.due
    assert stream.refusal is not None
    stream.asked("c3")
    assert stream.refusal is None
    with pytest.raises(InferenceCenterError):
        list(stream.take(refusal("session_busy", request_id="c3")))
    assert stream.over


def test_following_a_turn() -> None:
    """All that it said comes first; when it ends in a gap, its end is told without times, with a warning."""
    stream = TurnStream.following("s", "t")
    assert not stream.due
    assert [event.content for event in stream.take(lost(turn_id="t", content="Hel"))] == ["Hel"]  # type: ignore[union-attr]
    *rest, last = stream.take(lost(transcript=said("Hello"), turns=(ended("t", 2, "length"),)))
    assert [event.content for event in rest] == ["lo"]  # type: ignore[union-attr]
    assert isinstance(last, End)
    assert (last.finish_reason, last.usage.completion_tokens, last.stats.tokens) == ("length", 2, 2)
    assert "times" in last.warnings[0]
    assert stream.over
    assert "t, OVER" in repr(stream)


def test_numbers_say_what_is_new() -> None:
    """Known numbers are repetitions; a token may stand for several; anything else that skips one leaves a gap."""
    position = SequenceTracker("e")
    assert position.admit(queued(seq=1)) is SequenceStatus.NEXT
    assert position.admit(queued(seq=1)) is SequenceStatus.REPEATED
    assert position.admit(token("joined", seq=5)) is SequenceStatus.NEXT
    assert position.admit(end(seq=7)) is SequenceStatus.AFTER_A_GAP
    assert repr(position) == "SequenceTracker(e, 5)"
    position.note(3)
    assert position.seq == 5


def test_a_gap_that_stays_is_accepted() -> None:
    """What is missing after the history was resumed right before it was not meant for this client."""
    position = SequenceTracker("e")
    position.note(5)
    position.resume(KEPT)
    assert position.seq == 5
    assert position.admit(end(seq=7)) is SequenceStatus.NEXT
    assert position.admit(end(seq=9)) is SequenceStatus.AFTER_A_GAP


def test_positions_are_reset_explicitly() -> None:
    """After lost events the daemon's numbers hold; after a take-over any number is new."""
    position = SequenceTracker("e")
    position.note(50)
    position.resume(lost())
    assert (position.epoch, position.seq) == ("e2", 20)
    position.forget()
    assert position.epoch is None
    assert position.admit(end(seq=3)) is SequenceStatus.NEXT
