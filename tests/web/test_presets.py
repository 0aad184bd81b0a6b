"""Presets and the prompt library of the account."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, PHONE, barriers, signed_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS


@pytest.fixture(autouse=True)
async def clean(echo: Daemon) -> AsyncIterator[None]:
    """Each test starts without presets."""
    yield
    async with connect_client(echo) as client:
        for each in (await client.ask(op="list_presets"))["presets"]:
            await client.ask(op="delete_preset", preset_type=each["preset_type"], name=each["name"])


def field(visit: Visit, name: str) -> Locator:
    """A text field of the settings."""
    return visit.page.get_by_role("complementary").get_by_role("textbox", name=name, exact=True)


async def save_prompt(visit: Visit, name: str, text: str) -> None:
    """Save a prompt in the settings."""
    await field(visit, "Name of the prompt").fill(name)
    await field(visit, "Text of the prompt").fill(text)
    await visit.button("Save the prompt").click()
    await expect(visit.page.get_by_text(f"{name} is saved.")).to_be_visible()


async def test_preset_follows_the_account(browser: Browser, echo: Daemon) -> None:
    """It is saved in one browser, used in a phone's, and changes there at once."""
    async with signed_in(browser, echo) as visit, signed_in(browser, echo, viewport=PHONE) as phone:
        await phone.button("Conversation settings").click()
        await expect(field(phone, "Name of the preset")).to_be_visible()
        await visit.button("Conversation settings").click()
        await field(visit, "System prompt").fill("Be brief.")
        await visit.page.get_by_label("Response format").select_option("regex")
        await field(visit, "Regular expression").fill("yes|no")
        await field(visit, "Name of the preset").fill("Short")
        await visit.button("Save").click()
        await expect(visit.page.get_by_text("Short is saved.")).to_be_visible()
        assert await barriers(visit) == []
        await phone.button("Use Short").click()
        await expect(field(phone, "System prompt")).to_have_value("Be brief.")
        await expect(field(phone, "Regular expression")).to_have_value("yes|no")
        async with connect_client(echo) as client:
            (kept,) = (await client.ask(op="list_presets"))["presets"]
            assert kept == {"preset_type": "settings", "name": "Short", "system": "Be brief.", "regex": "yes|no"}
        await visit.button("Delete Short").click()
        await expect(visit.button("Use Short")).to_have_count(0)
        await expect(phone.button("Use Short")).to_have_count(0)
        assert await visit.page.evaluate("() => document.activeElement !== document.body")


async def test_prompt_is_inserted_and_filled_in(browser: Browser, echo: Daemon) -> None:
    """A slash and the keyboard suffice; placeholders are selected in turn, and then Tab leaves the field."""
    async with signed_in(browser, echo) as visit:
        await visit.composer.press_sequentially("/a")
        await expect(visit.composer).to_have_value("/a")
        await visit.composer.fill("")
        await visit.button("Conversation settings").click()
        await save_prompt(visit, "Letter", "Write to {{person}} about {{topic}}.")
        await save_prompt(visit, "Other", "Something else.")
        await visit.button("Close the settings").click()
        await visit.composer.press_sequentially("/")
        await expect(visit.page.get_by_role("combobox", name="Search prompts")).to_be_focused()
        assert await barriers(visit) == []
        await visit.page.keyboard.press("ArrowDown")
        await expect(visit.page.get_by_role("option", selected=True)).to_contain_text("Something else.")
        await visit.page.keyboard.type("lett")
        await expect(visit.page.get_by_role("option")).to_have_count(1)
        await visit.page.keyboard.press("Enter")
        await expect(visit.composer).to_be_focused()
        await visit.page.keyboard.type("Ada")
        await visit.page.keyboard.press("Tab")
        await visit.page.keyboard.type("tables")
        await expect(visit.composer).to_have_value("Write to Ada about tables.")
        await visit.page.keyboard.press("Tab")
        await expect(visit.composer).not_to_be_focused()
        await visit.button("Send").click()
        await expect(await visit.answered()).to_contain_text("Write to Ada about tables.")


async def test_prompts_open_by_their_button(browser: Browser, echo: Daemon) -> None:
    """Esc closes them with the focus in the message, whose text stays."""
    async with signed_in(browser, echo) as visit:
        await visit.composer.fill("Before. ")
        await visit.button("Prompts").click()
        await expect(visit.page.get_by_text("No prompts yet.")).to_be_visible()
        async with connect_client(echo) as client:
            prompt = {"preset_type": "prompt", "name": "<b>Bold</b>", "text": "<img src=x onerror=alert(1)>"}
            assert (await client.ask(op="save_preset", preset=prompt))["op"] == "preset_saved"
        await expect(visit.page.get_by_role("option")).to_contain_text("<b>Bold</b>")
        await visit.page.keyboard.press("Escape")
        await expect(visit.composer).to_be_focused()
        await visit.button("Prompts").click()
        await visit.page.get_by_role("option").click()
        await expect(visit.composer).to_have_value("Before. <img src=x onerror=alert(1)>")


async def test_export_has_the_presets(browser: Browser, echo: Daemon) -> None:
    """An import restores them."""
    prompt = {"preset_type": "prompt", "name": "Letter", "text": "Dear {{person}},"}
    async with connect_client(echo) as client:
        await client.ask(op="save_preset", preset=prompt)
    async with signed_in(browser, echo) as visit:
        await visit.button("Conversation settings").click()
        async with visit.page.expect_download() as saved:
            await visit.button("Export all as JSON").click()
        path = await (await saved.value).path()
        text = await asyncio.to_thread(path.read_text, encoding="utf-8")
        assert json.loads(text)["presets"] == [prompt]
        await visit.button("Delete Letter").click()
        await expect(visit.button("Edit Letter")).to_have_count(0)
        content = json.dumps({"conversations": [], "presets": [prompt]}).encode()
        await visit.page.get_by_label("File to import").set_input_files(
            {"name": "a.json", "mimeType": "application/json", "buffer": content}
        )
        await expect(visit.button("Edit Letter")).to_be_visible()
