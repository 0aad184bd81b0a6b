"""Tests of what the page costs: bytes before it is seen, and work while a long answer grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.web.browser import MARKS, origin_of, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

FIRST_PAINT_BYTES = 150 * 1024


async def test_the_first_paint_is_light(browser: Browser, echo: Daemon) -> None:
    """From an empty cache to a conversation that one can write in; and from a full one next to nothing is fetched."""
    async with visiting(browser, origin_of(echo)) as visit:
        session = await visit.page.context.new_cdp_session(visit.page)
        received: list[float] = []
        session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        await session.send("Network.enable")
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.composer).to_be_visible()
        await visit.page.wait_for_load_state("networkidle")
        cold = sum(received)
        assert 10 * 1024 < cold <= FIRST_PAINT_BYTES, f"{len(received)} files, {cold / 1024:.0f} KiB"
        received.clear()
        await visit.page.reload()
        await expect(visit.composer).to_be_visible()
        await visit.page.wait_for_load_state("networkidle")
        assert sum(received) < FIRST_PAINT_BYTES / 10
