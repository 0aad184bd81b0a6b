"""Conversations in several tabs, and a server newer than the page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, said, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser, WebSocketRoute

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS


async def test_lists_are_synchronised(browser: Browser, echo: Daemon) -> None:
    """Creating, renaming and deleting in one tab updates the other without a request."""
    async with signed_in(browser, echo) as one, signed_in(browser, echo) as two:
        await two.page.clock.install()
        await two.page.clock.pause_at(await two.page.evaluate("Date.now() + 1000"))
        await one.ask("Seen from both.")
        await one.answered()
        await expect(two.conversation("Seen from both.")).to_be_visible()
        await one.conversation("Seen from both.").press("F2")
        await one.page.get_by_role("textbox", name="Title").fill("Another name")
        await one.page.keyboard.press("Enter")
        await expect(two.conversation("Another name")).to_be_visible()
        await one.conversation("Another name").press("Delete")
        await one.button("Delete", inside=one.page.get_by_role("dialog")).click()
        await expect(two.conversation("Another name")).to_have_count(0)
        await expect(one.questions).to_have_count(0)


async def test_deleted_in_another_tab(browser: Browser, echo: Daemon) -> None:
    """The tab says so at once; its text stays readable, and a draft moves to a new conversation."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Soon gone.")
        await visit.answered()
        await visit.composer.fill("Not sent yet")
        async with connect_client(echo) as client:
            await client.ask(op="close_session", session_id=visit.session_id())
        told = visit.page.get_by_role("status").filter(has_text="was deleted elsewhere")
        await expect(told).to_be_visible()
        await expect(visit.conversation("Soon gone.")).to_have_count(0)
        await expect(visit.composer).to_have_value("Not sent yet")
        await expect(visit.composer).to_be_disabled()
        await expect(visit.page.get_by_role("heading", name="Soon gone.")).to_be_visible()
        assert await said(visit.answers.first) == "Soon gone."
        await visit.button("New chat", inside=told).click()
        await expect(visit.questions).to_have_count(0)
        await expect(visit.composer).to_have_value("Not sent yet")
        await visit.button("Send").click()
        assert await said(await visit.answered()) == "Not sent yet"


async def test_deleted_during_an_answer(browser: Browser, echo: Daemon) -> None:
    """The answer stops, and the tab says why."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Many words. " * 200)
        await expect(visit.answers.first).to_contain_text("Many words. Many")
        async with connect_client(echo) as client:
            await client.ask(op="close_session", session_id=visit.session_id())
        await expect(visit.page.get_by_text("was deleted elsewhere")).to_be_visible()
        await expect(await visit.answered()).to_contain_text("Many words.")


async def test_drafts_survive_a_reload(browser: Browser, echo: Daemon) -> None:
    """Each conversation has its own draft, and a sent one leaves none."""
    async with signed_in(browser, echo) as visit:
        await visit.composer.fill("For a new one")
        await visit.page.reload()
        await expect(visit.composer).to_have_value("For a new one")
        await visit.button("Send").click()
        await visit.answered()
        await visit.composer.fill("For this one")
        await visit.page.reload()
        await expect(visit.composer).to_have_value("For this one")
        await visit.page.get_by_role("navigation").get_by_role("button", name="New chat").click()
        await expect(visit.composer).to_have_value("")


async def reconnect_to_newer_version(visit: Visit) -> WebSocketRoute:
    """Route the page's next socket to a server of another version; return that version."""
    routes: list[WebSocketRoute] = []

    def connect(route: WebSocketRoute) -> None:
        routes.append(route)
        version = f"99.0.{len(routes)}"
        server = route.connect_to_server()
        server.on_message(lambda text: route.send(re.sub(r'("version":)"[^"]*"', rf'\1"{version}"', str(text))))

    await visit.page.route_web_socket("**/ws", connect)
    await visit.page.reload()
    await expect(visit.composer).to_be_visible()
    await expect(visit.page.get_by_text("The server has been updated")).to_have_count(0)
    return routes[0]


async def test_newer_server_offers_a_reload(browser: Browser, echo: Daemon) -> None:
    """The draft is kept."""
    async with signed_in(browser, echo) as visit:
        socket = await reconnect_to_newer_version(visit)
        await visit.composer.fill("Half a question")
        await socket.close(code=1012, reason="")
        await expect(visit.page.get_by_text("The server has been updated.")).to_be_visible()
        await visit.button("Reload").click()
        await expect(visit.page.get_by_text("The server has been updated.")).to_have_count(0)
        await expect(visit.composer).to_have_value("Half a question")


async def test_missing_module_offers_a_reload(browser: Browser, echo: Daemon) -> None:
    """Modules of an old version cannot be loaded any more."""
    async with signed_in(browser, echo) as visit:
        visit.expected = "404"
        await visit.page.route("**/js/views/dashboard.js", lambda route: route.fulfill(status=404))
        await visit.button("Dashboard").click()
        await expect(visit.page.get_by_text("could not be loaded")).to_be_visible()
        await visit.page.unroute("**/js/views/dashboard.js")
        await visit.button("Reload").click()
        await expect(visit.page.get_by_role("heading", name="Dashboard")).to_be_visible()
