"""External authentication: slow, unreachable, invalid, redirecting and wrongly certified providers."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from contextlib import asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs
from websockets.exceptions import InvalidStatus

from inferencecenter.auth import external
from inferencecenter.auth.account import CLIENT_ID, Account
from inferencecenter.auth.authentication import AuthUnavailableError
from inferencecenter.auth.external import MAX_ANSWER_BYTES, ExternalAuth
from inferencecenter.config.limits import AccessLimits
from inferencecenter.config.sections import AuthSettings, ExternalAuthSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope
from tests.auth.auth_provider import FakeAuthProvider, fake_auth_provider
from tests.server.harness import Running, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.loop_clock import LoopClock


class Clock:
    """Seconds that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the second."""
        return self.now


@asynccontextmanager
async def authenticator(
    provider: FakeAuthProvider, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[ExternalAuth]:
    """An external authenticator with a timeout of 5 s whose answers are cached for 60 s."""
    chosen = {"url": provider.url, "cache_s": 60, "refused_cache_s": 6, **settings}
    made = ExternalAuth(ExternalAuthSettings(**chosen), defaults=AuthSettings(), clock=clock or Clock())
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def provider() -> AsyncIterator[FakeAuthProvider]:
    """A provider that accepts every client."""
    async with fake_auth_provider() as running:
        yield running


async def test_key_is_sent_in_headers(provider: FakeAuthProvider, tmp_path: Path) -> None:
    """The URL contains no credential; the daemon sends its own token if it has one."""
    (tmp_path / "token").write_text("service-key\n")
    async with authenticator(provider, token_file=tmp_path / "token") as verifier:
        assert await verifier.verify("ada", "akey") == Account(
            "ada", max_sessions=16, priority="normal", scopes=frozenset({Scope.USER})
        )
    [question] = provider.requests
    assert question.target == "/auth/internal"
    assert (question.headers["x-client-id"], question.headers["x-api-key"]) == ("ada", "akey")
    assert question.headers["authorization"] == "Bearer service-key"
    assert not {"cookie", "referer"} & question.headers.keys()


async def test_key_may_be_sent_in_the_query(provider: FakeAuthProvider, caplog: pytest.LogCaptureFixture) -> None:
    """This is for services that expect it; then no log contains the key at any level."""
    caplog.set_level(logging.DEBUG)
    async with authenticator(provider, form="query") as verifier:
        assert await verifier.verify("ada", "s3cret&x=1") is not None
    [question] = provider.requests
    assert question.query == {"client_id": ["ada"], "api_key": ["s3cret&x=1"]}
    assert "x-api-key" not in question.headers
    assert "s3cret" not in caplog.text


async def test_acceptance_carries_limits(provider: FakeAuthProvider) -> None:
    """They may be in the response itself or in its ``config``; unknown fields are ignored."""
    terms = {"max_sessions": 3, "priority": "batch", "limits": {"max_tokens": 9, "phase_of_moon": 1}, "color": "red"}
    expected = Account("ada", 3, "batch", frozenset({Scope.USER}), limits=AccessLimits(max_tokens=9))
    async with authenticator(provider) as verifier:
        for key, answer in (
            ("flat", {"valid": True, "client_id": "ada", **terms}),
            ("nested", {"authorized": True, "config": terms}),
        ):
            provider.respond(**answer)
            assert await verifier.verify("ada", key) == expected


@pytest.mark.parametrize(
    "answer",
    [
        {"authorized": False},
        {"valid": False},
        {"authorized": True, "valid": False},
        {"authorized": True, "error": "unknown client"},
        {},
        {"max_sessions": 3},
    ],
)
async def test_anything_but_an_acceptance_is_a_refusal(provider: FakeAuthProvider, answer: dict[str, Any]) -> None:
    """A missing or conditional acceptance is a refusal, too."""
    provider.respond(**answer)
    async with authenticator(provider) as verifier:
        assert await verifier.verify("ada", "key") is None


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_some_statuses_are_a_refusal(provider: FakeAuthProvider, status: int) -> None:
    """Their body does not matter."""
    provider.status = status
    async with authenticator(provider) as verifier:
        assert await verifier.verify("ada", "key") is None


INVALID_ANSWERS: dict[str, bytes] = {
    "no JSON": b"<html>yes</html>",
    "no object": b"true",
    "a word for a truth": b'{"authorized": "true"}',
    "a number for a truth": b'{"authorized": 1}',
    "another client": b'{"authorized": true, "client_id": "root"}',
    "sessions without end": b'{"authorized": true, "max_sessions": 100000000}',
    "sessions below one": b'{"authorized": true, "max_sessions": 0}',
    "no such class": b'{"authorized": true, "priority": "root"}',
    "limits that are none": b'{"authorized": true, "limits": {"max_tokens": -1}}',
    "limits in a list": b'{"authorized": true, "limits": []}',
    "nothing": b"",
    "depth": b"[" * 50_000,
    "depth in a field": b'{"authorized": true, "error": %s}' % (b"[" * 50_000),
    "bad UTF-8": b'{"authorized": true, "client_id": "\xff"}',
    "half a character": b'{"authorized": true, "client_id": "\\ud800"}',
    "a long number": b'{"authorized": true, "max_sessions": %s}' % (b"9" * 5000),
    "no number": b'{"authorized": true, "limits": {"max_tokens": NaN}}',
    "endless": b'{"authorized": true, "limits": {"max_tokens": 1e999}}',
    "a lot": b'{"authorized": true, "x": "' + b"x" * MAX_ANSWER_BYTES + b'"}',
}


@pytest.mark.parametrize("answer", INVALID_ANSWERS)
async def test_invalid_answers_are_failures(provider: FakeAuthProvider, answer: str) -> None:
    """The first failure is logged, and none is cached."""
    provider.body = INVALID_ANSWERS[answer]
    async with authenticator(provider) as verifier:
        with capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(AuthUnavailableError):
                    await verifier.verify("ada", "key")
            provider.respond(authorized=True)
            assert await verifier.verify("ada", "key") is not None
    assert [line["event"] for line in logs] == ["external_auth_failing", "external_auth_mended"]
    assert len(provider.requests) == 3


@pytest.mark.parametrize("status", [301, 302, 307, 308, 204, 400, 429, 500, 503])
async def test_redirects_and_errors_are_failures(provider: FakeAuthProvider, status: int) -> None:
    """No other address is requested."""
    async with fake_auth_provider() as elsewhere:
        provider.status, provider.head = status, f"Location: {elsewhere.url}\r\nSet-Cookie: a=b\r\n"
        async with authenticator(provider) as verifier:
            with pytest.raises(AuthUnavailableError, match=str(status)):
                await verifier.verify("ada", "key")
    assert elsewhere.requests == []


async def test_cookies_are_not_shared_between_clients(provider: FakeAuthProvider) -> None:
    """A cookie set by one answer is not sent with another request."""
    provider.head = "Set-Cookie: session=ada; Path=/\r\n"
    async with authenticator(provider) as verifier:
        await verifier.verify("ada", "key")
        await verifier.verify("bob", "key")
    assert "cookie" not in provider.requests[1].headers


async def test_slow_provider_times_out(provider: FakeAuthProvider) -> None:
    """No client is accepted."""
    provider.answering.clear()
    async with authenticator(provider, read_timeout_s=0.05) as verifier:
        with pytest.raises(AuthUnavailableError):
            await verifier.verify("ada", "key")


async def test_dripping_provider_times_out(provider: FakeAuthProvider) -> None:
    """The timeout covers the whole answer, not each byte."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with closing(writer), suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        provider.port = server.sockets[0].getsockname()[1]
        async with authenticator(provider, connect_timeout_s=0.05, read_timeout_s=0.05) as verifier:
            with pytest.raises(AuthUnavailableError, match=r"timed out|Timeout"):
                await verifier.verify("ada", "key")


async def test_unreachable_provider_is_a_failure(provider: FakeAuthProvider) -> None:
    """So is one that closes the connection."""
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) as server:
        provider.port = server.sockets[0].getsockname()[1]
        async with authenticator(provider) as verifier:
            with pytest.raises(AuthUnavailableError, match=r"RemoteProtocolError|ReadError"):
                await verifier.verify("ada", "key")
    async with authenticator(provider) as verifier:
        with pytest.raises(AuthUnavailableError, match="ConnectError"):
            await verifier.verify("ada", "key")


@pytest.mark.parametrize("raised", [RuntimeError("closed"), ValueError(), RecursionError(), KeyError("x")])
async def test_any_exception_is_a_failure(
    provider: FakeAuthProvider, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    """The next request is sent."""

    async def fail(*_: object) -> None:
        raise raised

    async with authenticator(provider) as verifier:
        with monkeypatch.context() as broken:
            broken.setattr(verifier._transport, "handle_async_request", fail)
            with pytest.raises(AuthUnavailableError, match=type(raised).__name__):
                await verifier.verify("ada", "key")
        assert await verifier.verify("ada", "key") is not None


async def test_provider_certificate_is_verified(tmp_path: Path) -> None:
    """One of another authority or for another name is a failure."""
    ours, other = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ours.pem")
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    for names, file, is_right in (
        (["localhost"], "ours.pem", True),
        (["localhost"], "other.pem", False),
        (["localhost"], None, False),
        (["example.org"], "ours.pem", False),
    ):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.issue_cert(*names).configure_cert(tls)
        async with (
            fake_auth_provider(tls=tls) as provider,
            authenticator(provider, ca_file=file and tmp_path / file) as verifier,
        ):
            if is_right:
                assert await verifier.verify("ada", "key") is not None
            else:
                with pytest.raises(AuthUnavailableError, match="ConnectError"):
                    await verifier.verify("ada", "key")
            assert len(provider.requests) == is_right


# Caching.


async def test_answers_are_cached(provider: FakeAuthProvider) -> None:
    """An acceptance is cached for 60 s and a refusal for 6 s."""
    clock = Clock()
    async with authenticator(provider, clock) as verifier:
        for key, body, lasts_s in (("right", {"valid": True}, 60), ("wrong", {"valid": False}, 6)):
            provider.respond(**body)
            before = len(provider.requests)
            first = await verifier.verify("ada", key)
            clock.now += lasts_s - 1
            assert await verifier.verify("ada", key) is first
            assert len(provider.requests) == before + 1
            clock.now += 1
            assert await verifier.verify("ada", key) == first
            assert len(provider.requests) == before + 2


async def test_cached_client_can_be_invalidated(provider: FakeAuthProvider) -> None:
    """It is requested again; others stay cached."""
    async with authenticator(provider) as verifier:
        for name in ("ada", "bob", "ada", "bob"):
            await verifier.verify(name, "key")
        assert len(provider.requests) == 2
        verifier.forget("ada")
        await verifier.verify("bob", "key")
        await verifier.verify("ada", "key")
    assert [question.headers["x-client-id"] for question in provider.requests] == ["ada", "bob", "ada"]


async def test_cache_is_bounded(provider: FakeAuthProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest entry is evicted, and no key is stored in plain text."""
    monkeypatch.setattr(external, "MAX_CACHED", 3)
    async with authenticator(provider) as verifier:
        for number in range(5):
            await verifier.verify("ada", f"key-number-{number}")
        assert len(verifier._cache) == 3
        assert b"key-number" not in b"".join(verifier._cache)
        await verifier.verify("ada", "key-number-4")
        await verifier.verify("ada", "key-number-0")
    assert len(provider.requests) == 6


async def test_concurrent_requests_are_limited(provider: FakeAuthProvider) -> None:
    """Further ones wait, and equal ones share an answer."""
    provider.answering.clear()
    async with authenticator(provider, max_requests=2) as verifier, asyncio.TaskGroup() as group:
        waiting = [group.create_task(verifier.verify(f"client-{n % 4}", "key")) for n in range(12)]
        await provider.wait_requests(2)
        provider.answering.set()
        assert all(await asyncio.gather(*waiting))
    assert provider.most_at_once <= 2
    assert 4 <= len(provider.requests) <= 8


async def test_waiting_requests_are_bounded(provider: FakeAuthProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a login is refused at once."""
    monkeypatch.setattr(external, "MAX_WAITING", 1)
    provider.answering.clear()
    async with authenticator(provider) as verifier, asyncio.TaskGroup() as group:
        first = group.create_task(verifier.verify("ada", "key"))
        await provider.wait_requests(1)
        with pytest.raises(AuthUnavailableError, match="too many"):
            await verifier.verify("bob", "key")
        provider.answering.set()
        assert await first is not None


HOSTILE = ["", "a b", "a\nX-Api-Key: y", "../x", 'a"} 1', "é", "\x1b[2J", "a" * 65, "-a", "{}", "a\u202eb"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_invalid_client_names_are_refused_without_a_request(provider: FakeAuthProvider, name: str) -> None:
    """Names appear in logs, metric labels and terminals, so they follow the rules of local accounts."""
    async with authenticator(provider) as verifier:
        assert await verifier.verify(name, "key") is None
    assert provider.requests == []
    assert CLIENT_ID.fullmatch(name) is None


async def test_key_cannot_inject_headers(provider: FakeAuthProvider) -> None:
    """Only printable text is sent, unchanged; anything else is refused without a request."""
    async with authenticator(provider) as verifier:

        @given(st.text(max_size=300))
        def asks(key: str) -> None:
            if external._KEY.fullmatch(key) is None:
                assert not key.isascii() or not key.isprintable() or " " in key or not 1 <= len(key) <= 256
            else:
                assert verifier._request("ada", key).headers["x-api-key"] == key

        asks()
        assert await verifier.verify("ada", "key\r\nX-Client-ID: root") is None
    assert provider.requests == []


# Settings.


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/",
        "example.org",
        "https://",
        "http://example.org/auth",
        "https://user:key@example.org/",
        "https://example.org/?api_key=x",
        "https://example.org/#x",
    ],
)
def test_insecure_urls_are_refused(url: str) -> None:
    """Keys are sent in plain text to another machine only if that is allowed."""
    with pytest.raises(ValidationError, match="url"):
        ExternalAuthSettings(url=url)


def test_secure_urls_are_accepted() -> None:
    """HTTPS anywhere, HTTP to this machine or where it is allowed."""
    for url in ("https://example.org/a", "http://localhost:8080/a", "http://127.0.0.1/a", "http://[::1]:1/a"):
        assert ExternalAuthSettings(url=url).url == url
    assert ExternalAuthSettings(url="http://example.org/auth", allow_http=True).url is not None


@pytest.mark.parametrize("field", ["token_file", "ca_file"])
@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe"])
async def test_unusable_files_are_named(tmp_path: Path, field: str, content: bytes | None) -> None:
    """The error comes before any request."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    settings = ExternalAuthSettings(url="https://localhost/", **{field: path})
    with pytest.raises(InferenceCenterError) as caught:
        ExternalAuth(settings, defaults=AuthSettings(), clock=Clock())
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_CONFIG, f"external_auth.{field}")
    assert str(path) in caught.value.message


# Over a socket.


@asynccontextmanager
async def serve_external(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider, **settings: Any
) -> AsyncIterator[Running]:
    """A server that uses the provider."""
    verifier = ExternalAuth(
        ExternalAuthSettings(url=provider.url, refused_cache_s=0),
        defaults=AuthSettings(default_max_sessions=2),
        clock=Clock(),
    )
    async with serve(external=verifier, **settings) as server:
        yield server


async def refused_upgrade(server: Running, client_id: str, api_key: str) -> tuple[int, dict[str, Any]]:
    """Send credentials with the upgrade; return status and body of the refusal."""
    with pytest.raises(InvalidStatus) as caught:
        await server.connect(additional_headers={"X-Client-ID": client_id, "X-API-Key": api_key})
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")


async def test_external_client_works_like_a_local_one(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """It logs in by upgrade or frame, and has its limits; frames sent after `auth` wait for the answer."""
    provider.respond(authorized=True, limits={"max_tokens": 5})
    async with serve_external(serve, provider) as server:
        async with server.connect(additional_headers={"X-Client-ID": "guest", "X-API-Key": "key"}) as socket:
            welcome = await receive(socket)
            assert (welcome["op"], welcome["client_id"], welcome["max_sessions"]) == ("auth_success", "guest", 2)
        provider.answering.clear()
        server.context.authenticator.forget("guest")
        async with server.connect() as socket:
            await receive(socket)
            pair = {"client_id": "guest", "api_key": "key"}
            await socket.send(json.dumps({"op": "auth", "id": "a", "protocol": 1, **pair}))
            await socket.send(json.dumps({"op": "create_session", "id": "c"}))
            await provider.wait_requests(2)
            provider.answering.set()
            welcome = await receive(socket)
            assert (welcome["op"], welcome["id"], welcome["scopes"]) == ("auth_success", "a", ["user"])
            assert welcome["limits"]["max_tokens"] == 5
            assert (await receive(socket))["op"] == "session_created"
        logins = [line for line in server.accounts.audit_lines(last=9) if line.event == "login"]
        assert [(line.client_id, line.detail) for line in logins] == [("guest", "known elsewhere")]


async def test_external_refusal_equals_a_local_one(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """It has the words of a wrong local key, and is counted."""
    provider.respond(authorized=False)
    async with serve_external(serve, provider, login_attempts_per_minute=3) as server:
        assert await refused_upgrade(server, "guest", "key") == await refused_upgrade(server, "kitchen", "key")
        async with server.connect() as socket:
            await receive(socket)
            failed = await ask(socket, op="auth", client_id="guest", api_key="key", protocol=1)
            assert (failed["op"], failed["reason"]) == ("auth_failed", "the credential is not valid")
            limited = await ask(socket, op="auth", client_id="guest", api_key="key")
            assert limited["op"] == "auth_failed"
            assert limited["retry_after_ms"] > 0
            assert await close_code(socket) == 4429
    assert len(provider.requests) == 2


async def test_concurrent_guesses_are_limited_like_sequential_ones(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """Those beyond the limit are refused without a request."""
    provider.respond(authorized=False)
    provider.answering.clear()
    async with serve_external(serve, provider, login_attempts_per_minute=3) as server, asyncio.TaskGroup() as group:
        guesses = [group.create_task(refused_upgrade(server, "guest", f"key{n}")) for n in range(8)]
        await provider.wait_requests(3)
        provider.answering.set()
        statuses = [status for status, _ in await asyncio.gather(*guesses)]
        assert sorted(statuses) == [401] * 3 + [429] * 5
    assert len(provider.requests) == 3


async def test_unavailable_provider_is_reported_and_not_counted(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """The error names the provider's failure and a retry delay; local accounts still log in."""
    provider.status = 500
    async with serve_external(serve, provider, login_attempts_per_minute=2) as server:
        for _ in range(4):
            status, body = await refused_upgrade(server, "guest", "key")
            assert (status, body["message"]) == (401, "the credential cannot be checked at the moment")
            assert body["retry_after_ms"] == 1000
        async with server.connect(additional_headers={"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}) as socket:
            assert (await receive(socket))["op"] == "auth_success"
        lines = [line for line in server.accounts.audit_lines(last=9) if line.event == "login_refused"]
        assert [line.detail for line in lines] == ["cannot be checked: it responded with status 500"]


async def test_local_clients_and_tokens_are_not_sent_to_the_provider(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """An external acceptance opens no local account, and no token is sent."""
    async with serve_external(serve, provider) as server:
        for client_id, key in (("kitchen", "guess"), ("ada", "guess"), ("guest", server.token)):
            assert (await refused_upgrade(server, client_id, key))[0] == 401
        with pytest.raises(InvalidStatus):
            await server.connect(additional_headers={"Authorization": "Bearer guess"})
    assert provider.requests == []


async def test_disconnect_during_the_request_leaves_no_state(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """The closed socket is not counted as the client's, by upgrade or frame."""
    provider.answering.clear()
    async with serve_external(serve, provider) as server, asyncio.TaskGroup() as group:
        upgrade = group.create_task(refused_upgrade(server, "guest", "a"))
        await provider.wait_requests(1)
        upgrade.cancel()
        async with server.connect() as socket:
            await receive(socket)
            await socket.send(json.dumps({"op": "auth", "client_id": "guest", "api_key": "b"}))
            await provider.wait_requests(2)
            socket.transport.abort()
        provider.answering.set()
        async with asyncio.timeout(60):
            await server.context.hub._empty.wait()
        assert server.context.hub.clients() == {}
        server.context.hub.check_room("guest")
        assert not server.context.hub._per_client


async def test_shutdown_during_the_request_refuses_the_upgrade(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """The pending upgrade is refused like any other."""
    provider.answering.clear()
    async with serve_external(serve, provider) as server, asyncio.TaskGroup() as group:
        upgrade = group.create_task(refused_upgrade(server, "guest", "a"))
        await provider.wait_requests(1)
        server.context.hub.draining = True
        provider.answering.set()
        assert (await upgrade)[0] == 503


async def test_answer_after_the_login_deadline_is_ignored(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider, clock: LoopClock
) -> None:
    """The socket has closed with 4401."""
    provider.answering.clear()
    async with serve_external(serve, provider, auth_timeout_s=30) as server, server.connect() as socket:
        await receive(socket)
        await socket.send(json.dumps({"op": "auth", "client_id": "guest", "api_key": "b"}))
        await provider.wait_requests(1)
        await clock.go_on(30)
        assert await close_code(socket) == 4401
        provider.answering.set()
        async with asyncio.timeout(60):
            await server.context.hub._empty.wait()
        assert not server.context.hub._per_client


async def test_kicked_client_is_requested_again(
    serve: Callable[..., AbstractAsyncContextManager[Running]], provider: FakeAuthProvider
) -> None:
    """Its cached acceptance is dropped."""
    async with serve_external(serve, provider) as server:
        pair = {"X-Client-ID": "guest", "X-API-Key": "key"}
        server.accounts.ensure_client("root", max_sessions=1, priority="normal", scopes=["user", "admin"])
        root = server.accounts.create_token("root").token
        async with (
            server.connect(additional_headers=pair) as socket,
            server.connect(
                additional_headers={"Authorization": f"Bearer {root}"}, subprotocols=["inferencecenter.v1"]
            ) as admin,
        ):
            await receive(socket)
            await receive(admin)
            await admin.send(json.dumps({"op": "kick", "client_id": "guest"}))
            assert await close_code(socket) == 1008
        provider.respond(authorized=False)
        assert (await refused_upgrade(server, "guest", "key"))[0] == 401
