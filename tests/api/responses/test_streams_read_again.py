"""Streams of background responses that are read again, through the openai package on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, NotFoundError

from inferencecenter.api.body import checked
from inferencecenter.api.responses.request_schemas import CreateResponse
from inferencecenter.api.responses.response_events import ResponseEventBuilder
from inferencecenter.api.responses.serializers import ResponseRef, echo_of, output_of, response_of
from inferencecenter.protocol.values import ChatMessage, ToolCall
from tests.api.http_client import post, tick
from tests.api.responses.helpers import PATH, begin_turns, create_response, frames_of, get, wait_turns_left
from tests.api.responses.test_resources import TOOL

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

BODY = {"input": "Hello", "background": True, "stream": True}


async def begin_and_leave(server: Running, ada: AsyncOpenAI, n_events: int) -> tuple[str, str, int]:
    """Begin a stream, read some events, and disconnect; return the ids of response and turn, and the last number."""
    pending = asyncio.get_running_loop().create_task(ada.responses.create(input="Hello", background=True, stream=True))
    (turn,) = await begin_turns(server)
    stream = await pending
    server.engine.say(turn, "Good ")
    async with stream:
        for _ in range(n_events):
            event = await anext(stream)
    created = (await ada.responses.retrieve(f"resp_{session_of(server, turn)}{turn.removeprefix('t_')}")).id
    return created, turn, event.sequence_number


def session_of(server: Running, turn: str) -> str:
    """Return the session of a turn, as it is in the id of a response."""
    return server.engine.submission(turn).session_id.removeprefix("s_")


@pytest.mark.parametrize("n_events", [1, 5])
async def test_stream_is_read_on_after_its_last_event(server: Running, ada: AsyncOpenAI, n_events: int) -> None:
    """It has the missed events and the later ones, each exactly once."""
    created, turn, last = await begin_and_leave(server, ada, n_events)
    server.engine.say(turn, "day")
    stream = await ada.responses.retrieve(created, stream=True, starting_after=last)
    server.engine.say(turn, "!")
    server.engine.finish(turn)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(last + 1, last + 1 + len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Good day!"


async def test_stream_is_read_again_from_its_beginning(server: Running, ada: AsyncOpenAI) -> None:
    """It is equal byte for byte for readers that join during the response or after its end."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, BODY))
    (turn,) = await begin_turns(server)
    name = f"resp_{session_of(server, turn)}{turn.removeprefix('t_')}"
    server.engine.say(turn, "Good ")
    meanwhile = asyncio.get_running_loop().create_task(get(server, name, "?stream=true"))
    await tick(10)
    server.engine.say(turn, "day")
    server.engine.finish(turn)
    streamed, again = await pending, await meanwhile
    assert [frame["type"] for frame in frames_of(streamed)][-1] == "response.completed"
    assert again.body == streamed.body == (await get(server, name, "?stream=true")).body
    end = len(frames_of(streamed)) - 1
    assert (await get(server, name, f"?stream=true&starting_after={end}")).body == b"data: [DONE]\n\n"


async def test_only_recorded_streams_can_be_read_again(server: Running, ada: AsyncOpenAI) -> None:
    """Others and those of other clients are refused; the events of a deleted response are not kept."""
    plain = await create_response(server, {"input": "Hi"})
    with pytest.raises(BadRequestError) as refused:
        await ada.responses.retrieve(plain.json["id"], stream=True)
    assert refused.value.param == "stream"
    streamed = await create_response(server, BODY)
    name = frames_of(streamed)[0]["response"]["id"]
    assert (await get(server, name, "?stream=true")).status == 200
    server.accounts.ensure_client("bob", max_sessions=8, priority="normal")
    other = server.accounts.create_token("bob", name="test").token
    assert (await get(server, name, "?stream=true", token=other)).status == 404
    assert len(server.context.stream_recordings) == 1
    await ada.responses.delete(name)
    assert len(server.context.stream_recordings) == 0
    with pytest.raises(NotFoundError):
        await ada.responses.retrieve(name, stream=True)


@pytest.mark.parametrize("streamed", [True, False])
async def test_events_that_are_not_kept_are_built_from_the_store(
    server: Running, ada: AsyncOpenAI, streamed: bool
) -> None:
    """They describe the same response: after five minutes, or a restart, no recording is left."""
    created = await create_response(server, {**BODY, "stream": streamed, "tools": [TOOL]})
    name = frames_of(created)[0]["response"]["id"] if streamed else created.json["id"]
    await wait_turns_left(server, 0)
    recordings = server.context.stream_recordings
    if (recording := recordings.find("ada", name)) is not None:
        recordings.discard(recording)
    events = [event async for event in await ada.responses.retrieve(name, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:3] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Good day"
    assert events[-1].type == "response.completed"
    assert events[-1].response == await ada.responses.retrieve(name)
    if streamed:  # the items have the ids and places that they had
        assert {frame["item_id"] for frame in frames_of(created) if "item_id" in frame} == {
            event.item_id for event in events if hasattr(event, "item_id")
        }
    with pytest.raises(BadRequestError) as refused:
        await ada.responses.retrieve(name, stream=True, starting_after=1)
    assert refused.value.param == "starting_after"
    server.accounts.ensure_client("bob", max_sessions=8, priority="normal")
    other = server.accounts.create_token("bob", name="test").token
    assert (await get(server, name, "?stream=true", token=other)).status == 404


async def test_response_in_progress_without_events_is_not_streamed(server: Running) -> None:
    """After a restart it continues, but its first events are lost."""
    created = (await post(server, PATH, {"input": "Hello", "background": True})).json["id"]
    (turn,) = await begin_turns(server)
    refused = await get(server, created, "?stream=true")
    assert (refused.status, refused.error["param"]) == (400, "stream")
    server.engine.finish(turn)


def test_thoughts_and_calls_are_built_again() -> None:
    """Each is an item, in the order of the stored response; a failed response has none."""
    place = ResponseRef("s_" + "a" * 22, "t_" + "b" * 22)
    call = ToolCall(call_id="c", name="look", arguments='{"a": 1}')
    answer = ChatMessage(role="assistant", content="Hm.", reasoning="Why?", tool_calls=(call,))
    request = checked(CreateResponse, {"input": "Go", "background": True})
    echo = echo_of(request, model="stub", created_at=1.0)
    output = output_of(answer, place.turn_id, state="completed")
    final = response_of(echo, place, status="completed", output=output, completed_at=2.0)
    builder = ResponseEventBuilder(echo, top_logprobs=0, clock=lambda: 0.0)
    frames = [json.loads(frame.data) for frame in builder.rebuild(place, answer, final)]
    items = [frame["item"] for frame in frames if frame["type"] == "response.output_item.done"]
    assert items == frames[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    failed = response_of(echo, place, status="failed")
    again = ResponseEventBuilder(echo, top_logprobs=0, clock=lambda: 0.0).rebuild(place, None, failed)
    assert [frame.type for frame in again] == ["response.created", "response.in_progress", "response.failed"]


async def test_starting_after_has_no_effect_without_stream(server: Running) -> None:
    """The whole response is returned."""
    made = await create_response(server, {"input": "Hi"})
    found = await get(server, made.json["id"], "?starting_after=3")
    assert found.json["id"] == made.json["id"]
    assert "starting_after" in found.headers["x-warning"]


async def test_turn_that_cannot_start_leaves_no_recording(server: Running) -> None:
    """It is refused as other requests are."""
    refused: Any = await post(server, PATH, {**BODY, "model": "gone"})
    assert refused.status == 404
    assert len(server.context.stream_recordings) == 0
