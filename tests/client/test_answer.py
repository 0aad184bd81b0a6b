"""Tests of ``client.answer``, and of turns with thoughts and calls whose connection is lost on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.client.answer import Answer, result
from inferencecenter.client.session import SequenceStatus, SequenceTracker
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import Reasoning, Token, ToolCall
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.protocol.values import ToolCall as Call
from tests.client.test_stream import asking, ended, lost, queued, running
from tests.client.test_stream import end as end_of_turn

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event

WEATHER = Call(call_id="call_0", name="weather", arguments='{"city": "Oslo"}')
CLOCK = Call(call_id="call_1", name="clock", arguments="{}")


def told(*, thinks: str, says: str, calls: tuple[Call, ...]) -> list[Event]:
    """The events of such an answer, a character each."""
    head = {"session_id": "s", "turn_id": "t", "seq": 2}
    events: list[Event] = [Reasoning.model_validate({**head, "content": char}) for char in thinks]
    events += [Token.model_validate({**head, "content": char}) for char in says]
    for index, call in enumerate(calls):
        named = {**head, "index": index, "call_id": call.call_id}
        events.append(ToolCall.model_validate({**named, "name": call.name, "arguments": ""}))
        events += [ToolCall.model_validate({**named, "arguments": char}) for char in call.arguments]
    return events


EVENTS = told(thinks="Hm.", says="Let me see.", calls=(WEATHER, CLOCK))


def test_an_answer_is_put_together() -> None:
    """What was thought, what was said, which tools were asked for, and how it ended."""
    answer = Answer()
    for event in (queued(), *EVENTS, end_of_turn()):
        answer.take(event)
    assert (answer.content, answer.reasoning, answer.tool_calls) == ("Let me see.", "Hm.", (WEATHER, CLOCK))
    assert answer.end == end_of_turn()
    assert result(WEATHER, "5 °C") == ChatMessage(role="tool", content="5 °C", tool_call_id="call_0")


@given(cut=st.integers(0, len(EVENTS)), known=st.integers(0, len(EVENTS)))
def test_what_is_missing_follows_what_there_is(cut: int, known: int) -> None:
    """Whatever was told before a cut, after it comes the rest, and nothing twice."""
    cut, known = sorted((cut, known))
    before, whole = Answer(), Answer()
    for event in EVENTS[:cut]:
        before.take(event)
    for event in EVENTS[:known]:
        whole.take(event)
    for event in before.missing(whole, session_id="s", turn_id="t", seq=9):
        before.take(event)
    assert (before.content, before.reasoning, before.tool_calls) == (whole.content, whole.reasoning, whole.tool_calls)


def test_a_running_turn_is_caught_up_with() -> None:
    """The daemon says what was thought and asked for meanwhile; the stream goes on with live events."""
    stream = running()
    shown = [event for given in EVENTS[:-4] for event in stream.take(given)]
    snapshot = lost(turn_id="t", content="Let me see.", reasoning="Hm.", tool_calls=(WEATHER, CLOCK))
    shown += stream.take(snapshot)
    shown += stream.take(end_of_turn(seq=30))
    answer = Answer()
    for event in shown:
        answer.take(event)
    assert answer.tool_calls == (WEATHER, CLOCK)
    assert answer.end is not None


def test_a_turn_that_has_ended_is_finished_from_the_transcript() -> None:
    """A call that was cut off is no part of it, and that is no contradiction."""
    stream = asking()
    list(stream.take(queued()))
    for event in EVENTS[:-1]:
        list(stream.take(event))
    last = ChatMessage(role="assistant", content="Let me see.", reasoning="Hm.", tool_calls=(WEATHER,))
    transcript = (ChatMessage(role="user", content="?"), last)
    assert list(stream.take(lost(transcript=transcript, turns=(ended("t", 2, "aborted"),)))) == []
    assert stream.due


@pytest.mark.parametrize(
    "fields", [{"reasoning": "Ah."}, {"tool_calls": (WEATHER.model_copy(update={"arguments": "[]"}),)}]
)
def test_another_answer_is_not_shown(fields: dict[str, object]) -> None:
    """What was shown is how an answer begins, of each kind."""
    stream = running()
    for event in EVENTS:
        list(stream.take(event))
    snapshot = lost(**({"turn_id": "t", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": ()} | fields))
    with pytest.raises(InferenceCenterError) as caught:
        list(stream.take(snapshot))
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("event", [EVENTS[0], EVENTS[-1]])
def test_text_of_any_kind_may_stand_for_several(event: Reasoning | ToolCall) -> None:
    """So that a number further on is no gap."""
    assert SequenceTracker("e", 1).admit(event.model_copy(update={"seq": 7})) is SequenceStatus.NEXT
