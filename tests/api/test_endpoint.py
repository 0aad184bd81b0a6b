"""What holds for every HTTP operation: who is let in, how large and how slow, and how failures are told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from inferencecenter.api import endpoint
from inferencecenter.api.body import LARGE_BYTES, parse
from inferencecenter.api.openai import chat
from inferencecenter.api.openai.chat import check
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.protocol.json_bounds import MAX_STRUCTURE
from tests.api.asking import PATIENCE_S, exchange, post, read_answer, request
from tests.api.streaming import CHAT, HI, chunk_of, gone, next_turn, say, streamed
from tests.server.harness import ask as ask_socket

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.api.openai.chat_schemas import ChatRequest
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.mark.parametrize("token", [None, "ic_aaaaaaaaaaaa_wrong", "nothing"])
async def test_nobody_gets_in_without_a_token(server: Running, token: str | None) -> None:
    """Without a right token there is a 401 that says how to send one."""
    answer = await post(server, CHAT, HI, token=token)
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-should-retry"] == "false"


async def test_too_many_wrong_tokens_are_refused_with_the_right_one_too(serve: Serve) -> None:
    """Failures are limited as those of sockets are, and the answer says when to come again."""
    async with serve(login_attempts_per_minute=1) as server:
        await request(server, "GET", "/v1/models", token="wrong")
        answer = await request(server, "GET", "/v1/models")
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) > 0
    assert int(answer.headers["retry-after-ms"]) > 0


async def test_pages_of_other_origins_are_refused(server: Running) -> None:
    """Origin is checked as it is for sockets."""
    answer = await request(server, "GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert (answer.status, answer.error["param"]) == (403, "Origin")


async def test_a_secret_in_the_address_is_refused(server: Running) -> None:
    """A token in the query is refused, and not repeated."""
    answer = await request(server, "GET", f"/v1/models?token={server.token}")
    assert (answer.status, answer.error["param"]) == (400, "token")
    assert server.token not in answer.body.decode()


async def test_unknown_parameters_of_an_address_are_refused(server: Running) -> None:
    """What stands in a query is obeyed or refused by name."""
    answer = await request(server, "GET", "/v1/models?page=2")
    assert (answer.status, answer.error["param"]) == (400, "page")


async def test_a_method_that_an_address_does_not_take(server: Running) -> None:
    """Other methods get a 405 that names those there are."""
    answer = await request(server, "DELETE", CHAT)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b"{}", "invalid_request"),
    ],
)
async def test_bodies_that_are_none(server: Running, body: bytes, code: str) -> None:
    """What is no JSON object of the right form is refused with a 400."""
    answer = await post(server, CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, code)


async def test_a_body_that_says_it_is_too_large_is_not_read(serve: Serve) -> None:
    """The declared length is enough for a 413."""
    async with serve(max_body_bytes=1024) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}", "content-length: 2000000"]
        answer = await exchange(server.port, "\r\n".join([*lines, "", ""]).encode())
    assert (answer.status, answer.error["code"]) == (413, "message_too_large")


@pytest.mark.parametrize("length", ["content-length: 700", "transfer-encoding: chunked"])
async def test_bodies_share_room(serve: Serve, monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    """What a client has in memory beyond its share is refused, another is let in, and the room is free afterwards."""
    room = FairShare(1024)
    monkeypatch.setattr(endpoint, "FairShare", lambda _: room)
    body = b'{"text": "' + b"x" * 688 + b'"}'
    sent = body if length.startswith("content-length") else b"2bc\r\n" + body + b"\r\n0\r\n\r\n"
    async with serve() as server, asyncio.timeout(PATIENCE_S):

        def asked_by(token: str) -> bytes:
            lines = ["POST /tokenize HTTP/1.1", "host: x", f"authorization: Bearer {token}", length]
            return "\r\n".join([*lines, "connection: close", "", ""]).encode() + sent

        server.accounts.ensure_client("eve", max_sessions=3, priority="normal")
        mine, another = asked_by(server.token), asked_by(server.accounts.create_token("eve").token)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(mine[:-5])
        while room.total < len(body):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        refused = await exchange(server.port, mine)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert (await exchange(server.port, another)).status == 200
        writer.write(mine[-5:])
        assert read_answer(await reader.read()).status == 200
        writer.close()
        assert (await exchange(server.port, mine)).status == 200
    assert room.total == 0


async def test_a_body_that_turns_out_too_large(serve: Serve) -> None:
    """A body in chunks is read up to the limit."""
    async with serve(max_body_bytes=1024) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}"]
        head = "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()
        answer = await exchange(server.port, head + b"800\r\n" + b" " * 2048 + b"\r\n")
    assert (answer.status, answer.error["code"]) == (413, "message_too_large")


async def test_a_body_that_does_not_come(serve: Serve) -> None:
    """A body has its time, then there is a 408."""
    async with serve(body_timeout_s=0.02) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}", "content-length: 9"]
        answer = await exchange(server.port, "\r\n".join([*lines, "", "{"]).encode())
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("path", ["/openapi.json", "/v1/models"])
async def test_a_body_that_an_operation_does_not_take_is_not_read(serve: Serve, path: str) -> None:
    """The answer is there while the body is still to come, whatever its length is said to be."""
    async with serve(max_body_bytes=1024) as server:
        heard = await request(server, "GET", path, headers={"Content-Length": "1000000"})
        assert heard.status == 200


async def test_a_large_body_is_read_off_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is read at once, as a thread would cost more."""
    threads: list[int] = []

    def noting(kind: Any, body: bytes) -> Any:
        threads.append(threading.get_ident())
        return parse(kind, body)

    monkeypatch.setattr(endpoint, "parse", noting)
    for text in ("x", "x" * LARGE_BYTES):
        assert (await post(server, "/tokenize", {"text": text, "nothing": 1})).status == 400
    assert threads[0] == threading.get_ident() != threads[1]


async def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would hold up all others for half a second costs a count of its bytes."""
    monkeypatch.setattr(orjson, "loads", pytest.fail)
    heard = await post(server, "/v1/chat/completions", b'{"messages":[' + b"[]," * MAX_STRUCTURE + b"0]}")
    assert (heard.status, heard.error["code"]) == (413, "message_too_large")


async def test_a_client_has_as_many_requests_as_connections(serve: Serve) -> None:
    """Requests that are being answered count as sockets do; others are told to wait."""
    async with serve(max_connections_per_client=1) as server, streamed(server, HI):
        await next_turn(server)
        answer = await post(server, CHAT, HI)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"


async def test_room_is_there_again_when_a_request_is_over(serve: Serve) -> None:
    """What was counted is counted no more, however a request ends."""
    async with serve(max_connections_per_client=1) as server:
        for _ in range(3):
            async with streamed(server, HI):
                await next_turn(server)
            await gone(server)
        assert (await request(server, "GET", "/v1/models")).status == 200


async def test_requests_are_counted(server: Running) -> None:
    """Metrics tell the requests that run, and answers by address and status."""
    async with streamed(server, HI):
        await next_turn(server)
        page = (await request(server, "GET", "/metrics", token=None)).body.decode()
        assert "inferencecenter_http_requests 1.0" in page
    await gone(server)
    await post(server, CHAT, {})
    page = (await request(server, "GET", "/metrics", token=None)).body.decode()
    assert "inferencecenter_http_requests 0.0" in page
    assert 'inferencecenter_http_responses_total{path="/v1/chat/completions",status="400"} 1.0' in page


async def test_a_daemon_that_stops_lets_answers_end(serve: Serve) -> None:
    """A stream goes on to its end while the daemon drains, and nobody new comes in."""
    async with serve(shutdown_timeout_s=60) as server, streamed(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        assert (await chunk_of(reader))["choices"][0]["delta"]["role"] == "assistant"
        server.listener.stop()
        while not server.context.hub.draining:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        server.engine.say(turn, "lo")
        server.engine.finish(turn)
        rest = await reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"content":"lo"' in rest
        await server.serving


async def test_nobody_new_is_answered_while_the_daemon_drains(server: Running) -> None:
    """On connections that are open already there is a 503."""
    server.context.hub.draining = True
    answer = await post(server, CHAT, HI)
    assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
    assert answer.headers["x-should-retry"] == "true"


async def test_at_the_deadline_a_stream_is_told(server: Running) -> None:
    """An answer that has not ended when the daemon stops ends with an error, and its turn is aborted."""
    async with streamed(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await chunk_of(reader)
        server.listener.stop()
        rest = await reader.read()
    error = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
    assert (error["code"], error["message"]) == ("engine_unavailable", "the daemon stops")
    assert turn not in server.engine.turns


async def test_a_revoked_token_ends_its_streams(server: Running) -> None:
    """Whoever is not let in any more hears nothing more."""
    async with streamed(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await chunk_of(reader)
        server.accounts.revoke(server.token_id)
        server.context.tokens_changed()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"the token was revoked" in rest
        assert b"[DONE]" not in rest
    await gone(server)
    assert turn not in server.engine.turns


async def test_a_token_that_expires_ends_its_streams(server: Running, expiries: list[Callable[[], object]]) -> None:
    """In the middle of an answer its time is over: the last event says so, and the turn is aborted."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with streamed(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await chunk_of(reader)
        (expire,) = expiries
        expire()
        rest = await reader.readuntil(b"0\r\n\r\n")
        error = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert (error["code"], error["message"]) == ("invalid_api_key", "the token has expired")
        assert b"[DONE]" not in rest
    await gone(server)
    assert turn not in server.engine.turns
    assert expiries == []


async def test_a_token_that_expires_before_an_answer_has_begun_is_not_let_in(
    server: Running, expiries: list[Callable[[], object]]
) -> None:
    """Nothing of the stream was sent, so there is a 401."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with streamed(server, HI) as reader:
        await next_turn(server)
        (expire,) = expiries
        expire()
        answer = await reader.readuntil(b"}}")
    assert b"401 Unauthorized" in answer
    assert b"the token has expired" in answer


async def test_an_answer_that_ends_in_time_expires_no_more(
    server: Running, expiries: list[Callable[[], object]]
) -> None:
    """Nothing is left to wait for the time of the token."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    answer, _ = await asyncio.gather(post(server, CHAT, HI), say(server, "Hello"))
    assert answer.status == 200
    await gone(server)
    assert expiries == []


async def test_limits_to_addresses_hold_for_requests(server: Running) -> None:
    """A token that may not come from here any more is cut off in the middle, and not let in again."""
    async with streamed(server, HI) as reader:
        await next_turn(server)
        server.accounts.limit_token(server.token_id, AccessLimits(addresses=("192.0.2.1",)))
        server.context.tokens_changed()
        answer = await reader.readuntil(b"}}")
        assert b"401 Unauthorized" in answer
        assert b"not valid for this address" in answer
    assert (await request(server, "GET", "/v1/models")).status == 401


async def test_an_administrator_ends_requests_too(serve: Serve) -> None:
    """``kick`` counts and ends requests as it does sockets."""
    async with serve() as server, streamed(server, HI) as reader:
        await next_turn(server)
        server.accounts.ensure_client("root", max_sessions=1, priority="normal", scopes=("user", "admin"))
        token = server.accounts.create_token("root").token
        async with server.connect(
            subprotocols=["inferencecenter.v1"], additional_headers={"Authorization": f"Bearer {token}"}
        ) as socket:
            await socket.recv()
            kicked = await ask_socket(socket, op="kick", client_id="ada")
        assert (kicked["op"], kicked["connections"]) == ("kicked", 1)
        assert b"403 Forbidden" in await reader.readuntil(b"}}")


async def test_limits_of_a_token_have_the_time_to_wait(server: Running) -> None:
    """A limit of turns is a 429 with the time after which another may be asked for."""
    server.accounts.limit_token(server.token_id, AccessLimits(requests_per_minute=1))
    first, _ = await asyncio.gather(post(server, CHAT, HI), say(server, "Hello"))
    second = await post(server, CHAT, HI)
    assert (first.status, second.status) == (200, 429)
    assert second.error["code"] == "rate_limit_exceeded"
    assert 50 <= int(second.headers["retry-after"]) <= 61


async def test_a_day_s_quota_ends_an_answer_early(server: Running) -> None:
    """The last tokens of a day are said, and the answer ends as one that is too long; the next request is refused."""
    server.accounts.limit_token(server.token_id, AccessLimits(tokens_per_day=2))
    first, _ = await asyncio.gather(post(server, CHAT, HI), _exhaust(server))
    assert first.json["choices"][0]["finish_reason"] == "length"
    second = await post(server, CHAT, HI)
    assert (second.status, second.error["code"]) == (429, "insufficient_quota")
    assert second.headers["x-should-retry"] == "false"


async def _exhaust(server: Running) -> None:
    turn = await next_turn(server)
    server.engine.begin(turn)
    server.engine.say(turn, "Hello")


async def test_the_trace_of_a_request_goes_on_in_its_turn(server: Running) -> None:
    """``traceparent`` is that of the turn."""
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen: list[Any] = []
    submit = server.engine.submit

    def spy(turn: Any) -> int:
        seen.append(turn.turn.spec.request.traceparent)
        return submit(turn)

    vars(server.engine)["submit"] = spy
    await asyncio.gather(post(server, CHAT, HI, headers={"traceparent": span}), say(server, "Hello"))
    assert seen == [span]


async def test_a_defect_is_an_error_without_details(server: Running) -> None:
    """What nobody thought of is a 500 that tells nothing of the inside."""

    def broken() -> None:
        raise RuntimeError("a secret")

    vars(server.engine)["describe"] = broken
    answer = await request(server, "GET", "/v1/models")
    assert (answer.status, answer.error["code"]) == (500, ErrorCode.INTERNAL.value)
    assert b"secret" not in answer.body


async def test_refusals_of_a_client_are_told_later_and_later(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many in a row, each waits longer than the one before; what is accepted never waits."""
    waited: list[float] = []

    async def noting(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(endpoint, "sleep", noting)
    for _ in range(FREE_REFUSALS):
        assert (await post(server, CHAT, {})).status == 400
    assert waited == []
    for _ in range(3):
        assert (await post(server, CHAT, {})).status == 400
    assert len(waited) == 3
    assert waited == sorted(set(waited))
    assert (await request(server, "GET", "/v1/models")).status == 200
    assert len(waited) == 3


async def test_a_conversation_of_many_messages_is_understood_in_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of messages are made without the event loop; a few are not worth the way there."""
    threads: list[threading.Thread] = []

    def noting(request: ChatRequest) -> None:
        threads.append(threading.current_thread())
        check(request)

    monkeypatch.setattr(chat, "check", noting)
    for n_messages in (1, 1000):
        async with streamed(server, {"messages": [{"role": "user", "content": ""}] * n_messages}):
            await next_turn(server)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
