"""Tests of pages of other origins: those that may connect may ask and read, others may neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.api.app import OPERATIONS
from tests.api.asking import post, request

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.api.asking import Heard
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

APP = "https://app.example.org"
ALLOWED = (APP, "chrome-extension://abc")


async def preflight(server: Running, origin: str, path: str = "/generate", **headers: str) -> Heard:
    """Ask as a browser does before it sends what is no plain form."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", **headers}
    return await request(server, "OPTIONS", path, headers=asked, token=None)


def grants(heard: Heard) -> dict[str, str]:
    """Return what an answer grants to pages."""
    return {name: value for name, value in heard.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", ALLOWED)
@pytest.mark.parametrize("path", sorted({row.path for row in OPERATIONS}))
async def test_a_page_of_an_allowed_origin_may_ask(serve: Serve, origin: str, path: str) -> None:
    """The preflight names the origin, the methods and the headers, needs no token, and grants no credentials."""
    wanted = {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-os"}
    async with serve(allowed_origins=ALLOWED) as server:
        heard = await preflight(server, origin, path.replace("{", "").replace("}", ""), **wanted)
    assert (heard.status, heard.body, heard.headers["vary"]) == (204, b"", "Origin")
    methods = {row.method for row in OPERATIONS if row.path == path}
    assert grants(heard) == {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": ", ".join(sorted(methods)),
        "access-control-allow-headers": "authorization, content-type, x-stainless-os",
        "access-control-max-age": "600",
    }


async def test_and_may_read_the_answer(serve: Serve) -> None:
    """Answers and errors name the origin alike."""
    async with serve(allowed_origins=ALLOWED) as server:
        right = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": APP})
        wrong = await post(server, "/tokenize", {"text": 1}, headers={"Origin": APP})
        unknown = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": APP}, token=None)
    assert [heard.status for heard in (right, wrong, unknown)] == [200, 400, 401]
    for heard in (right, wrong, unknown):
        assert grants(heard)["access-control-allow-origin"] == APP
        assert "retry-after" in grants(heard)["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in heard.headers
        assert heard.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.org.evil.example", "null", "*", ""])
async def test_a_page_of_another_origin_may_neither_ask_nor_read(serve: Serve, origin: str) -> None:
    """Nothing is granted, and what it sends all the same is refused as an upgrade of it would be."""
    async with serve(allowed_origins=ALLOWED) as server:
        asked = await preflight(server, origin)
        sent = await post(server, "/tokenize", {"text": "a"}, headers={"Origin": origin})
    assert (asked.status, grants(asked)) == (405, {})
    assert (sent.status, grants(sent)) == (403, {})


async def test_the_daemons_own_pages_and_programs_need_no_grant(server: Running) -> None:
    """Its own origin may connect whatever the settings say; without Origin nothing is said of origins."""
    own = f"http://127.0.0.1:{server.port}"
    assert (await post(server, "/tokenize", {"text": "a"}, headers={"Origin": own})).status == 200
    assert grants(await post(server, "/tokenize", {"text": "a"})) == {}


async def test_what_a_preflight_asks_for_cannot_write_headers_of_ours(serve: Serve) -> None:
    """Only names of headers come back, and not endlessly many."""
    async with serve(allowed_origins=ALLOWED) as server:
        names = "authorization, bad name, x\x01y, " + "a" * 100 + ", " + ", ".join(f"x-{n}" for n in range(200))
        heard = await preflight(server, APP, **{"Access-Control-Request-Headers": names})
    allowed = heard.headers["access-control-allow-headers"].split(", ")
    assert allowed[:2] == ["authorization", "x-0"]
    assert len(allowed) < 70


async def test_options_without_a_preflight_is_a_method_as_any(serve: Serve) -> None:
    """It is 405, with what the address takes."""
    async with serve(allowed_origins=ALLOWED) as server:
        heard = await request(server, "OPTIONS", "/generate", headers={"Origin": APP})
    assert (heard.status, heard.headers["allow"]) == (405, "POST")
