"""Views for operators: the dashboard and the models."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.e2e.harness import ENDLESS, command_line, connect_client
from tests.web.browser import MARKS, origin_of, signed_in, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS


async def reading(visit: Visit, label: str) -> float:
    """Return the number on a tile of the dashboard."""
    text = await visit.page.get_by_role("term").filter(has_text=re.compile(f"^{label}$")).locator("+ dd b").inner_text()
    return float(text.split()[0].replace(",", ""))


async def test_dashboard_is_live(browser: Browser, daemon: Daemon) -> None:
    """Slots and tokens are counted in tiles, charts and the table while a turn runs."""
    async with signed_in(browser, daemon) as visit, connect_client(daemon) as client:
        session = await client.create(params=ENDLESS)
        await visit.button("Dashboard").click()
        slots = visit.page.get_by_role("term").filter(has_text="Slots in use").locator("+ dd")
        await expect(slots).to_contain_text("0 of")
        before = await reading(visit, "Generated")
        await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.")
        await expect(slots).to_contain_text("1 of")
        await expect(visit.page.locator("canvas").first).to_be_visible()
        await expect(visit.page.get_by_text(re.compile(r"^Ready$"))).to_be_visible()
        await client.send(op="abort", session_id=session)
        await client.until(lambda message: message["op"] == "end")
        await expect(slots).to_contain_text("0 of")
        assert await reading(visit, "Generated") > before
        assert await reading(visit, "Tokens per second") > 0
        await visit.button("As a table").click()
        table = visit.page.get_by_role("region", name="Metrics as a table")
        await expect(table.get_by_role("row", name=re.compile("^Tokens per second"))).to_contain_text(
            re.compile(r"[1-9]")
        )


async def test_model_management(browser: Browser, daemon: Daemon) -> None:
    """An operator unloads and loads a model; other users only see it."""
    made = await asyncio.to_thread(command_line, daemon, "token", "create", "onlooker")
    async with visiting(browser, origin_of(daemon)) as visit:
        await visit.sign_in(made["token"])
        await visit.button("Models").click()
        await expect(visit.page.get_by_text("In memory")).to_be_visible()
        assert await visit.page.get_by_role("button", name=re.compile("^(Unload|Load|Switch)")).count() == 0
    async with signed_in(browser, daemon) as visit:
        await visit.button("Models").click()
        await visit.page.get_by_role("button", name=re.compile("^Unload")).click()
        await expect(visit.page.get_by_text("In memory")).to_have_count(0)
        await visit.page.get_by_role("button", name=re.compile("^Load")).click()
        await expect(visit.page.get_by_text("In memory")).to_be_visible()
