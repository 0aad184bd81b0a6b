"""Tests of signing in and out in a browser."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from playwright.async_api import expect

from inferencecenter.cli.serve import web_link
from tests.e2e.harness import command_line
from tests.web.browser import MARKS, origin_of, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS


async def test_by_token(browser: Browser, echo: Daemon) -> None:
    """The form takes the token; a reload needs none, another tab does, and signing out forgets it."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(echo.admin_token)
        await expect(visit.composer).to_be_visible()
        await visit.page.reload()
        await expect(visit.composer).to_be_visible()
        other = await visit.page.context.new_page()
        await other.goto(visit.origin)
        await expect(other.get_by_label("Token", exact=True)).to_be_visible()
        await visit.button("Sign out").click()
        await expect(visit.token).to_be_visible()
        kept: str = await visit.page.evaluate("() => JSON.stringify([sessionStorage, localStorage, document.cookie])")
        assert echo.admin_token not in kept


async def test_by_the_first_link(browser: Browser, echo: Daemon) -> None:
    """The link that terminals are shown; its token leaves the address and the history, and goes nowhere."""
    asked: list[str] = []
    assert echo.admin_token not in echo.log.read_text()
    link = web_link(f"{origin_of(echo)}/", echo.admin_token)
    async with visiting(browser, origin_of(echo)) as visit:
        visit.page.on("request", lambda request: asked.append(request.url))
        visit.page.on("websocket", lambda socket: asked.append(socket.url))
        await visit.page.goto(link)
        await expect(visit.composer).to_be_visible()
        assert echo.admin_token not in visit.page.url
        assert [each for each in asked if echo.admin_token in each.partition("#")[0]] == []
        await visit.page.go_back()
        assert echo.admin_token not in visit.page.url


async def test_by_a_link_in_a_tab_that_has_the_page(browser: Browser, echo: Daemon) -> None:
    """The token of a link is taken and wiped where only the end of the address changes, also when signed in."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "latecomer")
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go("")
        await expect(visit.token).to_be_visible()
        for token, account in ((echo.admin_token, "admin"), (made["token"], "latecomer")):
            await visit.go(f"#token={token}")
            await expect(visit.composer).to_be_visible()
            await expect(visit.page.get_by_text(account, exact=True)).to_be_visible()
            assert token not in visit.page.url
            await visit.page.go_back()
            assert token not in visit.page.url
            await visit.page.go_forward()


async def test_not_by_a_wrong_token(browser: Browser, echo: Daemon) -> None:
    """It is said, the form stays, nothing is kept, and the right one works after it."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in("ic_0123456789ab_not-this-one")
        told = visit.page.get_by_role("alert")
        await expect(told).to_contain_text(
            re.compile(r"^This token is not accepted\..*inferencecenter token create NAME$")
        )
        await expect(visit.token).to_have_attribute("aria-invalid", "true")
        assert await visit.page.evaluate("() => sessionStorage.length") == 0
        await visit.token.fill(echo.admin_token)
        await visit.button("Sign in").click()
        await expect(visit.composer).to_be_visible()


async def test_no_longer_by_a_revoked_token(browser: Browser, echo: Daemon) -> None:
    """A signed-in user is returned to the form, with the reason."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "guest")
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(made["token"])
        await visit.ask("Before it was revoked.")
        await visit.answered()
        await asyncio.to_thread(command_line, echo, "token", "revoke", made["token_id"])
        await expect(visit.token).to_be_visible()
        told = visit.page.get_by_role("alert")
        await expect(told).to_contain_text(re.compile(r"^This token is not accepted any more.*token create NAME$"))
        assert await visit.page.evaluate("() => sessionStorage.length") == 0
        await expect(visit.page.get_by_text("Before it was revoked.")).to_have_count(0)


async def test_who_signs_in_next_sees_nothing_of_the_one_before(browser: Browser, echo: Daemon) -> None:
    """Conversations belong to the account, also in one tab; no draft, prompt or choice is left in the browser."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "visitor")
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(echo.admin_token)
        await visit.button("Settings of this conversation").click()
        await visit.page.get_by_label("System prompt").fill("My secret instructions.")
        await visit.button("Close the settings").click()
        await visit.ask("For my eyes only.")
        await visit.answered()
        address = visit.page.url
        await visit.button("Sign out").click()
        assert "secret" not in await visit.page.evaluate("() => JSON.stringify([localStorage, sessionStorage])")
        await visit.token.fill(made["token"])
        await visit.button("Sign in").click()
        await expect(visit.composer).to_be_visible()
        await expect(visit.page.get_by_text("For my eyes only.")).to_have_count(0)
        await visit.page.goto(address)
        await expect(visit.page.get_by_text("was deleted, or it expired")).to_be_visible()
