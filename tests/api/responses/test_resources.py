"""Responses over HTTP: create, stream, retrieve, cancel, delete and continue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.responses.serializers import read_response_id
from inferencecenter.auth.rate_limits import UNIT_CHARS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Failed
from inferencecenter.sessions.archive import ArchiveSize
from inferencecenter.sessions.journal import StorageFault
from tests.api.http_client import post, request, tick
from tests.api.responses import openai_types
from tests.api.responses.helpers import PATH, begin_turns, create_response, frames_of, get, text_of, wait_turns_left
from tests.api.streaming import open_stream
from tests.server.harness import StubJournal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def output_text(response: dict[str, Any]) -> str:
    """Return the text of a response."""
    return openai_types.response(response).output_text


def session_count(server: Running) -> int:
    """Return the number of sessions of the server's client."""
    return server.context.sessions.session_counts("ada")[0]


async def test_response_is_created(server: Running) -> None:
    """The openai package parses it, and it repeats the request."""
    body = {"input": "Hello", "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "store": True}
    answer = await create_response(server, body)
    assert answer.status == 200
    response = openai_types.response(answer.json)
    assert (response.output_text, response.status, response.instructions) == ("Good day", "completed", "Be kind.")
    assert (response.metadata, response.temperature, response.model) == ({"a": "b"}, 0.5, "stub")


async def test_response_streams(server: Running) -> None:
    """The openai package parses every event, and the last has the whole response."""
    frames = frames_of(await create_response(server, {"input": "Hello", "stream": True}, "Good ", "day"))
    for frame in frames:
        openai_types.event(frame)
    assert [frame["delta"] for frame in frames if "delta" in frame] == ["Good ", "day"]
    assert output_text(frames[-1]["response"]) == "Good day"
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


@pytest.mark.parametrize("store", [True, False])
async def test_stream_waiting_for_storage_sends_one_comment(serve: Serve, *, store: bool) -> None:
    """The comment gives the reason on one line and precedes the text; a response that is not stored does not wait."""
    journal = StubJournal()
    async with serve(journal=journal, sse_keepalive_s=0.01) as server:
        journal.holding = True
        async with open_stream(server, {"input": "Hello", "store": store}, PATH) as reader:
            (turn,) = await begin_turns(server)
            journal.fault = StorageFault("the disk\nis full")
            await reader.readuntil(b": storage unavailable: the disk is full\n\n" if store else b": keepalive\n\n")
            server.engine.say(turn, "Good day")
            server.engine.finish(turn)
            journal.fault = None
            journal.run_callbacks()
            rest = await reader.readuntil(b"data: [DONE]")
    assert b"Good day" in rest
    assert store or b"storage" not in rest


async def test_parameters_reach_the_engine(server: Running) -> None:
    """Named fields, ``params``, the text format and the service tier are part of the submission."""
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
    pending = asyncio.get_running_loop().create_task(post(server, PATH, body))
    (turn,) = await begin_turns(server)
    submitted = server.engine.submission(turn)
    for expected in (b'"max_tokens":7', b'"temperature":0.25', b'"top_p":0.5', b'"seed":3', b'"n_probs":2'):
        assert expected in submitted.params_json
    assert submitted.grammar is not None
    assert (submitted.grammar.kind, submitted.priority) == ("json_schema", 2)
    server.engine.finish(turn)
    assert (await pending).json["service_tier"] == "flex"


async def test_response_is_retrieved(server: Running) -> None:
    """It equals the first answer, also in when it was completed; its input items are retrievable too."""
    first = (await create_response(server, {"input": "Hello", "instructions": "Be kind."})).json
    again = (await get(server, first["id"])).json
    assert again == {**first, "completed_at": again["completed_at"]}
    assert first["created_at"] <= again["completed_at"] <= first["completed_at"]  # the turn ends before its events
    second = (await create_response(server, {"input": "And?", "previous_response_id": first["id"]})).json
    items = (await get(server, second["id"], "/input_items?order=asc&limit=2")).json
    assert [item["content"][0]["text"] for item in items["data"]] == ["Hello", "Good day"]
    rest = (await get(server, second["id"], f"/input_items?order=asc&after={items['last_id']}")).json
    assert ([item["role"] for item in rest["data"]], rest["has_more"], items["has_more"]) == (["user"], False, True)
    assert (await get(server, second["id"], "/input_items?after=x")).error["param"] == "after"


@pytest.mark.parametrize("through", ["retrieve", "continue", "conversation"])
async def test_load_of_an_archived_session_counts_by_its_size(
    server: Running, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Otherwise a client could have large sessions read from disk without limit."""
    body: dict[str, Any] = {"input": "a" * UNIT_CHARS * 3}
    if through == "conversation":
        body["conversation"] = (await post(server, "/v1/conversations", {})).json["id"]
    first = (await create_response(server, body)).json
    charged: list[int] = []

    async def load(*_: object, **__: object) -> bool:
        return True

    async def find_tagged(*_: object) -> tuple[str, ...]:
        return (read_response_id(first["id"]).session_id,)

    def charge(_client_id: str, *, n_chars: int = 0, **_: int) -> None:
        charged.append(n_chars)
        if n_chars:
            raise InferenceCenterError(ErrorCode.RATE_LIMITED)

    archive = server.context.sessions.archive
    monkeypatch.setattr(archive, "load", load)
    monkeypatch.setattr(archive, "find_tagged", find_tagged)
    monkeypatch.setattr(server.context.operations, "charge", charge)
    if through == "retrieve":
        response = await get(server, first["id"])
    elif through == "continue":
        response = await post(server, PATH, {"input": "More", "previous_response_id": first["id"]})
    else:
        monkeypatch.setattr(server.context.sessions, "tagged", lambda *_: {})
        response = await post(server, PATH, {"input": "More", "conversation": body["conversation"]})
    assert (response.status, response.error["code"]) == (429, "rate_limit_exceeded")
    assert max(charged) > UNIT_CHARS * 3


async def test_search_for_an_archived_conversation_counts_by_the_archive(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata of all archived sessions of the client is read, so that a large archive costs more operations."""
    charged: list[int] = []
    archive = server.context.sessions.archive
    monkeypatch.setattr(archive, "size_of", lambda _client_id: ArchiveSize(n_sessions=52_000))
    monkeypatch.setattr(
        server.context.operations, "charge", lambda _client_id, *, n_units=1, **_: charged.append(n_units)
    )
    assert (await request(server, "GET", "/v1/conversations/conv_" + "a" * 22)).status == 404
    assert 10 in charged


async def test_continuation_reuses_the_session(server: Running) -> None:
    """With the same instructions and the last response of a session, the engine receives only the new input."""
    body = {"instructions": "Be kind."}
    first = (await create_response(server, {"input": "Hello", **body})).json
    second = (await create_response(server, {"input": "More", "previous_response_id": first["id"], **body})).json
    assert first["id"][:27] == second["id"][:27]
    assert session_count(server) == 1
    assert second["previous_response_id"] == first["id"]


async def test_two_continuations_of_one_response_are_separate(server: Running) -> None:
    """The second continues in a new session with the same prefix."""
    first = (await create_response(server, {"input": "Hello"})).json
    names = set()
    for _ in range(2):
        names.add(
            (await create_response(server, {"input": "More", "previous_response_id": first["id"]})).json["id"][:27]
        )
    assert len(names) == session_count(server) == 2


async def test_new_instructions_replace_the_old_ones(server: Running) -> None:
    """The conversation is rendered again below them; the previous instructions are not carried over."""
    first = (await create_response(server, {"input": "Hello", "instructions": "Be kind."})).json
    pending = asyncio.get_running_loop().create_task(
        post(server, PATH, {"input": "More", "instructions": "Be rude.", "previous_response_id": first["id"]})
    )
    (turn,) = await begin_turns(server)
    read = text_of(server.engine.submission(turn))
    assert "Be rude." in read
    assert "Be kind." not in read
    assert [part in read for part in ("Hello", "Good day", "More")] == [True] * 3
    server.engine.finish(turn)
    assert (await pending).json["id"][:27] != first["id"][:27]


async def test_function_output_continues_a_response(server: Running) -> None:
    """The request has ``previous_response_id`` or the whole input; calls are matched by id."""
    items = [
        {"role": "user", "content": "Look!"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
    ]
    answer = await create_response(server, {"input": items, "tools": [TOOL]}, "A tree.")
    assert output_text(answer.json) == "A tree."
    found = (await get(server, answer.json["id"], "/input_items?order=asc")).json["data"]
    assert [item["type"] for item in found] == ["message", "function_call", "function_call_output"]


async def test_unstored_response_is_not_listed(server: Running) -> None:
    """It can be continued for a limited time."""
    first = (await create_response(server, {"input": "Hello", "store": False})).json
    assert session_count(server) == 0
    second = (
        await create_response(server, {"input": "More", "store": False, "previous_response_id": first["id"]})
    ).json
    assert second["id"][:27] == first["id"][:27]
    third = (await create_response(server, {"input": "More", "previous_response_id": first["id"]})).json
    assert (third["store"], session_count(server)) == (True, 1)


async def test_background_response_completes(server: Running) -> None:
    """The request returns at once with status queued, and the response completes later."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    queued = (await pending).json
    assert (queued["status"], queued["background"]) == ("queued", True)
    assert (await get(server, queued["id"])).json["status"] == "in_progress"
    server.engine.say(turn, "Good day")
    server.engine.finish(turn)
    done = (await get(server, queued["id"])).json
    assert (done["status"], output_text(done)) == ("completed", "Good day")


async def test_background_response_is_cancelled(server: Running) -> None:
    """It keeps its text, and cancelling again returns the same."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    name = (await pending).json["id"]
    server.engine.say(turn, "Good")
    for _ in range(2):
        cancelled = await request(server, "POST", f"{PATH}/{name}/cancel")
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        await tick(3)
    assert output_text((await get(server, name)).json) == "Good"


async def test_failed_background_response_reports_its_error(server: Running) -> None:
    """Nothing but the error is kept."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    name = (await pending).json["id"]
    server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="engine_crashed", message="gone"))
    failed = openai_types.response((await get(server, name)).json)
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "gone")


async def test_failed_response_is_deleted(server: Running) -> None:
    """The continued response stays; a session without anything else is deleted too."""

    async def failed(**fields: Any) -> str:
        body = {"input": "Hello", "background": True, **fields}
        pending = asyncio.get_running_loop().create_task(post(server, PATH, body))
        (turn,) = await begin_turns(server)
        name = (await pending).json["id"]
        server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="engine_crashed", message="gone"))
        return str(name)

    first = (await create_response(server, {"input": "Hello"})).json["id"]
    for fields in ({"previous_response_id": first}, {}):
        name = await failed(**fields)
        assert (await get(server, name)).json["status"] == "failed"
        assert (await request(server, "DELETE", f"{PATH}/{name}")).json["deleted"]
        assert (await get(server, name)).status == 404
        assert session_count(server) == 1
    assert (await get(server, first)).json["status"] == "completed"


async def test_response_with_a_running_successor_is_not_deleted(server: Running) -> None:
    """This holds even if it is the only ended response of its session."""
    first = (await create_response(server, {"input": "Hello"})).json["id"]
    more = {"input": "More", "previous_response_id": first, "background": True}
    await post(server, PATH, more)
    refused = await request(server, "DELETE", f"{PATH}/{first}")
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    assert session_count(server) == 1


async def test_failed_turn_is_an_http_error(server: Running) -> None:
    """It has its own HTTP status as long as nothing was sent."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello"}))
    (turn,) = await begin_turns(server)
    server.engine.turns.pop(turn).on_engine_event(Failed(turn_id=turn, code="prompt_too_long", message="too long"))
    answer = await pending
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_response_is_deleted(server: Running) -> None:
    """Only the last response of a chain can be deleted; the session is deleted with its only response."""
    first = (await create_response(server, {"input": "Hello"})).json
    second = (await create_response(server, {"input": "More", "previous_response_id": first["id"]})).json
    refused = await request(server, "DELETE", f"{PATH}/{first['id']}")
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    for response, n_left in ((second, 1), (first, 0)):
        deleted = await request(server, "DELETE", f"{PATH}/{response['id']}")
        assert deleted.json == {"id": response["id"], "object": "response", "deleted": True}
        assert (await get(server, response["id"])).status == 404
        assert session_count(server) == n_left


async def test_deleting_a_running_response_aborts_it(server: Running) -> None:
    """Its turn ends with it."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    await begin_turns(server)
    name = (await pending).json["id"]
    assert (await request(server, "DELETE", f"{PATH}/{name}")).json["deleted"]
    await tick(3)
    assert (server.engine.turns, session_count(server)) == ({}, 0)


async def test_disconnect_aborts_the_turn(server: Running) -> None:
    """A stored response keeps the text so far."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"input":"Hello","stream":true}'
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    (turn,) = await begin_turns(server)
    server.engine.say(turn, "Good")
    await reader.readuntil(b"output_text.delta")
    writer.close()
    await wait_turns_left(server)
    (session,) = server.context.sessions.session_ids()
    found = (await get(server, f"resp_{session[2:]}{turn[2:]}")).json
    assert (found["status"], output_text(found)) == ("cancelled", "Good")


@pytest.mark.parametrize("name", ["resp_" + "a" * 44, "resp_x", "nothing", "%00"])
@pytest.mark.parametrize(
    ("method", "more"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
async def test_unknown_response_is_not_found(server: Running, name: str, method: str, more: str) -> None:
    """Every operation answers 404."""
    answer = await request(server, method, f"{PATH}/{name}{more}")
    assert (answer.status, answer.error["message"]) == (404, "No such response.")


async def test_response_of_another_client_is_not_found(server: Running) -> None:
    """It can be neither read nor continued, and the error equals that of an unknown id."""
    first = (await create_response(server, {"input": "Hello"})).json
    keys = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    answer = await get(server, first["id"], token=None, headers=keys)
    assert (answer.status, answer.error["message"]) == (404, "No such response.")
    body = {"input": "More", "previous_response_id": first["id"]}
    refused = await post(server, PATH, body, token=None, headers=keys)
    assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
    assert refused.error["param"] == "previous_response_id"


async def test_continuing_a_running_response_is_refused(server: Running) -> None:
    """The error asks the client to retry."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, {"input": "Hello", "background": True}))
    (turn,) = await begin_turns(server)
    name = (await pending).json["id"]
    refused = await post(server, PATH, {"input": "More", "previous_response_id": name})
    assert (refused.status, refused.error["code"]) == (409, "session_busy")
    server.engine.finish(turn)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": "x", "temperature": 0.5, "params": {"temperature": 1}}, "params.temperature"),
        ({"input": "x", "params": {"nonsense": 1}}, "params.nonsense"),
        ({"input": "x", "model": "missing"}, "model"),
        ({"input": "x", "tool_choice": "required"}, None),
        ({"input": "x", "instructions": "y" * 300_000}, "instructions"),
    ],
)
async def test_invalid_request_is_refused_and_leaves_no_session(server: Running, body: Any, param: str | None) -> None:
    """The error names the field, also if a session had been opened."""
    answer = await post(server, PATH, body)
    assert 400 <= answer.status < 500
    assert answer.error["param"] == param
    assert session_count(server) == 0


@pytest.mark.parametrize("query", ["?stream=true"])
async def test_unsupported_query_is_refused(server: Running, query: str) -> None:
    """A response is only retrieved whole."""
    first = (await create_response(server, {"input": "Hello"})).json
    assert (await get(server, first["id"], query)).status == 400


async def test_response_that_is_not_stored_is_continued_and_not_retrieved(server: Running) -> None:
    """OpenAI does the same; a stored response that continues it can be retrieved."""
    first = (await create_response(server, {"input": "Hello", "store": False})).json
    assert (await get(server, first["id"])).status == 404
    assert (await get(server, f"{first['id']}/input_items")).status == 404
    second = (await create_response(server, {"input": "More", "previous_response_id": first["id"]})).json
    found = await get(server, second["id"])
    assert (found.status, found.json["output"]) == (200, second["output"])
