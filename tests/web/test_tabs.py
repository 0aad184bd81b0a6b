"""Tests of what one tab hears of conversations that another has, and of a server that is newer than the page."""

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


async def test_lists_follow_each_other(browser: Browser, echo: Daemon) -> None:
    """Creating, renaming and deleting in one tab updates the list of the other without a request."""
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
    """The tab that shows it says so at once; what was said stays to be read, what was typed goes into a new one."""
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


async def test_deleted_while_it_answers(browser: Browser, echo: Daemon) -> None:
    """The answer ends where it is, and the tab says why nothing follows."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Many words. " * 200)
        await expect(visit.answers.first).to_contain_text("Many words. Many")
        async with connect_client(echo) as client:
            await client.ask(op="close_session", session_id=visit.session_id())
        await expect(visit.page.get_by_text("was deleted elsewhere")).to_be_visible()
        await expect(await visit.answered()).to_contain_text("Many words.")


async def test_what_is_typed_outlives_a_reload(browser: Browser, echo: Daemon) -> None:
    """In each conversation its own, and none when it was sent."""
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


async def newer_after_a_cut(visit: Visit) -> WebSocketRoute:
    """Have the page's next socket lead to a server of another version; returns the one that it has."""
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


async def test_a_newer_server_is_told(browser: Browser, echo: Daemon) -> None:
    """The page that an older one served offers to be loaded again, and keeps what was typed."""
    async with signed_in(browser, echo) as visit:
        socket = await newer_after_a_cut(visit)
        await visit.composer.fill("Half a question")
        await socket.close(code=1012, reason="")
        await expect(visit.page.get_by_text("The server has been updated.")).to_be_visible()
        await visit.button("Reload").click()
        await expect(visit.page.get_by_text("The server has been updated.")).to_have_count(0)
        await expect(visit.composer).to_have_value("Half a question")


async def test_a_part_that_is_gone_is_told(browser: Browser, echo: Daemon) -> None:
    """The files of a page go with its version: what is fetched late fails, and the same is offered."""
    async with signed_in(browser, echo) as visit:
        visit.expected = "404"
        await visit.page.route("**/js/views/dashboard.js", lambda route: route.fulfill(status=404))
        await visit.button("Dashboard").click()
        await expect(visit.page.get_by_text("could not be loaded")).to_be_visible()
        await visit.page.unroute("**/js/views/dashboard.js")
        await visit.button("Reload").click()
        await expect(visit.page.get_by_role("heading", name="Dashboard")).to_be_visible()
