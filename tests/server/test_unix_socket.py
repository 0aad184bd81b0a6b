"""The Unix socket: its file, the credentials of its peers, and the limits of their users."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio import client
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import InvalidStatus

from inferencecenter.auth.audit import AuditEvent
from inferencecenter.config.limits import AccessLimits
from inferencecenter.config.sections import AuthSettings
from inferencecenter.core.addresses import unix_peer
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import unix_socket as module
from inferencecenter.server.unix_socket import MAX_PATH_BYTES, peer_text, unix_accounts, unix_socket
from tests.server.harness import ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

BACKLOG = 8
UID = os.getuid()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path that fits a socket address; that of a test's directory may not."""
    assert len(os.fsencode(tmp_path / "socket")) <= MAX_PATH_BYTES
    return tmp_path / "socket"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can enter, unlike those of the tests."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def listen(path: Path, mode: int = 0o600) -> InferenceCenterError:
    """Try to listen and return the error."""
    with pytest.raises(InferenceCenterError) as caught, unix_socket(path, mode=mode, backlog=BACKLOG):
        pass
    return caught.value


# The file.


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_file_has_its_mode_whatever_the_umask_and_is_removed(path: Path, mode: int) -> None:
    """Its end removes it."""
    before = os.umask(0o077)
    try:
        with unix_socket(path, mode=mode, backlog=BACKLOG):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert not path.exists()


def test_file_of_a_dead_daemon_is_replaced(path: Path) -> None:
    """A killed daemon cannot remove it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with unix_socket(path, mode=0o600, backlog=BACKLOG), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_live_socket_is_refused_and_stays(path: Path) -> None:
    """Also one whose backlog is full."""
    with unix_socket(path, mode=0o600, backlog=0):
        error = listen(path)
        assert (error.code, error.field) == (ErrorCode.ADDRESS_IN_USE, "server.unix_socket")
        # The probe of this attempt is pending, and fills the backlog.
        assert listen(path).code is ErrorCode.ADDRESS_IN_USE
        assert path.exists()


def test_daemon_that_starts_meanwhile_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two daemons would otherwise find the same stale file, and the second would replace the socket of the first."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    refusals: list[InferenceCenterError] = []
    probe = module.is_listening

    def overtaken(path: Path) -> bool:
        monkeypatch.setattr(module, "is_listening", probe)
        found = probe(path)
        refusals.append(listen(path))
        return found

    monkeypatch.setattr(module, "is_listening", overtaken)
    with unix_socket(path, mode=0o600, backlog=BACKLOG), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert [(error.code, "starting" in error.message) for error in refusals] == [(ErrorCode.ADDRESS_IN_USE, True)]
    assert list(path.parent.iterdir()) == []


def test_one_of_several_daemons_that_start_at_once_listens(path: Path) -> None:
    """At the file of a dead one, in many attempts; the others are refused, and no file remains."""
    n_daemons = 4
    for _ in range(25):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        start, tried = threading.Barrier(n_daemons), threading.Barrier(n_daemons)

        def run(start: threading.Barrier = start, tried: threading.Barrier = tried) -> bool:
            start.wait()
            try:
                with unix_socket(path, mode=0o600, backlog=BACKLOG):
                    tried.wait()
                    return True
            except InferenceCenterError:
                tried.wait()
                return False

        with ThreadPoolExecutor(n_daemons) as pool:
            listened = [pool.submit(run) for _ in range(n_daemons)]
        assert sum(each.result() for each in listened) == 1
        assert list(path.parent.iterdir()) == []


def test_other_file_is_neither_replaced_nor_removed(path: Path) -> None:
    """A path that was mistyped deletes nothing."""
    path.write_text("precious")
    error = listen(path)
    assert (error.code, error.field) == (ErrorCode.INVALID_CONFIG, "server.unix_socket")
    assert path.read_text() == "precious"


def test_socket_of_a_later_daemon_is_not_removed(path: Path) -> None:
    """An operator may have removed the file of a daemon that then ends."""
    with unix_socket(path, mode=0o600, backlog=BACKLOG):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as later:
            later.bind(str(path))
    assert path.exists()


def test_long_path_is_refused_with_its_limit(tmp_path: Path) -> None:
    """The error names the number of bytes and what is allowed."""
    error = listen(tmp_path / ("x" * MAX_PATH_BYTES))
    assert error.field == "server.unix_socket"
    assert f"at most {MAX_PATH_BYTES}" in error.message


def test_directory_must_exist_and_be_safe(tmp_path: Path) -> None:
    """In one that every user can write to, another could replace the socket; a sticky one prevents that."""
    assert "must exist" in (listen(tmp_path / "missing" / "socket").hint or "")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "every user" in listen(shared / "socket").message
    shared.chmod(0o1777)
    with unix_socket(shared / "socket", mode=0o600, backlog=BACKLOG):
        pass


# Accounts of users.


def test_root_and_the_own_user_have_the_administrators_account() -> None:
    """Both can read its token."""
    assert unix_accounts(()) == {0: "admin", UID: "admin"}


def test_listed_users_have_their_accounts() -> None:
    """By id or name; an entry also replaces that of root."""
    assert unix_accounts(("4001=build", "root=kitchen"))[4001] == "build"
    assert unix_accounts(("root=kitchen",))[0] == "kitchen"
    assert unix_accounts(("root",))[0] == "root"


@pytest.mark.parametrize("entries", [("no-such-user-here",), ("0=a", "root=b")])
def test_invalid_users_are_refused(entries: tuple[str, ...]) -> None:
    """Unknown ones, and two entries of one user."""
    with pytest.raises(InferenceCenterError) as caught:
        unix_accounts(entries)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_CONFIG, "auth.unix_users")


def test_user_of_other_namespaces_never_has_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports one id for all users that it cannot map."""
    overflow = tmp_path / "overflowuid"
    overflow.write_text(f"{UID}\n")
    monkeypatch.setattr(module, "_OVERFLOW_UID", overflow)
    assert UID not in {uid for uid in unix_accounts(()) if uid}
    with pytest.raises(InferenceCenterError, match="namespace"):
        unix_accounts((f"{UID}=kitchen",))


@pytest.mark.parametrize("entry", ["", "=a", "a=", "a b", "a=b=c", "a:b", "-x"])
def test_malformed_entries_are_refused(entry: str) -> None:
    """By the settings."""
    with pytest.raises(ValueError, match="unix_users"):
        AuthSettings(unix_users=(entry,))


def test_peer_is_its_user_id() -> None:
    """As the kernel reports it."""
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer_text(here) == unix_peer(UID)


# Clients.


def connect(path: Path, **options: Any) -> client.connect:
    """Open a socket."""
    return unix_connect(str(path), uri="ws://localhost/ws", **options)


async def http(path: Path, target: str, headers: str = "Host: localhost\r\n") -> tuple[int, dict[str, Any]]:
    """Send a GET request; return its status and JSON."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(f"GET {target} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


async def open_many(path: Path, sockets: list[ClientConnection]) -> None:
    """Open sockets until one is refused."""
    while True:
        sockets.append(await connect(path))


async def authenticate(socket: ClientConnection, **credential: Any) -> dict[str, Any]:
    """Read ``hello``, send ``auth``, and return the reply."""
    assert (await receive(socket))["op"] == "hello"
    return await ask(socket, op="auth", protocol=1, **credential)


async def test_token_counts_as_on_the_port(serve: Serve, path: Path) -> None:
    """A listed user may send one, and has the account of the token."""
    async with serve(unix_socket=path, unix_accounts={UID: "kitchen"}) as server, connect(path) as socket:
        answer = await authenticate(socket, token=server.token)
        assert (answer["op"], answer["client_id"]) == ("auth_success", "ada")


async def test_listed_user_needs_no_token(serve: Serve, path: Path) -> None:
    """By an ``auth`` without a credential, and with an HTTP request; the audit log has the user id."""
    async with serve(unix_socket=path, unix_accounts={UID: "ada"}) as server:
        async with connect(path) as socket:
            answer = await authenticate(socket)
            assert (answer["op"], answer["client_id"]) == ("auth_success", "ada")
            assert (await ask(socket, op="create_session"))["op"] == "session_created"
        status, _ = await http(path, "/v1/models")
        assert status == 200
        server.accounts.flush_audit()
        lines = server.accounts.audit_lines(last=10, event=AuditEvent.LOGIN)
        assert {line.address for line in lines} == {f"unix:{UID}"}


async def test_other_user_is_refused_and_counted(serve: Serve, path: Path) -> None:
    """The limit of failed logins is that of the user, and not that of addresses."""
    async with serve(unix_socket=path, login_attempts_per_minute=1) as server:
        assert (await http(path, "/v1/models"))[0] == 401
        async with connect(path) as socket:
            answer = await authenticate(socket)
            assert answer["op"] == "auth_failed"
        async with connect(path) as socket:
            answer = await authenticate(socket, token=server.token)
            assert answer["retry_after_ms"] > 0
        async with server.v1() as client:
            assert (await receive(client))["op"] == "auth_success"


async def test_port_demands_a_credential(serve: Serve, path: Path) -> None:
    """Loopback has no credentials of peers."""
    async with serve(unix_socket=path, unix_accounts={UID: "ada"}) as server, server.connect() as socket:
        answer = await authenticate(socket)
        assert answer["op"] == "error"
        assert "give either token, or client_id and api_key" in json.dumps(answer)
        assert (await server.http("/v1/models"))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        "Host: localhost\r\nX-Forwarded-For: 127.0.0.1\r\n",
        "Host: localhost\r\nVia: 1.1 proxy\r\n",
        "Host: example.org\r\n",
        "Host: localhost\r\nOrigin: http://localhost\r\n",
    ],
)
async def test_proxy_does_not_lend_its_user(serve: Serve, path: Path, headers: str) -> None:
    """A request that a proxy or a browser has sent needs a token, and no address in it is trusted."""
    trusted = {"trusted_proxies": ("0.0.0.0/0", "::/0")}
    async with serve(unix_socket=path, unix_accounts={UID: "ada"}, **trusted) as server:
        assert (await http(path, "/v1/models", headers))[0] == 401
        with_token = f"{headers}Authorization: Bearer {server.token}\r\n"
        assert (await http(path, "/v1/models", with_token))[0] == 200
        server.accounts.flush_audit()
        (line,) = server.accounts.audit_lines(last=10, event=AuditEvent.LOGIN)
        assert line.address == f"unix:{UID}"


async def test_metrics_count_the_peer_as_local(serve: Serve, path: Path) -> None:
    """``server.metrics_access`` is about programs on this machine."""
    async with serve(unix_socket=path, metrics_access="loopback"):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize(("networks", "op"), [(("127.0.0.0/8",), "auth_success"), (("10.0.0.0/8",), "auth_failed")])
async def test_addresses_of_a_token_include_the_socket_with_loopback(
    serve: Serve, path: Path, networks: tuple[str, ...], op: str
) -> None:
    """A program on the socket is one on this machine."""
    async with serve(unix_socket=path, limits=AccessLimits(addresses=networks)) as server, connect(path) as socket:
        assert (await authenticate(socket, token=server.token))["op"] == op


async def test_unauthenticated_sockets_of_a_user_are_limited(serve: Serve, path: Path) -> None:
    """One more closes the user's oldest, and too many at once are refused."""
    async with serve(unix_socket=path, max_unauthenticated_per_address=2, unauthenticated_per_s=1):
        sockets = [await connect(path) for _ in range(3)]
        assert await close_code(sockets[0]) == 4429
        with pytest.raises(InvalidStatus, match="429"):
            await open_many(path, sockets)
        for each in sockets:
            await each.close()


@pytest.mark.parametrize("change", ["deleted", "other scopes"])
async def test_socket_of_a_changed_account_is_closed(serve: Serve, path: Path, change: str) -> None:
    """As one of a revoked token is."""
    async with serve(unix_socket=path, unix_accounts={UID: "guest"}) as server:
        server.accounts.ensure_client("guest", max_sessions=2, priority="normal")
        async with connect(path) as socket, server.v1() as other:
            assert (await authenticate(socket))["op"] == "auth_success"
            server.context.tokens_changed()
            assert (await ask(socket, op="ping"))["op"] == "pong"
            if change == "deleted":
                server.accounts.remove_client("guest")
            else:
                server.accounts.change_client("guest", scopes=("user", "operator"))
            server.context.tokens_changed()
            assert await close_code(socket) == 4401
            await receive(other)
            assert (await ask(other, op="ping"))["op"] == "pong"


async def test_paths_need_no_prefix_of_a_reverse_proxy(serve: Serve, path: Path) -> None:
    """Clients of the socket need not know ``server.base_path``; with it paths work, too."""
    async with serve(unix_socket=path, base_path="/inference", unix_accounts={UID: "ada"}) as server:
        for target in ("/v1/models", "/inference/v1/models"):
            assert (await http(path, target))[0] == 200
        async with connect(path) as socket:
            assert (await authenticate(socket))["op"] == "auth_success"
        assert (await server.http("/v1/models"))[0] == 404


OTHER_USER = """
import asyncio, json, os, sys
from websockets.asyncio.client import unix_connect
async def main():
    os.setuid(54321)
    async with unix_connect(sys.argv[1], uri="ws://localhost/ws") as socket:
        await socket.recv()
        await socket.send(json.dumps({"op": "auth", "protocol": 1}))
        print(json.loads(await socket.recv())["op"])
asyncio.run(main())
"""


@pytest.mark.skipif(UID != 0, reason="only root can run a program as another user")
@pytest.mark.parametrize(("listed", "answer"), [({54321: "ada"}, "auth_success"), ({0: "ada"}, "auth_failed")])
async def test_user_of_the_connecting_process_counts(
    serve: Serve, open_directory: Path, listed: dict[int, str], answer: str
) -> None:
    """Not the one of the daemon."""
    async with serve(unix_socket=open_directory / "socket", unix_socket_mode="0666", unix_accounts=listed):
        program = [sys.executable, "-c", OTHER_USER, str(open_directory / "socket")]
        output = await asyncio.to_thread(subprocess.check_output, program, text=True)
        assert output.strip() == answer
