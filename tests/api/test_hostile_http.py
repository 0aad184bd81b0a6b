"""Hostile HTTP requests: oversized, slow and malformed input ends in an error and leaves no state.

``tests/server/test_http.py`` covers connections before a request.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING

import pytest
import structlog

from inferencecenter.api.operations import OPERATIONS
from tests.api.http_client import exchange, parse_response, post, request, tick

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

SOON_S = 60.0
WHOLE = b'{"text": "a"}'


def head(server: Running, *lines: str, path: str = "/tokenize") -> bytes:
    """Return the head of a request with a body."""
    first = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {server.token}", *lines, "", "")
    return "\r\n".join(first).encode()


async def assert_server_works(server: Running) -> None:
    """Check that the server still answers and that no state is left."""
    assert (await post(server, "/tokenize", {"text": "a"})).json["tokens"] == [97]
    async with asyncio.timeout(SOON_S):
        while server.listener.server_state.tasks or len(server.listener.limiter):
            await tick()
    assert not server.engine.turns


async def test_slow_body_is_not_awaited(serve: Serve) -> None:
    """A stalled or dripping body is a 408 after its time limit, and the connection closes."""
    async with serve(body_timeout_s=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head(server, "Content-Length: 1000000"))
        answered = asyncio.get_running_loop().create_task(reader.read())
        while not answered.done():
            writer.write(b" ")
            await asyncio.wait([answered], timeout=0.01)
        writer.close()
        heard = parse_response(await answered)
        assert (heard.status, heard.error["code"]) == (408, "request_timeout")
        await assert_server_works(server)


@pytest.mark.parametrize(
    "framing",
    [
        ("Content-Length: 99999999999999999999",),
        ("Content-Length: 9999999",),
        ("Content-Length: 9999999", "Expect: 100-continue"),
        ("Transfer-Encoding: chunked",),
    ],
)
async def test_oversized_body_is_refused_before_it_is_read(serve: Serve, framing: tuple[str, ...]) -> None:
    """It is refused by its declared length, or once it exceeds the limit."""
    async with serve(max_body_bytes=2048) as server:
        chunks = b"400\r\n" + b" " * 1024 + b"\r\n"
        sent = head(server, *framing) + (chunks * 10 if "chunked" in framing[0] else b"")
        heard = await exchange(server.port, sent)
        assert (heard.status, heard.error["code"]) == (413, "message_too_large")
        await assert_server_works(server)


async def test_chunked_encoding_abuse_is_bounded(serve: Serve) -> None:
    """Thousands of one-byte chunks, endless chunk extensions and invalid sizes are refused."""
    async with serve(max_body_bytes=2048) as server:
        opened = head(server, "Transfer-Encoding: chunked")
        assert (await exchange(server.port, opened + b"80\r\n%b\r\n" % (b" " * 128) * 5000)).status == 413
        assert (await exchange(server.port, opened + b"1\r\n \r\n" * 5000)).status == 400
        endless = await exchange(server.port, opened + b"1;" + b"x" * 200_000)
        assert (endless.status, endless.error["code"]) == (400, "invalid_request")
        assert (await exchange(server.port, opened + b"zz\r\n\r\n")).status == 400
        assert (await exchange(server.port, opened + b"-1\r\n\r\n")).status == 400
        await assert_server_works(server)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"text": "\xff"}', "invalid_json"),
        (b'{"text": "\xed\xa0\x80"}', "invalid_json"),
        (b'{"text": "\\ud800"}', "invalid_json"),
        (b"\xef\xbb\xbf" + WHOLE, "invalid_json"),
        (WHOLE.decode().encode("utf-16"), "invalid_json"),
        (gzip.compress(WHOLE, mtime=0), "invalid_json"),
        (WHOLE + WHOLE, "invalid_json"),
        (b'{"text": NaN}', "invalid_json"),
        (b'{"text": "a",}', "invalid_json"),
        (b'{"text": ' + b"[" * 100_000, "invalid_json"),
        (b'{"text": ' + b"[" * 1000 + b"]" * 1000 + b"}", "invalid_request"),
        (b'{"text": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}", "invalid_request"),
        (b'{"text": "a", "text": 1}', "invalid_request"),
        (b'{"text": 1' + b"0" * 50 + b"}", "invalid_request"),
        (b'{"text": 1' + b"0" * 5000 + b"}", "invalid_json"),
        (b'{"text": 1e999999}', "invalid_json"),
        (b'{"text": "a", "' + b"k" * 100_000 + b'": 1}', "invalid_request"),
        (b"{" + b",".join(b'"k%d": 1' % n for n in range(20_000)) + b"}", "invalid_request"),
        (b'{"text": [' + b"{}," * 100_000 + b"{}]}", "invalid_request"),
        (b"text=a", "invalid_json"),
        (b"--x\r\nContent-Disposition: form-data; name=text\r\n\r\na\r\n--x--\r\n", "invalid_json"),
    ],
)
async def test_malformed_body_is_refused(server: Running, body: bytes, code: str) -> None:
    """The error is short and states the problem."""
    heard = await post(server, "/tokenize", body)
    assert (heard.status, heard.error["code"]) == (400, code)
    assert len(heard.body) < 2000
    await assert_server_works(server)


async def test_last_duplicate_json_key_wins(server: Running) -> None:
    """Every parser of the request uses the last value."""
    heard = await post(server, "/tokenize", b'{"text": 1, "text": "b"}')
    assert heard.json["tokens"] == [98]


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "application/json; charset=utf-7", "", "x" * 5000])
async def test_body_is_parsed_as_json_whatever_its_content_type(server: Running, kind: str) -> None:
    """``curl -d`` declares a form; the required token prevents cross-site forms."""
    heard = await post(server, "/tokenize", WHOLE, headers={"Content-Type": kind})
    assert heard.status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "A" * 10_000])
async def test_unsupported_methods_are_405(server: Running, method: str) -> None:
    """The response lists the allowed methods."""
    heard = await request(server, method, "/generate", token=None)
    assert (heard.status, heard.headers["allow"], heard.error["code"]) == (405, "POST", "method_not_allowed")
    assert len(heard.body) < 300


async def test_head_response_has_no_body(server: Running) -> None:
    """HEAD is not supported and is answered without a body."""
    heard = await request(server, "HEAD", "/v1/models")
    assert (heard.status, heard.headers["allow"], heard.body) == (405, "GET", b"")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/",
        "/v1/engines",
        "/v1/chat/completions/",
        "/v1/../../etc/passwd",
        "/v1/%2e%2e/%2e%2e/etc/passwd",
        "/v1/%00",
        "/v1/%ff%fe",
        "/v1/<script>alert(1)</script>",
        "/v1/%0d%0aSet-Cookie:%20a=b",
        "/v1/" + "x" * 5000,
        "/v1/x?" + "a=b&" * 2000,
        "//v1/models",
        "http://elsewhere/v1/models/../x",
        "*",
    ],
)
async def test_unknown_path_is_404(server: Running, path: str) -> None:
    """The error has OpenAI's format, and no header repeats the path."""
    heard = await request(server, "GET", path)
    assert heard.status == 404
    assert "set-cookie" not in heard.headers
    if path.startswith("/v1/"):
        assert heard.error["code"] == "unknown_op"
        assert len(heard.body) < 1000


@pytest.mark.parametrize(
    "model", ["..%2f..%2fetc%2fpasswd", "%0d%0aX-Evil:%201", "%00", "%ff", "x" * 3000, "%F0%9F%92%A9"]
)
async def test_model_name_in_path_is_only_looked_up(server: Running, model: str) -> None:
    """It reaches no file and no header."""
    heard = await request(server, "GET", f"/v1/models/{model}")
    assert (heard.status, heard.json["error"]["code"]) == (404, "unknown_op" if "%2f" in model else "model_not_found")
    assert "x-evil" not in heard.headers
    assert len(heard.body) < 1000


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: f"{row.method} {row.path}")
async def test_secrets_are_never_echoed_or_logged(server: Running, row: object) -> None:
    """A wrong token is in no response and no log line, nor is one in the query."""
    assert hasattr(row, "path")
    assert hasattr(row, "method")
    assert hasattr(row, "scope")
    secret = "ic_0123456789ab_" + "5ec7e7" * 10
    path = row.path.replace("{", "").replace("}", "")
    with structlog.testing.capture_logs() as lines:
        answers = [
            await request(server, row.method, path, body={"text": "a"}, token=secret),
            await request(server, row.method, f"{path}?token={secret}&api_key={secret}", body={"text": "a"}),
            await request(server, row.method, path, headers={"X-API-Key": secret}, token=None),
            await request(server, row.method, path, headers={"Authorization": f"Basic {secret}"}, token=None),
        ]
    if row.scope is not None:
        assert [heard.status for heard in answers] == [401, 400, 401, 401]
    assert not any(secret.encode() in heard.body for heard in answers)
    assert secret not in json.dumps(lines, default=str)


async def test_failed_tokens_lock_out_the_address(serve: Serve) -> None:
    """After some failures the address waits, also with a valid token."""
    async with serve(login_attempts_per_minute=3) as server:
        statuses = [(await post(server, "/tokenize", WHOLE, token="ic_0_0")).status for _ in range(4)]
        assert statuses == [401, 401, 401, 429]
        refused = await post(server, "/tokenize", WHOLE)
        assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)


async def test_unauthenticated_body_is_not_read(serve: Serve) -> None:
    """Without a token the error is sent at once, whatever length is declared."""
    async with serve(body_timeout_s=60) as server:
        sent = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"
        assert (await exchange(server.port, sent)).status == 401
        await assert_server_works(server)


async def test_idle_connections_do_not_block_requests(serve: Serve) -> None:
    """Idle connections are evicted in favor of active ones."""
    async with serve(max_connections=20) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(60)]
        assert (await post(server, "/tokenize", {"text": "a"})).status == 200
        assert len(server.listener.limiter) <= 20
        for _, writer in idle:
            writer.close()
        await assert_server_works(server)


async def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    """Their bodies are kept apart."""
    bodies = [json.dumps({"text": letter}).encode() for letter in "abc"]
    requests = [head(server, f"Content-Length: {len(body)}") + body for body in bodies]
    last = head(server, "Connection: close", "Content-Length: 13") + WHOLE
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"".join(requests) + last)
    async with asyncio.timeout(SOON_S):
        answers = (await reader.read()).split(b"HTTP/1.1 200 OK")[1:]
    writer.close()
    assert [json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"] for answer in answers] == [[97], [98], [99], [97]]
