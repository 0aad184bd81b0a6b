"""Requests to Ollama's API without a token, and the port that its clients look for."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from inferencecenter.api.app import create_app
from inferencecenter.api.operations import api_routes
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.listener import OLLAMA_ADDRESS, Listener, bind, bind_ollama
from tests.api.http_client import exchange, post, request

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

TAGS = "/api/tags"


async def test_token_is_required_by_default(server: Running) -> None:
    """The error is in Ollama's format, on this machine too."""
    response = await request(server, "GET", TAGS, token=None)
    assert response.status == 401
    assert list(response.json) == ["error"]


async def test_local_program_needs_no_token_if_an_account_is_named(serve: Serve) -> None:
    """It acts for that account, with the scope ``user`` only."""
    async with serve(ollama_account="desk") as server:
        assert (await request(server, "GET", TAGS, token=None)).status == 200
        body = {"model": "stub", "keep_alive": 0}
        assert (await post(server, "/api/generate", body, token=None)).status == 403
        assert server.engine.unloaded == []


async def test_other_interfaces_require_a_token_still(serve: Serve) -> None:
    """The account is for Ollama's API."""
    async with serve(ollama_account="desk") as server:
        assert (await request(server, "GET", "/v1/models", token=None)).status == 401


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For: 192.0.2.1", "Forwarded: for=192.0.2.1", "Via: 1.1 proxy", "Origin: https://example.org"],
)
async def test_marked_requests_require_a_token(serve: Serve, header: str) -> None:
    """Requests of a proxy or a web page do not come from a local program."""
    async with serve(ollama_account="desk") as server:
        name, _, value = header.partition(": ")
        response = await request(server, "GET", TAGS, token=None, headers={name: value})
        assert response.status in (401, 403)


async def test_page_that_resolves_its_name_to_this_machine_is_refused(serve: Serve) -> None:
    """The ``Host`` must be a loopback name."""
    async with serve(ollama_account="desk") as server:
        asked = f"GET {TAGS} HTTP/1.1\r\nHost: example.org:{server.port}\r\nConnection: close\r\n\r\n"
        assert (await exchange(server.port, asked.encode())).status == 401


async def test_invalid_token_is_refused_despite_the_local_account(serve: Serve) -> None:
    """A credential is checked if there is one."""
    async with serve(ollama_account="desk") as server:
        assert (await request(server, "GET", TAGS, token="ic_wrong")).status == 401


async def test_account_that_does_not_exist_admits_no_request(serve: Serve) -> None:
    """The error names the setting."""
    async with serve(ollama_account="missing") as server:
        response = await request(server, "GET", TAGS, token=None)
        assert response.status == 401
        assert "server.ollama_account" in response.json["error"]


@pytest.mark.parametrize("path", ["/api/me", "/api/", "/api/blobs/a%2Fb"])
async def test_unknown_path_is_refused_in_ollamas_format(server: Running, path: str) -> None:
    """Clients read an error from JSON."""
    response = await request(server, "POST", path)
    assert (response.status, list(response.json)) == (404, ["error"])
    assert "no such path" in response.json["error"]


def test_port_that_is_taken_names_the_setting() -> None:
    """Ollama may run already."""
    (taken,) = bind("127.0.0.1", 0)
    with taken, pytest.raises(InferenceCenterError) as caught:
        bind_ollama(*taken.getsockname())
    assert (caught.value.code, caught.value.field) == (ErrorCode.ADDRESS_IN_USE, "server.ollama")
    assert OLLAMA_ADDRESS == ("127.0.0.1", 11434)


async def test_plain_socket_of_a_server_with_tls(serve: Serve) -> None:
    """Clients of Ollama speak plain HTTP, whatever the daemon's own port does, and look for Ollama's words."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    async with serve() as server:
        (own,), (plain,) = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        ports = [each.getsockname()[1] for each in (own, plain)]
        second = Listener(
            create_app(server.context, *api_routes(server.context)),
            server.context.settings,
            drain=_nothing,
            tls=tls,
            ollama=[plain],
        )
        serving = asyncio.gather(second.serve([own, plain]))
        try:
            asked = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            running = await exchange(ports[1], asked)
            assert (running.status, running.body) == (200, b"Ollama is running")
            running = await exchange(ports[1], asked.replace(b"GET", b"HEAD"))
            assert (running.status, running.body, running.headers["content-length"]) == (200, b"", "17")
            client = ssl.create_default_context()
            authority.configure_trust(client)
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0], ssl=client)
            writer.write(asked)
            assert b'"server":"inferencecenter"' in await reader.read()
            writer.close()
        finally:
            second.stop()
            await serving


async def _nothing(*_: Any) -> None:
    pass
