"""The installed page, and what it shows without a connection."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.e2e.harness import run_daemon
from tests.web.browser import MARKS, barriers, origin_of, visiting
from tests.web.conftest import ECHO

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

ACTIVE = """async () => {
  const { active } = await navigator.serviceWorker.ready;
  if (active.state !== "activated") await new Promise((resolve) => active.addEventListener("statechange", resolve));
  return active.scriptURL;
}"""
CACHED = """async () => {
  const found = {};
  for (const name of await caches.keys()) found[name] = (await (await caches.open(name)).keys()).map(({ url }) => url);
  return found;
}"""
OTHERS = """(async () => {
  await (await caches.open("inferencecenter /web/old/")).put("/old", new Response("old"));
  await (await caches.open("of another program")).put("/other", new Response("other"));
})()"""


async def test_manifest_names_what_exists(browser: Browser, echo: Daemon) -> None:
    """Chromium finds no error in it, and all icons have their sizes."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go()
        session = await visit.page.context.new_cdp_session(visit.page)
        found = await session.send("Page.getAppManifest")
        assert found["errors"] == []
        manifest = json.loads(found["data"])
        for icon in manifest["icons"]:
            address = found["url"].rpartition("/")[0] + "/" + icon["src"]
            size = "async (src) => { const i = new Image(); i.src = src; await i.decode(); return i.naturalWidth; }"
            width = await visit.page.evaluate(size, address)
            assert icon["sizes"] in ("any", f"{width}x{width}")


async def test_caches_of_other_versions_are_dropped(browser: Browser, echo: Daemon) -> None:
    """The starting worker deletes them; caches of other programs on this origin stay."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.add_init_script(OTHERS)
        await visit.go()
        script = await visit.page.evaluate(ACTIVE)
        version = script.removeprefix(origin_of(echo)).removesuffix("offline.sw.js")
        held = await visit.page.evaluate(CACHED)
        assert set(held) == {f"inferencecenter {version}", "of another program"}


async def test_page_says_that_it_is_offline(browser: Browser, tmp_path: Path, demo_model_path: Path) -> None:
    """It does so in the user's language, and retries; only files of the page, of this version, are cached."""
    with run_daemon(tmp_path / "state", demo_model_path, **ECHO) as daemon:
        async with visiting(browser, origin_of(daemon), locale="de-DE") as visit:
            await visit.go(f"#token={daemon.admin_token}")
            await expect(visit.page.get_by_role("textbox", name="Nachricht")).to_be_visible()
            script = await visit.page.evaluate(ACTIVE)
            folder = script.removesuffix("offline.sw.js")
            ((_, urls),) = (await visit.page.evaluate(CACHED)).items()
            assert sorted(urls) == [
                f"{folder}css/base.css?offline",
                f"{folder}js/offline.js?offline",
                f"{folder}offline.html",
            ]
            visit.expected = "ERR_CONNECTION_REFUSED|WebSocket"
            await asyncio.to_thread(daemon.stop)
            await visit.page.reload()
            await expect(visit.page.get_by_text("nicht erreichbar")).to_be_visible()
            assert await barriers(visit) == []
            async with visit.page.expect_navigation():
                await visit.button("Erneut versuchen").click()
            await expect(visit.page.get_by_text("nicht erreichbar")).to_be_visible()
