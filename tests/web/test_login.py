"""Signing in and out in a browser."""

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


async def test_sign_in_with_a_token(browser: Browser, echo: Daemon) -> None:
    """A reload keeps it, another tab needs it, and signing out drops it."""
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


async def test_sign_in_with_the_printed_link(browser: Browser, echo: Daemon) -> None:
    """The token leaves the address and the history."""
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


async def test_sign_in_with_a_link_in_an_open_tab(browser: Browser, echo: Daemon) -> None:
    """Only the fragment changes; the tab may be signed in already."""
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


async def test_wrong_token_is_refused(browser: Browser, echo: Daemon) -> None:
    """The form reports it, nothing is stored, and the right token works afterwards."""
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


async def test_revoked_token_returns_to_the_form(browser: Browser, echo: Daemon) -> None:
    """The form shows the reason."""
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


async def test_accounts_are_separated_in_one_tab(browser: Browser, echo: Daemon) -> None:
    """No conversation, draft, prompt or choice of the previous account is left."""
    made = await asyncio.to_thread(command_line, echo, "token", "create", "visitor")
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.sign_in(echo.admin_token)
        await visit.button("Conversation settings").click()
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
