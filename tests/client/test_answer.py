"""Tests of ``client.answer``, and of turns with reasoning and tool calls across a lost connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.client.answer import Answer, result
from inferencecenter.client.session import SequenceStatus, SequenceTracker
from inferencecenter.client.transport import parse
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.events import Reasoning, Token, ToolCall
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.protocol.values import ToolCall as Call
from tests.client.test_stream import end as end_of_turn
from tests.client.test_stream import ended, events_lost, queued, running, sent_stream

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event

WEATHER = Call(call_id="call_0", name="weather", arguments='{"city": "Oslo"}')
CLOCK = Call(call_id="call_1", name="clock", arguments="{}")


def events_of(*, thinks: str, says: str, calls: tuple[Call, ...]) -> list[Event]:
    """Return the events of such an answer, one character each."""
    head = {"session_id": "s", "turn_id": "t", "seq": 2}
    events: list[Event] = [Reasoning.model_validate({**head, "content": char}) for char in thinks]
    events += [Token.model_validate({**head, "content": char}) for char in says]
    for index, call in enumerate(calls):
        named = {**head, "index": index, "call_id": call.call_id}
        events.append(ToolCall.model_validate({**named, "name": call.name, "arguments": ""}))
        events += [ToolCall.model_validate({**named, "arguments": char}) for char in call.arguments]
    return events


EVENTS = events_of(thinks="Hm.", says="Let me see.", calls=(WEATHER, CLOCK))


def test_answer_is_assembled() -> None:
    """It has the text, the reasoning, the tool calls and the end."""
    answer = Answer()
    for event in (queued(), *EVENTS, end_of_turn()):
        answer.apply(event)
    assert (answer.content, answer.reasoning, answer.tool_calls) == ("Let me see.", "Hm.", (WEATHER, CLOCK))
    assert answer.end == end_of_turn()
    assert result(WEATHER, "5 °C") == ChatMessage(role="tool", content="5 °C", tool_call_id="call_0")


@given(cut_at=st.integers(0, len(EVENTS)), known=st.integers(0, len(EVENTS)))
def test_missing_part_follows_the_known_part(cut_at: int, known: int) -> None:
    """After any disconnect exactly the missing part is added."""
    cut_at, known = sorted((cut_at, known))
    before, whole = Answer(), Answer()
    for event in EVENTS[:cut_at]:
        before.apply(event)
    for event in EVENTS[:known]:
        whole.apply(event)
    for event in before.missing(whole, session_id="s", turn_id="t", seq=9):
        before.apply(event)
    assert (before.content, before.reasoning, before.tool_calls) == (whole.content, whole.reasoning, whole.tool_calls)


def test_running_turn_catches_up() -> None:
    """The resume answer has reasoning and calls so far, and live events continue the stream."""
    stream = running()
    yielded = [event for given in EVENTS[:-4] for event in stream.apply(given)]
    snapshot = events_lost(turn_id="t", content="Let me see.", reasoning="Hm.", tool_calls=(WEATHER, CLOCK))
    yielded += stream.apply(snapshot)
    yielded += stream.apply(end_of_turn(seq=30))
    answer = Answer()
    for event in yielded:
        answer.apply(event)
    assert answer.tool_calls == (WEATHER, CLOCK)
    assert answer.end is not None


def test_ended_turn_is_completed_from_the_transcript() -> None:
    """A truncated call is absent there, which is no contradiction."""
    stream = sent_stream()
    list(stream.apply(queued()))
    for event in EVENTS[:-1]:
        list(stream.apply(event))
    last = ChatMessage(role="assistant", content="Let me see.", reasoning="Hm.", tool_calls=(WEATHER,))
    transcript = (ChatMessage(role="user", content="?"), last)
    assert list(stream.apply(events_lost(transcript=transcript, turns=(ended("t", 2, "aborted"),)))) == []
    assert stream.must_send


@pytest.mark.parametrize(
    "fields", [{"reasoning": "Ah."}, {"tool_calls": (WEATHER.model_copy(update={"arguments": "[]"}),)}]
)
def test_changed_answer_is_rejected(fields: dict[str, object]) -> None:
    """The shown part must be a prefix of the answer, for each kind."""
    stream = running()
    for event in EVENTS:
        list(stream.apply(event))
    snapshot = events_lost(
        **({"turn_id": "t", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": ()} | fields)
    )
    with pytest.raises(InferenceCenterError) as caught:
        list(stream.apply(snapshot))
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("event", [EVENTS[0], EVENTS[-1]])
def test_coalesced_event_covers_several_numbers(event: Reasoning | ToolCall) -> None:
    """The higher sequence number of a coalesced event is not a gap."""
    assert SequenceTracker("e", 1).admit(event.model_copy(update={"seq": 7})) is SequenceStatus.NEXT


def test_event_of_a_later_version_may_be_coalesced() -> None:
    """Only its number is known, so it is no gap; a known event with that number is one."""
    event = parse('{"op": "weather", "session_id": "s", "seq": 7, "sky": "blue"}')
    assert type(event) is SessionEvent
    assert event.id is None
    assert SequenceTracker("e", 1).admit(event) is SequenceStatus.NEXT
    assert SequenceTracker("e", 1).admit(end_of_turn(seq=7)) is SequenceStatus.AFTER_A_GAP


@pytest.mark.parametrize("text", ["weather", "[]", '{"seq": 7}', '{"op": "weather"}', '{"op": "pong", "when": 1}'])
def test_unnumbered_frame_that_is_not_understood_is_dropped(text: str) -> None:
    """Text that is no JSON or no event, or an event that belongs to no session, is dropped."""
    assert parse(text) is None
