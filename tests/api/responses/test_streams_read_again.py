"""Streams of background responses that are read again, through the openai package on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.api.http_client import post, tick
from tests.api.responses.helpers import PATH, begin_turns, create_response, frames_of, get

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
    """What was missed, and what comes then; no event is there twice or missing."""
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
    """Byte for byte, also by several readers and after its end."""
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
