"""Cross-origin requests: pages of allowed origins may send and read, pages of other origins may do neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.api.operations import OPERATIONS
from tests.api.http_client import post, request

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.api.http_client import HttpResponse
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

APP = "https://app.example.org"
ALLOWED = (APP, "chrome-extension://abc")


async def preflight(server: Running, origin: str, path: str = "/generate", **headers: str) -> HttpResponse:
    """Send a CORS preflight request."""
    sent = {"Origin": origin, "Access-Control-Request-Method": "POST", **headers}
    return await request(server, "OPTIONS", path, headers=sent, token=None)


def cors_headers_of(response: HttpResponse) -> dict[str, str]:
    """Return the CORS headers of a response."""
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", ALLOWED)
@pytest.mark.parametrize("path", sorted({row.path for row in OPERATIONS}))
async def test_preflight_of_allowed_origin_is_granted(serve: Serve, origin: str, path: str) -> None:
    """The grant names origin, methods and headers, needs no token, and allows no credentials."""
    wanted = {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-os"}
    async with serve(allowed_origins=ALLOWED) as server:
        response = await preflight(server, origin, path.replace("{", "").replace("}", ""), **wanted)
    assert (response.status, response.body, response.headers["vary"]) == (204, b"", "Origin")
    methods = {row.method for row in OPERATIONS if row.path == path}
    assert cors_headers_of(response) == {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": ", ".join(sorted(methods)),
        "access-control-allow-headers": "authorization, content-type, x-stainless-os",
        "access-control-max-age": "600",
    }


async def test_responses_to_allowed_origin_are_readable(serve: Serve) -> None:
    """Answers and errors name the origin alike."""
    async with serve(allowed_origins=ALLOWED) as server:
        right = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": APP})
        wrong = await post(server, "/tokenize", {"text": 1}, headers={"Origin": APP})
        unknown = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": APP}, token=None)
    assert [response.status for response in (right, wrong, unknown)] == [200, 400, 401]
    for response in (right, wrong, unknown):
        assert cors_headers_of(response)["access-control-allow-origin"] == APP
        assert "retry-after" in cors_headers_of(response)["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers
        assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.org.evil.example", "null", "*", ""])
async def test_other_origin_is_refused(serve: Serve, origin: str) -> None:
    """Nothing is granted, and a request is refused like an upgrade from that origin."""
    async with serve(allowed_origins=ALLOWED) as server:
        refused = await preflight(server, origin)
        sent = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": origin})
    assert (refused.status, cors_headers_of(refused)) == (405, {})
    assert (sent.status, cors_headers_of(sent)) == (403, {})


async def test_own_pages_and_programs_need_no_grant(server: Running) -> None:
    """The daemon's own origin is always allowed; without Origin no CORS header is sent."""
    own = f"http://127.0.0.1:{server.port}"
    assert (await post(server, "/tokenize", {"text": "a"}, headers={"Origin": own})).status == 200
    assert cors_headers_of(await post(server, "/tokenize", {"text": "a"})) == {}


async def test_preflight_cannot_inject_headers(serve: Serve) -> None:
    """Only a limited number of valid header names is echoed."""
    async with serve(allowed_origins=ALLOWED) as server:
        names = "authorization, bad name, x\x01y, " + "a" * 100 + ", " + ", ".join(f"x-{n}" for n in range(200))
        response = await preflight(server, APP, **{"Access-Control-Request-Headers": names})
    allowed = response.headers["access-control-allow-headers"].split(", ")
    assert allowed[:2] == ["authorization", "x-0"]
    assert len(allowed) < 70


async def test_options_without_preflight_headers_is_405(serve: Serve) -> None:
    """The response lists the allowed methods."""
    async with serve(allowed_origins=ALLOWED) as server:
        response = await request(server, "OPTIONS", "/generate", headers={"Origin": APP})
    assert (response.status, response.headers["allow"]) == (405, "POST")
