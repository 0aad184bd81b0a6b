"""Responses and conversations belong to one client: to any other they do not exist, whatever it asks of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.http_client import HttpResponse, post, request
from tests.api.responses.helpers import PATH, begin_turns, create_response, get, receive, send, socket

if TYPE_CHECKING:
    from tests.server.harness import Running

CONVERSATIONS = "/v1/conversations"
UNKNOWN_RESPONSE = f"resp_{'a' * 22}_1"
UNKNOWN_CONVERSATION = f"conv_{'a' * 22}"
UNKNOWN_ITEM = "msg_1"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def bob(server: Running) -> str:
    """The token of a client that owns nothing."""
    server.accounts.ensure_client("bob", max_sessions=8, priority="normal")
    return server.accounts.create_token("bob", name="test").token


async def asked(server: Running, token: str, method: str, path: str, body: Any = None) -> HttpResponse:
    """Return the response to a request; another one before it is accepted, since refusals in a row are delayed."""
    assert (await request(server, "GET", "/v1/models", token=token)).status == 200
    return await request(server, method, path, body=body, token=token)


async def finished(server: Running) -> dict[str, Any]:
    """Return a response of ada that has ended."""
    name = (await create_response(server, {"input": "Hello"})).json["id"]
    found: dict[str, Any] = (await get(server, name)).json
    return found


async def conversation(server: Running) -> tuple[str, str]:
    """Return the ids of a conversation of ada and of an item in it."""
    said = [{"type": "message", "role": "user", "content": "Hi"}]
    name = (await post(server, CONVERSATIONS, {"items": said})).json["id"]
    (item,) = (await request(server, "GET", f"{CONVERSATIONS}/{name}/items")).json["data"]
    return name, item["id"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"{PATH}/{{id}}", None),
        ("GET", f"{PATH}/{{id}}?stream=true", None),
        ("GET", f"{PATH}/{{id}}?stream=true&starting_after=1", None),
        ("GET", f"{PATH}/{{id}}/input_items", None),
        ("DELETE", f"{PATH}/{{id}}", None),
        ("POST", f"{PATH}/{{id}}/cancel", None),
        ("POST", PATH, {"input": "More", "previous_response_id": "{id}"}),
        ("POST", PATH, {"input": "More", "previous_response_id": "{id}", "background": True}),
        ("POST", PATH, {"input": "More", "previous_response_id": "{id}", "stream": True}),
        ("POST", f"{PATH}/compact", {"model": "stub", "input": "More", "previous_response_id": "{id}"}),
        ("POST", f"{PATH}/input_tokens", {"model": "stub", "input": "More", "previous_response_id": "{id}"}),
    ],
)
async def test_response_does_not_exist_for_another_client(
    server: Running, bob: str, method: str, path: str, body: Any
) -> None:
    """The answer is that for an id that no client has, and the owner reads the response as before."""
    answer = await finished(server)
    refusals = [
        await asked(server, bob, method, path.format(id=name), _named(body, name))
        for name in (answer["id"], UNKNOWN_RESPONSE)
    ]
    first, second = ((each.status, _hidden(each.json, answer["id"])) for each in refusals)
    assert first == second
    assert first[0] in (400, 404)
    assert (await get(server, answer["id"])).json == answer
    assert server.engine.turns == {}


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_running_response_is_not_ended_by_another_client(server: Running, bob: str, method: str) -> None:
    """It can neither delete nor cancel it; the owner gets the whole text."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    name = (await pending).json["id"]
    refused = await asked(server, bob, method, f"{PATH}/{name}{'/cancel' if method == 'POST' else ''}")
    assert (refused.status, refused.error["message"]) == (404, "No such response.")
    server.engine.say(turn, "Good day")
    server.engine.finish(turn)
    found = (await get(server, name)).json
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "Good day")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"{CONVERSATIONS}/{{id}}", None),
        ("POST", f"{CONVERSATIONS}/{{id}}", {"metadata": {"topic": "stolen"}}),
        ("DELETE", f"{CONVERSATIONS}/{{id}}", None),
        ("GET", f"{CONVERSATIONS}/{{id}}/items", None),
        ("POST", f"{CONVERSATIONS}/{{id}}/items", {"items": [{"role": "user", "content": "Ha"}]}),
        ("GET", f"{CONVERSATIONS}/{{id}}/items/{{item}}", None),
        ("DELETE", f"{CONVERSATIONS}/{{id}}/items/{{item}}", None),
        ("POST", PATH, {"input": "More", "conversation": "{id}"}),
        ("POST", PATH, {"input": "More", "conversation": {"id": "{id}"}}),
        ("POST", f"{PATH}/input_tokens", {"model": "stub", "input": "More", "conversation": "{id}"}),
    ],
)
async def test_conversation_does_not_exist_for_another_client(
    server: Running, bob: str, method: str, path: str, body: Any
) -> None:
    """The answer is that for an id that no client has, and the owner finds everything as before."""
    name, item = await conversation(server)
    refusals = [
        await asked(server, bob, method, path.format(id=each, item=item), _named(body, each))
        for each in (name, UNKNOWN_CONVERSATION)
    ]
    first, second = ((each.status, _hidden(each.json, name)) for each in refusals)
    assert first == second
    assert first[0] == 404
    kept = (await request(server, "GET", f"{CONVERSATIONS}/{name}")).json
    items = (await request(server, "GET", f"{CONVERSATIONS}/{name}/items")).json["data"]
    assert (kept["metadata"], [each["id"] for each in items]) == ({}, [item])
    assert server.engine.turns == {}


async def test_socket_of_another_client_continues_nothing(server: Running, bob: str) -> None:
    """It continues neither a response nor a conversation, and cancels no response."""
    answer = await finished(server)
    name, _ = await conversation(server)
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    running = (await pending).json["id"]
    async with socket(server, token=bob) as connection:
        await send(connection, input="More", previous_response_id=answer["id"])
        assert (await receive(connection, *ENDS))["error"]["code"] == "previous_response_not_found"
        await send(connection, input="More", conversation=name)
        assert (await receive(connection, *ENDS))["type"] == "error"
        await send(connection, "response.cancel", response_id=running)
        assert (await receive(connection, *ENDS))["type"] == "error"
    assert list(server.engine.turns) == [turn]
    server.engine.finish(turn)
    assert (await get(server, running)).json["status"] == "completed"


def _named(body: Any, name: str) -> Any:
    """Return a body with the id in the place of ``{id}``."""
    if isinstance(body, dict):
        return {key: _named(value, name) for key, value in body.items()}
    return name if body == "{id}" else body


def _hidden(answer: Any, name: str) -> str:
    """Return an answer as text without the id."""
    text = str(answer)
    for each in (name, UNKNOWN_RESPONSE, UNKNOWN_CONVERSATION):
        text = text.replace(each, "…")
    return text
