"""Tests of asking another program who somebody is: slow, down, lying, redirecting, under a wrong certificate."""

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
from inferencecenter.config.sections import ExternalAuthSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope
from tests.auth.other_program import OtherProgram, other_program
from tests.server.harness import Running, ask, close_code, hear

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.loop_clock import LoopClock


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the second."""
        return self.now


@asynccontextmanager
async def asking(program: OtherProgram, clock: Clock | None = None, **settings: Any) -> AsyncIterator[ExternalAuth]:
    """Ask a program; it has 5 s for an answer, and its answers hold for 60 s."""
    chosen = {"url": program.url, "cache_s": 60, "refused_cache_s": 6, **settings}
    made = ExternalAuth(
        ExternalAuthSettings(**chosen), default_max_sessions=16, default_priority="normal", clock=clock or Clock()
    )
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def program() -> AsyncIterator[OtherProgram]:
    """A program that says yes."""
    async with other_program() as running:
        yield running


async def test_a_key_goes_in_headers(program: OtherProgram, tmp_path: Path) -> None:
    """The address stays clean; the daemon shows its own token if it has one."""
    (tmp_path / "token").write_text("service-key\n")
    async with asking(program, token_file=tmp_path / "token") as others:
        assert await others.verify("ada", "akey") == Account(
            "ada", max_sessions=16, priority="normal", scopes=frozenset({Scope.USER})
        )
    [question] = program.asked
    assert question.target == "/auth/internal"
    assert (question.headers["x-client-id"], question.headers["x-api-key"]) == ("ada", "akey")
    assert question.headers["authorization"] == "Bearer service-key"
    assert not {"cookie", "referer"} & question.headers.keys()


async def test_a_key_may_go_in_the_address(program: OtherProgram, caplog: pytest.LogCaptureFixture) -> None:
    """As the first InferenceCenter did it; then it is in no log of ours, however loud."""
    caplog.set_level(logging.DEBUG)
    async with asking(program, form="query") as others:
        assert await others.verify("ada", "s3cret&x=1") is not None
    [question] = program.asked
    assert question.query == {"client_id": ["ada"], "api_key": ["s3cret&x=1"]}
    assert "x-api-key" not in question.headers
    assert "s3cret" not in caplog.text


async def test_terms_come_with_a_yes(program: OtherProgram) -> None:
    """Flat, or in `config` as the first InferenceCenter's database has them; what is unknown means nothing."""
    terms = {"max_sessions": 3, "priority": "batch", "limits": {"max_tokens": 9, "phase_of_moon": 1}, "colour": "red"}
    expected = Account("ada", 3, "batch", frozenset({Scope.USER}), limits=AccessLimits(max_tokens=9))
    async with asking(program) as others:
        for key, answer in (
            ("flat", {"valid": True, "client_id": "ada", **terms}),
            ("nested", {"authorized": True, "config": terms}),
        ):
            program.say(**answer)
            assert await others.verify("ada", key) == expected


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
async def test_what_is_no_yes_is_a_no(program: OtherProgram, answer: dict[str, Any]) -> None:
    """Also silence about it, and a yes with a but."""
    program.say(**answer)
    async with asking(program) as others:
        assert await others.verify("ada", "key") is None


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_some_statuses_are_a_no(program: OtherProgram, status: int) -> None:
    """Whatever the body says."""
    program.status = status
    async with asking(program) as others:
        assert await others.verify("ada", "key") is None


LIES: dict[str, bytes] = {
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


@pytest.mark.parametrize("lie", LIES)
async def test_lies_let_nobody_in(program: OtherProgram, lie: str) -> None:
    """They are failures, of which the first is logged; nothing is remembered of them."""
    program.body = LIES[lie]
    async with asking(program) as others:
        with capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(AuthUnavailableError):
                    await others.verify("ada", "key")
            program.say(authorized=True)
            assert await others.verify("ada", "key") is not None
    assert [line["event"] for line in logs] == ["external_auth_failing", "external_auth_mended"]
    assert len(program.asked) == 3


@pytest.mark.parametrize("status", [301, 302, 307, 308, 204, 400, 429, 500, 503])
async def test_redirections_and_errors_let_nobody_in(program: OtherProgram, status: int) -> None:
    """No other address is asked, whatever the answer says."""
    async with other_program() as elsewhere:
        program.status, program.head = status, f"Location: {elsewhere.url}\r\nSet-Cookie: a=b\r\n"
        async with asking(program) as others:
            with pytest.raises(AuthUnavailableError, match=str(status)):
                await others.verify("ada", "key")
    assert elsewhere.asked == []


async def test_no_cookie_goes_from_one_client_to_the_next(program: OtherProgram) -> None:
    """What the answer to one question sets is not part of another."""
    program.head = "Set-Cookie: session=ada; Path=/\r\n"
    async with asking(program) as others:
        await others.verify("ada", "key")
        await others.verify("bob", "key")
    assert "cookie" not in program.asked[1].headers


async def test_a_program_that_is_slow_lets_nobody_in(program: OtherProgram) -> None:
    """Its time ends."""
    program.answering.clear()
    async with asking(program, read_timeout_s=0.05) as others:
        with pytest.raises(AuthUnavailableError):
            await others.verify("ada", "key")


async def test_a_program_that_drips_lets_nobody_in(program: OtherProgram) -> None:
    """The whole answer has its time, not each byte of it."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with closing(writer), suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        program.port = server.sockets[0].getsockname()[1]
        async with asking(program, connect_timeout_s=0.05, read_timeout_s=0.05) as others:
            with pytest.raises(AuthUnavailableError, match=r"timed out|Timeout"):
                await others.verify("ada", "key")


async def test_a_program_that_is_down_lets_nobody_in(program: OtherProgram) -> None:
    """Nor does one that hangs up."""
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) as server:
        program.port = server.sockets[0].getsockname()[1]
        async with asking(program) as others:
            with pytest.raises(AuthUnavailableError, match=r"RemoteProtocolError|ReadError"):
                await others.verify("ada", "key")
    async with asking(program) as others:
        with pytest.raises(AuthUnavailableError, match="ConnectError"):
            await others.verify("ada", "key")


@pytest.mark.parametrize("raised", [RuntimeError("closed"), ValueError(), RecursionError(), KeyError("x")])
async def test_whatever_asking_raises_lets_nobody_in(
    program: OtherProgram, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    """It is a failure like any other; the next question is asked."""

    async def fail(*_: object) -> None:
        raise raised

    async with asking(program) as others:
        with monkeypatch.context() as broken:
            broken.setattr(others._transport, "handle_async_request", fail)
            with pytest.raises(AuthUnavailableError, match=type(raised).__name__):
                await others.verify("ada", "key")
        assert await others.verify("ada", "key") is not None


async def test_only_who_has_the_right_certificate_is_believed(tmp_path: Path) -> None:
    """One that another authority signed, or for another name, is a failure."""
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
            other_program(tls=tls) as program,
            asking(program, ca_file=file and tmp_path / file) as others,
        ):
            if is_right:
                assert await others.verify("ada", "key") is not None
            else:
                with pytest.raises(AuthUnavailableError, match="ConnectError"):
                    await others.verify("ada", "key")
            assert len(program.asked) == is_right


# What is remembered.


async def test_answers_are_remembered_for_a_while(program: OtherProgram) -> None:
    """A yes for longer than a no, each for this key alone."""
    clock = Clock()
    async with asking(program, clock) as others:
        for key, body, lasts_s in (("right", {"valid": True}, 60), ("wrong", {"valid": False}, 6)):
            program.say(**body)
            before = len(program.asked)
            first = await others.verify("ada", key)
            clock.now += lasts_s - 1
            assert await others.verify("ada", key) is first
            assert len(program.asked) == before + 1
            clock.now += 1
            assert await others.verify("ada", key) == first
            assert len(program.asked) == before + 2


async def test_a_client_can_be_forgotten(program: OtherProgram) -> None:
    """It is asked about again; others are still known."""
    async with asking(program) as others:
        for name in ("ada", "bob", "ada", "bob"):
            await others.verify(name, "key")
        assert len(program.asked) == 2
        others.forget("ada")
        await others.verify("bob", "key")
        await others.verify("ada", "key")
    assert [question.headers["x-client-id"] for question in program.asked] == ["ada", "bob", "ada"]


async def test_no_more_is_remembered_than_there_is_room(program: OtherProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked first is forgotten first, and no key is kept as it is."""
    monkeypatch.setattr(external, "MAX_CACHED", 3)
    async with asking(program) as others:
        for number in range(5):
            await others.verify("ada", f"key-number-{number}")
        assert len(others._known) == 3
        assert b"key-number" not in b"".join(others._known)
        await others.verify("ada", "key-number-4")
        await others.verify("ada", "key-number-0")
    assert len(program.asked) == 6


async def test_few_questions_are_asked_at_once(program: OtherProgram) -> None:
    """The others wait; those that meant the same are answered together."""
    program.answering.clear()
    async with asking(program, max_requests=2) as others, asyncio.TaskGroup() as group:
        waiting = [group.create_task(others.verify(f"client-{n % 4}", "key")) for n in range(12)]
        await program.until_asked(2)
        program.answering.set()
        assert all(await asyncio.gather(*waiting))
    assert program.most_at_once <= 2
    assert 4 <= len(program.asked) <= 8


async def test_no_crowd_waits_for_answers(program: OtherProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number it is refused at once."""
    monkeypatch.setattr(external, "MAX_WAITING", 1)
    program.answering.clear()
    async with asking(program) as others, asyncio.TaskGroup() as group:
        first = group.create_task(others.verify("ada", "key"))
        await program.until_asked(1)
        with pytest.raises(AuthUnavailableError, match="too many"):
            await others.verify("bob", "key")
        program.answering.set()
        assert await first is not None


HOSTILE = ["", "a b", "a\nX-Api-Key: y", "../x", 'a"} 1', "é", "\x1b[2J", "a" * 65, "-a", "{}", "a\u202eb"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_not_even_asked_about(program: OtherProgram, name: str) -> None:
    """They stand in logs, labels of metrics and on terminals: the names of local accounts are the measure."""
    async with asking(program) as others:
        assert await others.verify(name, "key") is None
    assert program.asked == []
    assert CLIENT_ID.fullmatch(name) is None


async def test_no_key_can_break_the_question(program: OtherProgram) -> None:
    """What is not plain visible text is refused without asking; the rest arrives as it is."""
    async with asking(program) as others:

        @given(st.text(max_size=300))
        def asks(key: str) -> None:
            if external._KEY.fullmatch(key) is None:
                assert not key.isascii() or not key.isprintable() or " " in key or not 1 <= len(key) <= 256
            else:
                assert others._request("ada", key).headers["x-api-key"] == key

        asks()
        assert await others.verify("ada", "key\r\nX-Client-ID: root") is None
    assert program.asked == []


# What may be set.


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
def test_addresses_that_are_not_safe_are_refused(url: str) -> None:
    """Keys are not sent as plain text to another machine, unless that is asked for."""
    with pytest.raises(ValidationError, match="url"):
        ExternalAuthSettings(url=url)


def test_addresses_that_are_safe_are_taken() -> None:
    """Https anywhere, http to this machine, or where it is allowed."""
    for url in ("https://example.org/a", "http://localhost:8080/a", "http://127.0.0.1/a", "http://[::1]:1/a"):
        assert ExternalAuthSettings(url=url).url == url
    assert ExternalAuthSettings(url="http://example.org/auth", allow_http=True).url is not None


@pytest.mark.parametrize("field", ["token_file", "ca_file"])
@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe"])
async def test_files_that_cannot_be_used_are_named(tmp_path: Path, field: str, content: bytes | None) -> None:
    """Before anything is asked."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    settings = ExternalAuthSettings(url="https://localhost/", **{field: path})
    with pytest.raises(InferenceCenterError) as caught:
        ExternalAuth(settings, default_max_sessions=1, default_priority="normal", clock=Clock())
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_CONFIG, f"external_auth.{field}")
    assert str(path) in caught.value.message


# Through a socket.


@asynccontextmanager
async def served(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram, **settings: Any
) -> AsyncIterator[Running]:
    """A server that asks the program."""
    others = ExternalAuth(
        ExternalAuthSettings(url=program.url, refused_cache_s=0),
        default_max_sessions=2,
        default_priority="normal",
        clock=Clock(),
    )
    async with serve(others=others, **settings) as server:
        yield server


async def refused_upgrade(server: Running, client_id: str, api_key: str) -> tuple[int, dict[str, Any]]:
    """Show a pair with the upgrade; return status and body of the refusal."""
    with pytest.raises(InvalidStatus) as caught:
        await server.connect(additional_headers={"X-Client-ID": client_id, "X-API-Key": api_key})
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")


async def test_a_client_known_elsewhere_works_like_any(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """By the upgrade or by a frame, with its limits; frames sent behind `auth` wait for the answer."""
    program.say(authorized=True, limits={"max_tokens": 5})
    async with served(serve, program) as server:
        async with server.connect(additional_headers={"X-Client-ID": "guest", "X-API-Key": "key"}) as socket:
            welcome = await hear(socket)
            assert (welcome["op"], welcome["client_id"], welcome["max_sessions"]) == ("auth_success", "guest", 2)
        program.answering.clear()
        server.context.authenticator.forget("guest")
        async with server.connect() as socket:
            await hear(socket)
            pair = {"client_id": "guest", "api_key": "key"}
            await socket.send(json.dumps({"op": "auth", "id": "a", "protocol": 1, **pair}))
            await socket.send(json.dumps({"op": "create_session", "id": "c"}))
            await program.until_asked(2)
            program.answering.set()
            welcome = await hear(socket)
            assert (welcome["op"], welcome["id"], welcome["scopes"]) == ("auth_success", "a", ["user"])
            assert welcome["limits"]["max_tokens"] == 5
            assert (await hear(socket))["op"] == "session_created"
        logins = [line for line in server.accounts.audit_lines(last=9) if line.event == "login"]
        assert [(line.client_id, line.detail) for line in logins] == [("guest", "known elsewhere")]


async def test_a_no_from_elsewhere_is_like_any_other(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """It is refused in the same words as a wrong key of an account here, and counted."""
    program.say(authorized=False)
    async with served(serve, program, login_attempts_per_minute=3) as server:
        assert await refused_upgrade(server, "guest", "key") == await refused_upgrade(server, "kitchen", "key")
        async with server.connect() as socket:
            await hear(socket)
            failed = await ask(socket, op="auth", client_id="guest", api_key="key", protocol=1)
            assert (failed["op"], failed["reason"]) == ("auth_failed", "the credential is not valid")
            limited = await ask(socket, op="auth", client_id="guest", api_key="key")
            assert limited["op"] == "auth_failed"
            assert limited["retry_after_ms"] > 0
            assert await close_code(socket) == 4429
    assert len(program.asked) == 2


async def test_guesses_at_once_are_no_more_than_guesses_in_turn(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """Those beyond the limit are refused before anybody is asked."""
    program.say(authorized=False)
    program.answering.clear()
    async with served(serve, program, login_attempts_per_minute=3) as server, asyncio.TaskGroup() as group:
        guesses = [group.create_task(refused_upgrade(server, "guest", f"key{n}")) for n in range(8)]
        await program.until_asked(3)
        program.answering.set()
        statuses = [status for status, _ in await asyncio.gather(*guesses)]
        assert sorted(statuses) == [401] * 3 + [429] * 5
    assert len(program.asked) == 3


async def test_nobody_is_let_in_or_counted_while_nobody_can_tell(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """It is told that this is not the key's fault, and when to come back; accounts here are let in."""
    program.status = 500
    async with served(serve, program, login_attempts_per_minute=2) as server:
        for _ in range(4):
            status, body = await refused_upgrade(server, "guest", "key")
            assert (status, body["message"]) == (401, "the credential cannot be checked at the moment")
            assert body["retry_after_ms"] == 1000
        async with server.connect(additional_headers={"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}) as socket:
            assert (await hear(socket))["op"] == "auth_success"
        lines = [line for line in server.accounts.audit_lines(last=9) if line.event == "login_refused"]
        assert [line.detail for line in lines] == ["cannot be checked: it responded with status 500"]


async def test_clients_and_tokens_of_this_daemon_are_nobody_elses_business(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """A yes from elsewhere opens no account here, and no token is sent away, right or wrong."""
    async with served(serve, program) as server:
        for client_id, key in (("kitchen", "guess"), ("ada", "guess"), ("guest", server.token)):
            assert (await refused_upgrade(server, client_id, key))[0] == 401
        with pytest.raises(InvalidStatus):
            await server.connect(additional_headers={"Authorization": "Bearer guess"})
    assert program.asked == []


async def test_who_is_gone_before_the_answer_leaves_nothing(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """A socket that closes while somebody is asked, by the upgrade or by a frame, is not counted as the client's."""
    program.answering.clear()
    async with served(serve, program) as server, asyncio.TaskGroup() as group:
        upgrade = group.create_task(refused_upgrade(server, "guest", "a"))
        await program.until_asked(1)
        upgrade.cancel()
        async with server.connect() as socket:
            await hear(socket)
            await socket.send(json.dumps({"op": "auth", "client_id": "guest", "api_key": "b"}))
            await program.until_asked(2)
            socket.transport.abort()
        program.answering.set()
        async with asyncio.timeout(60):
            await server.context.hub._empty.wait()
        assert server.context.hub.clients() == {}
        server.context.hub.check_room("guest")
        assert not server.context.hub._per_client


async def test_a_daemon_that_stops_meanwhile_lets_nobody_in(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """The upgrade that waited for an answer is refused like any other then."""
    program.answering.clear()
    async with served(serve, program) as server, asyncio.TaskGroup() as group:
        upgrade = group.create_task(refused_upgrade(server, "guest", "a"))
        await program.until_asked(1)
        server.context.hub.draining = True
        program.answering.set()
        assert (await upgrade)[0] == 503


async def test_an_answer_after_the_sockets_time_is_too_late(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram, clock: LoopClock
) -> None:
    """The socket has closed with 4401 by then."""
    program.answering.clear()
    async with served(serve, program, auth_timeout_s=30) as server, server.connect() as socket:
        await hear(socket)
        await socket.send(json.dumps({"op": "auth", "client_id": "guest", "api_key": "b"}))
        await program.until_asked(1)
        await clock.go_on(30)
        assert await close_code(socket) == 4401
        program.answering.set()
        async with asyncio.timeout(60):
            await server.context.hub._empty.wait()
        assert not server.context.hub._per_client


async def test_a_kicked_client_is_asked_about_again(
    serve: Callable[..., AbstractAsyncContextManager[Running]], program: OtherProgram
) -> None:
    """Its key may be no good any more."""
    async with served(serve, program) as server:
        pair = {"X-Client-ID": "guest", "X-API-Key": "key"}
        server.accounts.ensure_client("root", max_sessions=1, priority="normal", scopes=["user", "admin"])
        root = server.accounts.create_token("root").token
        async with (
            server.connect(additional_headers=pair) as socket,
            server.connect(
                additional_headers={"Authorization": f"Bearer {root}"}, subprotocols=["inferencecenter.v1"]
            ) as admin,
        ):
            await hear(socket)
            await hear(admin)
            await admin.send(json.dumps({"op": "kick", "client_id": "guest"}))
            assert await close_code(socket) == 1008
        program.say(authorized=False)
        assert (await refused_upgrade(server, "guest", "key"))[0] == 401
