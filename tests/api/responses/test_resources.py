"""Responses over HTTP: made, streamed, found again, ended, forgotten, and gone on from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.ipc.messages import Failed
from inferencecenter.sessions.journal import StorageFault
from tests.api.asking import post, request, tick
from tests.api.responses import told
from tests.api.responses.serving import PATH, begun, frames_of, get, left, made, text_of
from tests.api.streaming import streamed
from tests.server.harness import StubJournal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def output_text(response: dict[str, Any]) -> str:
    """Return the text of a response."""
    return told.response(response).output_text


def listed(server: Running) -> int:
    """Return how many sessions the client of the server's token has."""
    return server.context.sessions.session_counts("ada")[0]


async def test_a_response_is_made(server: Running) -> None:
    """Whole, as the openai package knows it, and with what was asked for."""
    body = {"input": "Hello", "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "store": True}
    heard = await made(server, body)
    assert heard.status == 200
    response = told.response(heard.json)
    assert (response.output_text, response.status, response.instructions) == ("Good day", "completed", "Be kind.")
    assert (response.metadata, response.temperature, response.model) == ({"a": "b"}, 0.5, "stub")


async def test_it_streams(server: Running) -> None:
    """Every event is one that openai knows; the last has the whole response."""
    frames = frames_of(await made(server, {"input": "Hello", "stream": True}, "Good ", "day"))
    for frame in frames:
        told.event(frame)
    assert [frame["delta"] for frame in frames if "delta" in frame] == ["Good ", "day"]
    assert output_text(frames[-1]["response"]) == "Good day"
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


@pytest.mark.parametrize("store", [True, False])
async def test_a_stream_that_storage_holds_back_says_so(serve: Serve, *, store: bool) -> None:
    """In a comment, in one line and without what comes later; one that is not stored is not held back."""
    journal = StubJournal()
    async with serve(journal=journal, sse_keepalive_s=0.01) as server:
        journal.holding = True
        async with streamed(server, {"input": "Hello", "store": store}, PATH) as reader:
            (turn,) = await begun(server)
            journal.fault = StorageFault("the disk\nis full")
            await reader.readuntil(b": storage unavailable: the disk is full\n\n" if store else b": keepalive\n\n")
            server.engine.say(turn, "Good day")
            server.engine.finish(turn)
            journal.fault = None
            journal.let_go()
            rest = await reader.readuntil(b"data: [DONE]")
    assert b"Good day" in rest
    assert store or b"storage" not in rest


async def test_the_engine_gets_what_was_asked_for(server: Running) -> None:
    """Parameters under their own names, further ones beside them, the form of the answer, and the class."""
    body = {
        "input": [{"role": "user", "content": "Hello"}],
        "max_output_tokens": 7,
        "temperature": 0.25,
        "top_p": 0.5,
        "params": {"seed": 3},
        "top_logprobs": 2,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}},
        "service_tier": "flex",
    }
    asking = asyncio.get_running_loop().create_task(post(server, PATH, body))
    (turn,) = await begun(server)
    submitted = server.engine.turns[turn].submission()
    for said in (b'"max_tokens":7', b'"temperature":0.25', b'"top_p":0.5', b'"seed":3', b'"n_probs":2'):
        assert said in submitted.params_json
    assert submitted.grammar is not None
    assert (submitted.grammar.kind, submitted.priority) == ("json_schema", 2)
    server.engine.finish(turn)
    assert (await asking).json["service_tier"] == "flex"


async def test_a_response_is_found_again(server: Running) -> None:
    """As it was told, but for the time of its end; so is what it was asked."""
    first = (await made(server, {"input": "Hello", "instructions": "Be kind."})).json
    again = (await get(server, first["id"])).json
    assert again == {**first, "completed_at": None}
    second = (await made(server, {"input": "And?", "previous_response_id": first["id"]})).json
    items = (await get(server, second["id"], "/input_items?order=asc&limit=2")).json
    assert [item["content"][0]["text"] for item in items["data"]] == ["Hello", "Good day"]
    rest = (await get(server, second["id"], f"/input_items?order=asc&after={items['last_id']}")).json
    assert ([item["role"] for item in rest["data"]], rest["has_more"], items["has_more"]) == (["user"], False, True)
    assert (await get(server, second["id"], "/input_items?after=x")).error["param"] == "after"


async def test_a_chain_goes_on_in_its_session(server: Running) -> None:
    """The same instructions, and nothing after it: the engine is only given what is new."""
    body = {"instructions": "Be kind."}
    first = (await made(server, {"input": "Hello", **body})).json
    second = (await made(server, {"input": "More", "previous_response_id": first["id"], **body})).json
    assert first["id"][:27] == second["id"][:27]
    assert listed(server) == 1
    assert second["previous_response_id"] == first["id"]


async def test_two_that_go_on_from_one_do_not_meet(server: Running) -> None:
    """The second goes on in a session of its own, which begins the same."""
    first = (await made(server, {"input": "Hello"})).json
    names = set()
    for _ in range(2):
        names.add((await made(server, {"input": "More", "previous_response_id": first["id"]})).json["id"][:27])
    assert len(names) == listed(server) == 2


async def test_other_instructions_take_the_place_of_those_before(server: Running) -> None:
    """All that was said is said again under them; those of the previous response are not carried over."""
    first = (await made(server, {"input": "Hello", "instructions": "Be kind."})).json
    asking = asyncio.get_running_loop().create_task(
        post(server, PATH, {"input": "More", "instructions": "Be rude.", "previous_response_id": first["id"]})
    )
    (turn,) = await begun(server)
    read = text_of(server.engine.turns[turn].submission())
    assert "Be rude." in read
    assert "Be kind." not in read
    assert [part in read for part in ("Hello", "Good day", "More")] == [True] * 3
    server.engine.finish(turn)
    assert (await asking).json["id"][:27] != first["id"][:27]


async def test_what_functions_answered_goes_on(server: Running) -> None:
    """By previous_response_id or with everything as input; the calls are known by their ids."""
    items = [
        {"role": "user", "content": "Look!"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
    ]
    heard = await made(server, {"input": items, "tools": [TOOL]}, "A tree.")
    assert output_text(heard.json) == "A tree."
    found = (await get(server, heard.json["id"], "/input_items?order=asc")).json["data"]
    assert [item["type"] for item in found] == ["message", "function_call", "function_call_output"]


async def test_what_is_not_stored_is_none_of_the_sessions(server: Running) -> None:
    """It can be gone on from all the same, for a while."""
    first = (await made(server, {"input": "Hello", "store": False})).json
    assert listed(server) == 0
    second = (await made(server, {"input": "More", "store": False, "previous_response_id": first["id"]})).json
    assert second["id"][:27] == first["id"][:27]
    third = (await made(server, {"input": "More", "previous_response_id": first["id"]})).json
    assert (third["store"], listed(server)) == (True, 1)


async def test_in_the_background_it_goes_on_alone(server: Running) -> None:
    """Whoever asked is told at once that it waits; later it is complete."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begun(server)
    queued = (await asking).json
    assert (queued["status"], queued["background"]) == ("queued", True)
    assert (await get(server, queued["id"])).json["status"] == "in_progress"
    server.engine.say(turn, "Good day")
    server.engine.finish(turn)
    done = (await get(server, queued["id"])).json
    assert (done["status"], output_text(done)) == ("completed", "Good day")


async def test_one_in_the_background_is_cancelled(server: Running) -> None:
    """It is at once, keeps what it said, and is so again when asked again."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begun(server)
    name = (await asking).json["id"]
    server.engine.say(turn, "Good")
    for _ in range(2):
        cancelled = await request(server, "POST", f"{PATH}/{name}/cancel")
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        await tick(3)
    assert output_text((await get(server, name)).json) == "Good"


async def test_one_that_failed_in_the_background_says_why(server: Running) -> None:
    """It left nothing behind but that."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begun(server)
    name = (await asking).json["id"]
    server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="engine_crashed", message="gone"))
    failed = told.response((await get(server, name)).json)
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "gone")


async def test_one_that_failed_is_forgotten(server: Running) -> None:
    """What it goes on from stays; a session that holds nothing else is gone with it."""

    async def failed(**fields: Any) -> str:
        body = {"input": "Hello", "background": True, **fields}
        asking = asyncio.get_running_loop().create_task(post(server, PATH, body))
        (turn,) = await begun(server)
        name = (await asking).json["id"]
        server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="engine_crashed", message="gone"))
        return str(name)

    first = (await made(server, {"input": "Hello"})).json["id"]
    for fields in ({"previous_response_id": first}, {}):
        name = await failed(**fields)
        assert (await get(server, name)).json["status"] == "failed"
        assert (await request(server, "DELETE", f"{PATH}/{name}")).json["deleted"]
        assert (await get(server, name)).status == 404
        assert listed(server) == 1
    assert (await get(server, first)).json["status"] == "completed"


async def test_one_that_others_go_on_from_now_stays(server: Running) -> None:
    """Also when it is the only one that has ended."""
    first = (await made(server, {"input": "Hello"})).json["id"]
    more = {"input": "More", "previous_response_id": first, "background": True}
    await post(server, PATH, more)
    refused = await request(server, "DELETE", f"{PATH}/{first}")
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    assert listed(server) == 1


async def test_a_turn_that_fails_is_an_error(server: Running) -> None:
    """With its own HTTP status, as long as nothing was told."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello"}))
    (turn,) = await begun(server)
    server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="prompt_too_long", message="too long"))
    heard = await asking
    assert (heard.status, heard.error["code"]) == (413, "context_length_exceeded")


async def test_a_response_is_forgotten(server: Running) -> None:
    """The latest of a chain first; with the last one its session is gone."""
    first = (await made(server, {"input": "Hello"})).json
    second = (await made(server, {"input": "More", "previous_response_id": first["id"]})).json
    refused = await request(server, "DELETE", f"{PATH}/{first['id']}")
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    for response, n_left in ((second, 1), (first, 0)):
        gone = await request(server, "DELETE", f"{PATH}/{response['id']}")
        assert gone.json == {"id": response["id"], "object": "response", "deleted": True}
        assert (await get(server, response["id"])).status == 404
        assert listed(server) == n_left


async def test_one_that_runs_is_forgotten(server: Running) -> None:
    """Its turn ends with it."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    await begun(server)
    name = (await asking).json["id"]
    assert (await request(server, "DELETE", f"{PATH}/{name}")).json["deleted"]
    await tick(3)
    assert (server.engine.turns, listed(server)) == ({}, 0)


async def test_whoever_leaves_ends_the_turn(server: Running) -> None:
    """What is stored keeps what was said up to then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"input":"Hello","stream":true}'
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    (turn,) = await begun(server)
    server.engine.say(turn, "Good")
    await reader.readuntil(b"output_text.delta")
    writer.close()
    await left(server)
    (session,) = server.context.sessions.session_ids()
    found = (await get(server, f"resp_{session[2:]}{turn[2:]}")).json
    assert (found["status"], output_text(found)) == ("cancelled", "Good")


@pytest.mark.parametrize("name", ["resp_" + "a" * 44, "resp_x", "nothing", "%00"])
@pytest.mark.parametrize(
    ("method", "more"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
async def test_there_is_no_such_response(server: Running, name: str, method: str, more: str) -> None:
    """Whatever is asked of it."""
    heard = await request(server, method, f"{PATH}/{name}{more}")
    assert (heard.status, heard.error["message"]) == (404, "No such response.")


async def test_others_responses_are_none(server: Running) -> None:
    """Neither read nor gone on from, and told like one that does not exist."""
    first = (await made(server, {"input": "Hello"})).json
    keys = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    heard = await get(server, first["id"], token=None, headers=keys)
    assert (heard.status, heard.error["message"]) == (404, "No such response.")
    body = {"input": "More", "previous_response_id": first["id"]}
    refused = await post(server, PATH, body, token=None, headers=keys)
    assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
    assert refused.error["param"] == "previous_response_id"


async def test_a_response_that_goes_on_cannot_be_gone_on_from(server: Running) -> None:
    """Whoever asks is told to try again."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begun(server)
    name = (await asking).json["id"]
    refused = await post(server, PATH, {"input": "More", "previous_response_id": name})
    assert (refused.status, refused.error["code"]) == (409, "session_busy")
    server.engine.finish(turn)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": "x", "generate": False}, "generate"),
        ({"input": "x", "stream_id": "a"}, "stream_id"),
        ({"input": "x", "temperature": 0.5, "params": {"temperature": 1}}, "params.temperature"),
        ({"input": "x", "params": {"nonsense": 1}}, "params.nonsense"),
        ({"input": "x", "model": "missing"}, "model"),
        ({"input": "x", "tool_choice": "required"}, None),
        ({"input": "x", "instructions": "y" * 300_000}, "instructions"),
    ],
)
async def test_what_is_wrong_is_named_and_leaves_nothing(server: Running, body: Any, param: str | None) -> None:
    """Also where a session had been opened already."""
    heard = await post(server, PATH, body)
    assert 400 <= heard.status < 500
    assert heard.error["param"] == param
    assert listed(server) == 0


@pytest.mark.parametrize("query", ["?stream=true", "?starting_after=3", "?include=x"])
async def test_what_cannot_be_asked_again_is_refused(server: Running, query: str) -> None:
    """A response is read whole."""
    first = (await made(server, {"input": "Hello"})).json
    assert (await get(server, first["id"], query)).status == 400
