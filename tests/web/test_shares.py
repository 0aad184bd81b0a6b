"""Share links in the page: made by one account, read by another."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import pytest
from playwright.async_api import expect

from tests.e2e.harness import command_line, connect_client, run_daemon
from tests.sessions.images.files import image_file
from tests.web.browser import DESKTOP, MARKS, PHONE, barriers, origin_of, signed_in, visiting
from tests.web.conftest import ECHO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

TRAP = "<img src=x onerror=hit()><script>hit()</script>![x](https://evil.test/x.png)"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon that allows share links."""
    settings = {**ECHO, "INFERENCECENTER_SERVER__SHARE_LINKS": "true"}
    with run_daemon(tmp_path_factory.mktemp("sharing") / "state", demo_model_path, **settings) as running:
        yield running


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_another_account_reads_a_shared_conversation(
    browser: Browser, sharing: Daemon, viewport: dict[str, int]
) -> None:
    """It signs in for that, cannot write, and the messages are harmless; a revoked link shows nothing."""
    reader = command_line(sharing, "token", "create", f"reader{viewport['width']}")["token"]
    async with signed_in(browser, sharing, viewport=viewport) as owner:
        await owner.ask(f"First question. {TRAP}")
        await owner.answered()
        await owner.button("Conversation settings").click()
        await owner.button("Create link").click()
        link = await owner.page.get_by_label("Link", exact=True).input_value()
        assert link.startswith(f"{origin_of(sharing)}/#/s/sh_")
        assert await barriers(owner) == []
        await owner.button("Close the settings").click()
        await owner.ask("A later question.")
        await owner.answered(count=2)
        async with visiting(browser, origin_of(sharing), viewport=viewport) as visit:
            requested: list[str] = []
            visit.page.on("request", lambda request: requested.append(request.url))
            await visit.page.goto(link)
            await visit.token.fill(reader)
            await visit.button("Sign in").click()
            await expect(visit.questions).to_contain_text("First question.")
            await expect(visit.page.get_by_text("Shared by admin")).to_be_visible()
            await expect(visit.answers).to_have_count(1)
            await expect(visit.page.get_by_text("A later question.")).to_have_count(0)
            await expect(visit.composer).to_have_count(0)
            for action in ("Edit", "Regenerate", "Fork from here"):
                await expect(visit.button(action)).to_have_count(0)
            assert await visit.page.locator(".turns :is(img, script, iframe)").count() == 0
            assert await barriers(visit) == []
            width, there = await visit.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
            assert width <= there
            secret = link.rpartition("/")[2]
            assert not any(secret in url.partition("#")[0] for url in requested)
            await visit.page.reload()
            await expect(visit.questions).to_contain_text("First question.")
            await owner.button("Conversation settings").click()
            revoke = owner.page.get_by_role("list", name="Share links of this account").get_by_role("button")
            await expect(revoke).to_have_count(1)
            await revoke.click()
            await expect(revoke).to_have_count(0)
            await expect(owner.button("Create link")).to_be_focused()
            visit.expected = "404"
            await visit.page.reload()
            await expect(visit.page.get_by_role("alert")).to_have_text(
                "This link has expired, was revoked, or is not complete."
            )
            await expect(visit.questions).to_have_count(0)


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, {"viewport": PHONE}], ids=["dark", "phone"])
async def test_shared_images_are_shown(browser: Browser, sharing: Daemon, options: dict[str, Any]) -> None:
    """To an account that does not own them, in full size too."""
    async with connect_client(sharing) as client:
        session = await client.create()
        image = {"type": "image", "data": b64encode(image_file((64, 48))).decode(), "alt": "red.png"}
        content = [image, {"type": "text", "text": "Look."}]
        await client.ask(op="append", session_id=session, messages=[{"role": "user", "content": content}])
        made = await client.ask(op="create_share", session_id=session)
    account = f"viewer{len(options.get('color_scheme', ''))}"
    reader = command_line(sharing, "token", "create", account)["token"]
    async with visiting(browser, origin_of(sharing), **options) as visit:
        await visit.page.goto(f"{origin_of(sharing)}/#/s/{made['share']['share_id']}/{made['share_token']}")
        await visit.token.fill(reader)
        await visit.button("Sign in").click()
        shown = visit.questions.get_by_role("img", name="red.png")
        await expect(shown).to_have_attribute("data-loaded", "true")
        assert await shown.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 64
        await visit.button("Open red.png").click()
        await expect(visit.page.get_by_role("dialog", name="red.png").get_by_role("img")).to_be_visible()
        assert await barriers(visit) == []


async def test_no_links_where_the_operator_allows_none(browser: Browser, echo: Daemon) -> None:
    """The settings do not offer them."""
    async with connect_client(echo) as client:
        session = await client.create()
    async with signed_in(browser, echo) as visit:
        await visit.go(f"#/c/{session}")
        await visit.button("Conversation settings").click()
        await expect(visit.button("Export as JSON")).to_be_visible()
        await expect(visit.button("Create link")).to_have_count(0)
