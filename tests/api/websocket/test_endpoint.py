"""Upgrades: authentication methods, limits and refusals."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from inferencecenter.client.errors import TryLaterError
from inferencecenter.client.options import Address
from inferencecenter.client.retry import is_final
from inferencecenter.client.transport import open_transport
from inferencecenter.protocol import requests
from inferencecenter.server.connection_limits import BURST_S
from tests.server.harness import Running, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

V1 = Subprotocol("inferencecenter.v1")


async def refused(server: Running, path: str = "/", **options: Any) -> tuple[int, dict[str, Any], Any]:
    """Try to connect; return the status, JSON body and headers of the refusal."""
    with pytest.raises(InvalidStatus) as caught:
        async with server.connect(path, **options):
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b""), response.headers


@pytest.mark.parametrize("path", ["/", "/ws", "/api/inference", "/api/inference/"])
async def test_every_path_sends_hello_first(server: Running, path: str) -> None:
    """An unauthenticated socket receives the hello of the first protocol."""
    async with server.connect(path) as socket:
        hello = await receive(socket)
    assert set(hello) == {"op", "status", "message", "uptime_seconds", "requires_auth"}
    assert (hello["op"], hello["status"], hello["requires_auth"]) == ("hello", "ready", True)


async def test_base_path_prefixes_every_address(serve: Serve) -> None:
    """Below a base path the bare paths do not exist."""
    async with serve(base_path="/llm") as server:
        for path in ("/llm", "/llm/", "/llm/ws", "/llm/api/inference"):
            async with server.connect(path) as socket:
                assert (await receive(socket))["op"] == "hello"
        assert (await server.http("/llm/healthz"))[0] == 200
        assert (await server.http("/healthz"))[0] == 404
        with pytest.raises(InvalidStatus):
            await server.connect("/ws")


async def test_token_in_a_frame(server: Running) -> None:
    """A v1 socket receives all fields of its account."""
    async with server.connect() as socket:
        await receive(socket)
        answer = await ask(socket, op="auth", token=server.token, protocol=1, id="a1")
    assert answer == {
        "op": "auth_success",
        "id": "a1",
        "client_id": "ada",
        "max_sessions": 8,
        "scopes": ["user"],
        "priority": "normal",
        "limits": {"max_sessions": 8, "max_connections": 32},
    }


async def test_key_in_a_frame(server: Running) -> None:
    """The first protocol's id and key are answered with the first protocol's fields."""
    async with server.connect() as socket:
        await receive(socket)
        answer = await ask(socket, op="AUTH", client_id="kitchen", api_key="kitchen-key")
    assert answer == {"op": "auth_success", "client_id": "kitchen", "max_sessions": 3}


async def test_bearer_token_in_the_upgrade(server: Running) -> None:
    """The first frame is auth_success; without the subprotocol the first protocol applies."""
    async with server.connect(additional_headers={"Authorization": f"bearer {server.token}"}) as socket:
        assert await receive(socket) == {"op": "auth_success", "client_id": "ada", "max_sessions": 8}


async def test_key_in_the_upgrade(server: Running) -> None:
    """X-Client-ID and X-API-Key belong together."""
    headers = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    async with server.connect(additional_headers=headers) as socket:
        assert (await receive(socket))["client_id"] == "kitchen"


async def test_token_as_subprotocol(server: Running) -> None:
    """Browsers send the token as a second subprotocol, and only the protocol name is selected."""
    async with server.connect(subprotocols=[V1, Subprotocol(f"token.{server.token}")]) as socket:
        assert socket.subprotocol == V1
        assert (await receive(socket))["scopes"] == ["user"]


async def test_subprotocol_selects_v1(server: Running) -> None:
    """The first hello then has all fields."""
    async with server.connect(subprotocols=[V1]) as socket:
        hello = await receive(socket)
    assert (hello["protocol"], hello["model"], hello["limits"]["max_frame_bytes"]) == (1, "stub", 2**20)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Authorization": "Bearer ic_000000000000_00"}, "not valid"),
        ({"Authorization": "Basic YWRhOmFkYQ=="}, "not a bearer token"),
        ({"Authorization": "Bearer"}, "not a bearer token"),
        ({"X-Client-ID": "kitchen", "X-API-Key": "wrong"}, "not valid"),
        ({"X-Client-ID": "unknown", "X-API-Key": "kitchen-key"}, "not valid"),
        ({"X-Client-ID": "kitchen"}, "X-API-Key is missing"),
        ({"X-API-Key": "kitchen-key"}, "not valid"),
    ],
)
async def test_wrong_credential_is_401(server: Running, headers: dict[str, str], words: str) -> None:
    """The upgrade is refused before a socket exists."""
    status, body, answer = await refused(server, additional_headers=headers)
    assert (status, body["code"], body["retryable"]) == (401, "not_authenticated", False)
    assert words in body["message"]
    assert answer["WWW-Authenticate"] == "Bearer"


async def test_wrong_token_as_subprotocol_is_401(server: Running) -> None:
    """It is a credential like the others."""
    status, _, _ = await refused(server, subprotocols=[V1, Subprotocol("token.ic_000000000000_00")])
    assert status == 401


@pytest.mark.parametrize("name", ["token", "access_token", "api_key"])
async def test_secret_in_query_is_refused(server: Running, name: str) -> None:
    """A valid token is refused there with the supported methods, and is not repeated."""
    status, body, _ = await refused(server, f"/ws?{name}={server.token}")
    assert (status, body["code"], body["field"]) == (400, "invalid_request", name)
    assert "Authorization: Bearer" in body["hint"]
    assert server.token not in json.dumps(body)


@pytest.mark.parametrize("origin", ["http://127.0.0.1:{port}", "https://friend.example"])
async def test_allowed_origins_connect(serve: Serve, origin: str) -> None:
    """The daemon's own host and the configured origins are allowed."""
    async with (
        serve(allowed_origins=("https://friend.example",)) as server,
        server.connect(origin=origin.format(port=server.port)) as socket,
    ):
        assert (await receive(socket))["op"] == "hello"


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null"])
async def test_other_origins_are_refused(server: Running, origin: str) -> None:
    """A credential does not change this, so a page cannot use the network position of its visitor."""
    status, body, _ = await refused(
        server, origin=origin, additional_headers={"Authorization": f"Bearer {server.token}"}
    )
    assert (status, body["code"], body["field"]) == (403, "forbidden", "Origin")


async def test_total_connections_are_limited(serve: Serve) -> None:
    """A further one is refused with 503 and a retry delay until another closes."""
    async with serve(max_connections=1) as server:
        async with server.v1() as socket:
            await receive(socket)
            status, body, headers = await refused(server)
            assert (status, body["retryable"], headers["Retry-After"]) == (503, True, "1")
        await socket.wait_closed()
        async with server.connect() as socket:
            assert (await receive(socket))["op"] == "hello"


async def test_unauthenticated_sockets_do_not_use_client_capacity(serve: Serve) -> None:
    """With many of them, clients still connect up to the limit and are refused at login beyond it."""
    async with serve(max_connections=1) as server, AsyncExitStack() as open_sockets:
        strangers = [await open_sockets.enter_async_context(server.connect()) for _ in range(10)]
        assert not server.context.hub.full
        client = await open_sockets.enter_async_context(server.v1())
        assert (await receive(client))["op"] == "auth_success"
        assert server.context.hub.full
        await receive(strangers[0])
        failed = await ask(strangers[0], op="auth", client_id="kitchen", api_key="kitchen-key")
        assert failed["op"] == "error"
        assert (await ask(client, op="ping"))["op"] == "pong"


def unauthenticated(server: Running) -> tuple[float | None, float | None]:
    """Return the number of unauthenticated sockets, and of those evicted."""
    value = server.context.metrics.registry.get_sample_value
    return value("inferencecenter_unauthenticated_connections"), value("inferencecenter_evicted_connections_total")


async def test_excess_unauthenticated_socket_evicts_the_oldest_of_its_address(serve: Serve) -> None:
    """Sockets of other addresses and authenticated ones stay."""
    async with (
        serve(max_unauthenticated_per_address=2, trusted_proxies=("127.0.0.1",)) as server,
        AsyncExitStack() as open_sockets,
    ):

        async def unauthenticated_socket(address: str) -> ClientConnection:
            headers = {"X-Forwarded-For": address}
            socket = await open_sockets.enter_async_context(server.connect(additional_headers=headers))
            await receive(socket)
            return socket

        other = await unauthenticated_socket("2001:db8:0:2::1")
        client, first, second = [await unauthenticated_socket(f"2001:db8:0:1::{n}") for n in range(1, 4)]
        assert await close_code(client) == 4429
        await ask(first, op="auth", token=server.token, protocol=1)
        third = await unauthenticated_socket("2001:db8:0:1::1")
        assert unauthenticated(server) == (3, 1)
        await unauthenticated_socket("2001:db8:0:1::9")
        assert await close_code(second) == 4429
        for socket in (third, other):
            assert (await ask(socket, op="auth", token=server.token))["op"] == "auth_success"
        assert (await ask(first, op="ping"))["op"] == "pong"
        assert unauthenticated(server) == (1, 2)


async def test_total_unauthenticated_limit_evicts_the_oldest(serve: Serve) -> None:
    """A flood from many addresses keeps no new client out, and an evicted socket is closed at once."""
    async with (
        serve(max_unauthenticated=2, trusted_proxies=("127.0.0.1",)) as server,
        AsyncExitStack() as open_sockets,
    ):
        sockets = [
            await open_sockets.enter_async_context(
                server.connect(additional_headers={"X-Forwarded-For": f"192.0.2.{n}"})
            )
            for n in range(1, 5)
        ]
        assert [await close_code(socket) for socket in sockets[:2]] == [4429, 4429]
        for socket in sockets[2:]:
            assert (await receive(socket))["op"] == "hello"
        assert unauthenticated(server) == (2, 2)


async def test_unauthenticated_upgrades_are_rate_limited(serve: Serve) -> None:
    """The status is 429 with a delay that our client obeys; upgrades with a credential are accepted."""
    async with serve(unauthenticated_per_s=1) as server, AsyncExitStack() as open_sockets:

        async def connect_unauthenticated() -> None:
            while True:
                await open_sockets.enter_async_context(server.connect())

        async def connect_client_during_flood() -> None:
            while True:  # a slow machine may have accepted more by then
                await (await open_transport(address)).close()
                with suppress(InvalidStatus):
                    await open_sockets.enter_async_context(server.connect())

        with pytest.raises(InvalidStatus) as caught:
            await connect_unauthenticated()
        response = caught.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert json.loads(response.body or b"")["code"] == "rate_limited"
        value = server.context.metrics.registry.get_sample_value
        assert value("inferencecenter_refused_handshakes_total") == 1
        address = Address(
            url=f"ws://127.0.0.1:{server.port}/",
            credential=requests.Auth(op="auth", token=server.token),
            tls=None,
            open_timeout_s=60,
            keepalive_s=60,
        )
        with pytest.raises(TryLaterError) as later:
            await connect_client_during_flood()
        assert later.value.retry_after_ms == 1000
        assert not is_final(later.value)
        async with server.connect(additional_headers={"Authorization": f"Bearer {server.token}"}) as socket:
            assert (await receive(socket))["op"] == "auth_success"


async def test_authenticated_upgrades_are_not_rate_limited(serve: Serve) -> None:
    """A socket that authenticates in a frame no longer counts."""
    async with serve(unauthenticated_per_s=1) as server:
        for _ in range(3 * BURST_S):
            async with server.v1() as socket:
                await receive(socket)
        for _ in range(3 * BURST_S):
            async with server.connect() as socket:
                await receive(socket)
                assert (await ask(socket, op="auth", token=server.token))["op"] == "auth_success"


async def test_connections_per_client_are_limited(serve: Serve) -> None:
    """A further one is refused with 429 at the upgrade and 4429 after an auth frame; other clients connect."""
    async with serve(max_connections_per_client=1) as server, server.v1() as first:
        await receive(first)
        status, body, _ = await refused(server, additional_headers={"Authorization": f"Bearer {server.token}"})
        assert (status, body["code"]) == (429, "rate_limited")
        async with server.connect() as second:
            await receive(second)
            answer = await ask(second, op="auth", token=server.token)
            assert answer["op"] == "auth_failed"
            with pytest.raises(ConnectionClosed) as caught:
                await receive(second)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 4429
        async with server.connect() as other:
            await receive(other)
            assert (await ask(other, op="auth", client_id="kitchen", api_key="kitchen-key"))["op"] == "auth_success"


async def test_closed_connection_releases_its_slot(serve: Serve) -> None:
    """The client's connection count decreases."""
    async with serve(max_connections_per_client=1) as server:
        for _ in range(3):
            async with server.v1() as socket:
                await receive(socket)
            await socket.wait_closed()


async def test_failed_logins_lock_out_an_address(serve: Serve) -> None:
    """Valid credentials are refused too, with the remaining time."""
    async with serve(login_attempts_per_minute=2) as server:
        for _ in range(2):
            assert (await refused(server, additional_headers={"Authorization": "Bearer x"}))[0] == 401
        status, body, headers = await refused(server, additional_headers={"Authorization": f"Bearer {server.token}"})
        assert (status, body["code"]) == (429, "rate_limited")
        assert 0 < body["retry_after_ms"] <= 30_000
        assert 0 < int(headers["Retry-After"]) <= 30


async def test_failed_logins_behind_a_trusted_proxy_count_by_client_address(serve: Serve) -> None:
    """One visitor's failures do not lock out another."""
    async with serve(login_attempts_per_minute=1, trusted_proxies=("127.0.0.1",)) as server:
        bad = {"Authorization": "Bearer x", "X-Forwarded-For": "192.0.2.1"}
        assert (await refused(server, additional_headers=bad))[0] == 401
        assert (await refused(server, additional_headers=bad))[0] == 429
        good = {"Authorization": f"Bearer {server.token}", "X-Forwarded-For": "192.0.2.2"}
        async with server.connect(additional_headers=good) as socket:
            assert (await receive(socket))["op"] == "auth_success"
