"""Behavior of every HTTP endpoint: authentication, size and time limits, and error responses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from inferencecenter.api import endpoint, request_context
from inferencecenter.api.body import LARGE_BYTES, parse
from inferencecenter.api.openai import chat
from inferencecenter.api.openai.chat import check
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.protocol.codec import MAX_STRUCTURE
from inferencecenter.server.context import ServerContext
from tests.api.http_client import TIMEOUT_S, exchange, parse_response, post, request
from tests.api.streaming import CHAT, HI, next_chunk, next_turn, open_stream, requests_done, send_answer
from tests.server.harness import ask as ask_socket

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.api.openai.chat_schemas import ChatRequest
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.mark.parametrize("token", [None, "ic_aaaaaaaaaaaa_wrong", "nothing"])
async def test_token_is_required(server: Running, token: str | None) -> None:
    """Without a valid token the status is 401 with the expected scheme."""
    answer = await post(server, CHAT, HI, token=token)
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-should-retry"] == "false"


async def test_too_many_failures_lock_out_valid_tokens_too(serve: Serve) -> None:
    """Failures are limited as on sockets, and the response has the retry delay."""
    async with serve(login_attempts_per_minute=1) as server:
        await request(server, "GET", "/v1/models", token="wrong")
        answer = await request(server, "GET", "/v1/models")
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) > 0
    assert int(answer.headers["retry-after-ms"]) > 0


async def test_pages_of_other_origins_are_refused(server: Running) -> None:
    """Origin is checked as for sockets."""
    answer = await request(server, "GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert (answer.status, answer.error["param"]) == (403, "Origin")


async def test_secret_in_query_is_refused(server: Running) -> None:
    """A token in the query is refused and not repeated."""
    answer = await request(server, "GET", f"/v1/models?token={server.token}")
    assert (answer.status, answer.error["param"]) == (400, "token")
    assert server.token not in answer.body.decode()


FOREIGN = ["/v1/models", "/v1/models/stub", "/props", "/slots", "/api/tags", "/api/ps", "/api/version"]


@pytest.mark.parametrize("path", FOREIGN)
async def test_unknown_query_parameter_of_a_foreign_dialect_has_no_effect(server: Running, path: str) -> None:
    """It is named, as a field of a body is."""
    answer = await request(server, "GET", f"{path}?api-version=2024-10-21")
    warning = "api-version has no effect: the field is unknown"
    assert (answer.status, answer.headers["x-warning"]) == (200, warning)


async def test_unknown_query_parameter_of_a_post_has_no_effect(server: Running) -> None:
    """Clients of Azure send one with each request."""
    answer, _ = await asyncio.gather(post(server, f"{CHAT}?api-version=1", HI), send_answer(server, "Hello"))
    assert (answer.status, answer.json["warnings"]) == (200, ["api-version has no effect: the field is unknown"])


@pytest.mark.parametrize("path", FOREIGN)
async def test_strict_dialects_refuse_unknown_query_parameters(
    serve: Callable[..., AbstractAsyncContextManager[Running]], path: str
) -> None:
    """The status is 400, and the error names the parameter."""
    async with serve(strict_dialects=True) as server:
        answer = await request(server, "GET", f"{path}?page=2")
    assert answer.status == 400
    assert "page" in answer.body.decode()


async def test_unknown_query_parameters_of_the_own_api_are_refused(server: Running) -> None:
    """Each query parameter is applied or refused by name."""
    answer = await request(server, "GET", "/openapi.json?page=2")
    assert (answer.status, answer.error["param"]) == (400, "page")


async def test_unsupported_method_is_405(server: Running) -> None:
    """The response lists the allowed methods."""
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
async def test_invalid_body_is_400(server: Running, body: bytes, code: str) -> None:
    """Anything but a JSON object of the right schema is refused."""
    answer = await post(server, CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, code)


async def test_declared_oversized_body_is_not_read(serve: Serve) -> None:
    """The declared length alone causes a 413."""
    async with serve(max_body_bytes=1024) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}", "content-length: 2000000"]
        answer = await exchange(server.port, "\r\n".join([*lines, "", ""]).encode())
    assert (answer.status, answer.error["code"]) == (413, "message_too_large")


@pytest.mark.parametrize("length", ["content-length: 700", "transfer-encoding: chunked"])
async def test_body_memory_is_shared_by_clients(serve: Serve, monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    """Bodies beyond a client's share are refused, other clients are served, and the memory is released."""
    body_share = FairShare(1024)
    monkeypatch.setattr(endpoint, "FairShare", lambda _: body_share)
    body = b'{"text": "' + b"x" * 688 + b'"}'
    sent = body if length.startswith("content-length") else b"2bc\r\n" + body + b"\r\n0\r\n\r\n"
    async with serve() as server, asyncio.timeout(TIMEOUT_S):

        def asked_by(token: str) -> bytes:
            lines = ["POST /tokenize HTTP/1.1", "host: x", f"authorization: Bearer {token}", length]
            return "\r\n".join([*lines, "connection: close", "", ""]).encode() + sent

        server.accounts.ensure_client("eve", max_sessions=3, priority="normal")
        mine, another = asked_by(server.token), asked_by(server.accounts.create_token("eve").token)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(mine[:-5])
        while body_share.total < len(body):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        refused = await exchange(server.port, mine)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert (await exchange(server.port, another)).status == 200
        writer.write(mine[-5:])
        assert parse_response(await reader.read()).status == 200
        writer.close()
        assert (await exchange(server.port, mine)).status == 200
    assert body_share.total == 0


async def test_chunked_body_is_read_up_to_the_limit(serve: Serve) -> None:
    """A chunked body above the limit is refused."""
    async with serve(max_body_bytes=1024) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}"]
        head = "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()
        answer = await exchange(server.port, head + b"800\r\n" + b" " * 2048 + b"\r\n")
    assert (answer.status, answer.error["code"]) == (413, "message_too_large")


async def test_slow_body_times_out(serve: Serve) -> None:
    """A body that does not arrive in time is a 408."""
    async with serve(body_timeout_s=0.02) as server:
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {server.token}", "content-length: 9"]
        answer = await exchange(server.port, "\r\n".join([*lines, "", "{"]).encode())
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("path", ["/openapi.json", "/v1/models"])
async def test_unexpected_body_is_not_read(serve: Serve, path: str) -> None:
    """The answer is sent while the body is outstanding, whatever its declared length."""
    async with serve(max_body_bytes=1024) as server:
        response = await request(server, "GET", path, headers={"Content-Length": "1000000"})
        assert response.status == 200


async def test_large_body_is_parsed_off_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is parsed on the loop, where a thread would cost more."""
    threads: list[int] = []

    def noting(kind: Any, body: bytes, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(kind, body, **options)

    monkeypatch.setattr(endpoint, "parse", noting)
    large: list[object] = ["x" * LARGE_BYTES, [{}] * 256, [0] * 2049]
    for nothing in (1, *large):
        assert (await post(server, "/tokenize", {"text": "x", "nothing": nothing})).status == 400
    assert threads[0] == threading.get_ident()
    assert threading.get_ident() not in threads[1:]


async def test_body_of_too_many_values_is_refused_before_parsing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting bytes avoids a parse that would block the event loop."""
    monkeypatch.setattr(orjson, "loads", pytest.fail)
    response = await post(server, "/v1/chat/completions", b'{"messages":[' + b"[]," * MAX_STRUCTURE + b"0]}")
    assert (response.status, response.error["code"]) == (413, "message_too_large")


async def test_requests_count_as_connections_of_the_client(serve: Serve) -> None:
    """Running requests count as sockets do, and further ones are refused with a retry delay."""
    async with serve(max_connections_per_client=1) as server, open_stream(server, HI):
        await next_turn(server)
        answer = await post(server, CHAT, HI)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"


async def test_connection_slot_is_released_after_each_request(serve: Serve) -> None:
    """It is released whichever way the request ends."""
    async with serve(max_connections_per_client=1) as server:
        for _ in range(3):
            async with open_stream(server, HI):
                await next_turn(server)
            await requests_done(server)
        assert (await request(server, "GET", "/v1/models")).status == 200


async def test_requests_are_counted(server: Running) -> None:
    """Metrics report running requests, and responses by path and status."""
    async with open_stream(server, HI):
        await next_turn(server)
        page = (await request(server, "GET", "/metrics", token=None)).body.decode()
        assert "inferencecenter_http_requests 1.0" in page
    await requests_done(server)
    await post(server, CHAT, {})
    page = (await request(server, "GET", "/metrics", token=None)).body.decode()
    assert "inferencecenter_http_requests 0.0" in page
    assert 'inferencecenter_http_responses_total{path="/v1/chat/completions",status="400"} 1.0' in page


async def test_drain_lets_running_streams_finish(serve: Serve) -> None:
    """A stream runs to its end while the daemon drains, and new connections are refused."""
    async with serve(shutdown_timeout_s=60) as server, open_stream(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        assert (await next_chunk(reader))["choices"][0]["delta"]["role"] == "assistant"
        server.listener.stop()
        while not server.context.hub.draining:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        server.engine.say(turn, "lo")
        server.engine.finish(turn)
        rest = await reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"content":"lo"' in rest
        await server.serving


async def test_draining_daemon_answers_503(server: Running) -> None:
    """Requests on open connections are refused, too."""
    server.context.hub.draining = True
    answer = await post(server, CHAT, HI)
    assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
    assert answer.headers["x-should-retry"] == "true"


async def test_stream_past_the_drain_deadline_ends_with_an_error(server: Running) -> None:
    """The last event is an error, and the turn is aborted."""
    async with open_stream(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await next_chunk(reader)
        server.listener.stop()
        rest = await reader.read()
    error = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
    assert (error["code"], error["message"]) == ("engine_unavailable", "the daemon stops")
    assert turn not in server.engine.turns


async def test_revoked_token_ends_its_streams(server: Running) -> None:
    """The client receives nothing more."""
    async with open_stream(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await next_chunk(reader)
        server.accounts.revoke(server.token_id)
        server.context.tokens_changed()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"the token was revoked" in rest
        assert b"[DONE]" not in rest
    await requests_done(server)
    assert turn not in server.engine.turns


async def test_token_expiry_ends_its_streams(server: Running, expiries: list[Callable[[], object]]) -> None:
    """The last event reports the expiry, and the turn is aborted."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with open_stream(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await next_chunk(reader)
        (expire,) = expiries
        expire()
        rest = await reader.readuntil(b"0\r\n\r\n")
        error = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert (error["code"], error["message"]) == ("invalid_api_key", "the token has expired")
        assert b"[DONE]" not in rest
    await requests_done(server)
    assert turn not in server.engine.turns
    assert expiries == []


async def test_token_expiry_before_the_response_starts_is_401(
    server: Running, expiries: list[Callable[[], object]]
) -> None:
    """No part of the stream was sent."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with open_stream(server, HI) as reader:
        await next_turn(server)
        (expire,) = expiries
        expire()
        answer = await reader.readuntil(b"}}")
    assert b"401 Unauthorized" in answer
    assert b"the token has expired" in answer


async def test_expiry_timer_is_cancelled_with_the_response(
    server: Running, expiries: list[Callable[[], object]]
) -> None:
    """No timer remains after the response."""
    server.token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    answer, _ = await asyncio.gather(post(server, CHAT, HI), send_answer(server, "Hello"))
    assert answer.status == 200
    await requests_done(server)
    assert expiries == []


async def test_address_limits_apply_to_requests(server: Running) -> None:
    """A token whose address is no longer allowed is cut off and refused."""
    async with open_stream(server, HI) as reader:
        await next_turn(server)
        server.accounts.limit_token(server.token_id, AccessLimits(addresses=("192.0.2.1",)))
        server.context.tokens_changed()
        answer = await reader.readuntil(b"}}")
        assert b"401 Unauthorized" in answer
        assert b"not valid for this address" in answer
    assert (await request(server, "GET", "/v1/models")).status == 401


async def test_kick_ends_requests(serve: Serve) -> None:
    """``kick`` counts and ends requests like sockets."""
    async with serve() as server, open_stream(server, HI) as reader:
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


async def test_turn_rate_limit_has_a_retry_delay(server: Running) -> None:
    """An exceeded turn limit is a 429 with ``retry-after``."""
    server.accounts.limit_token(server.token_id, AccessLimits(requests_per_minute=1))
    first, _ = await asyncio.gather(post(server, CHAT, HI), send_answer(server, "Hello"))
    second = await post(server, CHAT, HI)
    assert (first.status, second.status) == (200, 429)
    assert second.error["code"] == "rate_limit_exceeded"
    assert 50 <= int(second.headers["retry-after"]) <= 61


async def test_exhausted_daily_quota_ends_the_answer(server: Running) -> None:
    """The answer ends with ``length``, and the next request is refused."""
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


async def test_trace_context_reaches_the_turn(server: Running) -> None:
    """The turn has the ``traceparent`` of the request."""
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen: list[Any] = []
    submit = server.engine.submit

    def spy(turn: Any) -> int:
        seen.append(turn.turn.spec.request.traceparent)
        return submit(turn)

    vars(server.engine)["submit"] = spy
    await asyncio.gather(post(server, CHAT, HI, headers={"traceparent": span}), send_answer(server, "Hello"))
    assert seen == [span]


async def test_internal_error_has_no_details(server: Running) -> None:
    """A defect is a 500 that reveals nothing internal."""

    def broken() -> None:
        raise RuntimeError("a secret")

    vars(server.engine)["describe"] = broken
    answer = await request(server, "GET", "/v1/models")
    assert (answer.status, answer.error["code"]) == (500, ErrorCode.INTERNAL.value)
    assert b"secret" not in answer.body


async def test_repeated_refusals_are_delayed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal after the first ones waits longer; accepted requests never wait."""
    waited: list[float] = []

    async def noting(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(request_context, "sleep", noting)
    for _ in range(FREE_REFUSALS):
        assert (await post(server, CHAT, {})).status == 400
    assert waited == []
    for _ in range(3):
        assert (await post(server, CHAT, {})).status == 400
    assert len(waited) == 3
    assert waited == sorted(set(waited))
    assert (await request(server, "GET", "/v1/models")).status == 200
    assert len(waited) == 3


async def test_refusals_for_the_operation_budget_are_delayed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on asking beyond its budget waits longer each time, as after any other refusal."""
    waited: list[float] = []

    async def noting(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(request_context, "sleep", noting)
    async with serve(operations_per_minute=1) as server:
        assert (await request(server, "GET", "/v1/models")).status == 200
        for _ in range(FREE_REFUSALS + 3):
            assert (await request(server, "GET", "/v1/models")).status == 429
    assert len(waited) == 3
    assert waited == sorted(set(waited))


async def test_large_response_counts_until_it_is_read(server: Running) -> None:
    """Its client can have no more of them in memory than requests at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    body = json.dumps({"text": "x" * 1_000_000, "with_pieces": True}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    begun = await asyncio.wait_for(reader.readexactly(100), 60)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(server.context.hub.participants) == 1
    assert begun.startswith(b"HTTP/1.1 200")
    while await reader.read(2**20):
        pass
    writer.close()
    await requests_done(server)


async def test_operations_are_paced_and_turns_are_not(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP reads are delayed as those over a socket while turns of other clients run."""
    waited: list[float] = []

    async def noting(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(endpoint, "sleep", noting)
    monkeypatch.setattr(ServerContext, "operation_delay_s", lambda _context, _client_id: 7.0)
    async with serve() as server:
        assert (await request(server, "GET", "/v1/models")).status == 200
        assert waited == [7.0]
        await request(server, "POST", "/v1/chat/completions", body={"messages": []})
        assert waited == [7.0]


async def test_long_conversation_is_mapped_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of messages are mapped off the event loop, a few on it."""
    threads: list[threading.Thread] = []

    def noting(request: ChatRequest) -> None:
        threads.append(threading.current_thread())
        check(request)

    monkeypatch.setattr(chat, "check", noting)
    for n_messages in (1, 1000):
        async with open_stream(server, {"messages": [{"role": "user", "content": ""}] * n_messages}):
            await next_turn(server)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
