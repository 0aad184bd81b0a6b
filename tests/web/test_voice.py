"""Voice input by the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.web.browser import MARKS, barriers, origin_of, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

RECOGNITION = """window.SpeechRecognition = class {
  start() {
    const said = Object.assign([{ transcript: " how are you? " }], { isFinal: true });
    const maybe = Object.assign([{ transcript: "who" }], { isFinal: false });
    setTimeout(() => this.onresult({ resultIndex: 0, results: [said, maybe] }));
  }
  stop() { this.onend(); }
  abort() {}
};"""


async def test_speech_becomes_text(browser: Browser, echo: Daemon) -> None:
    """The user must allow it first, knowing that the browser may send the audio elsewhere."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.add_init_script(RECOGNITION)
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.composer).to_be_visible()
        await expect(visit.button("Speak")).to_have_count(0)
        await visit.button("Conversation settings").click()
        await expect(visit.page.get_by_text("may send the audio to its vendor")).to_be_visible()
        await visit.page.get_by_role("checkbox", name="Voice input").check()
        await visit.button("Close the settings").click()
        await visit.composer.fill("Hello,")
        await visit.button("Speak").click()
        await expect(visit.composer).to_have_value("Hello, how are you?")
        await expect(visit.button("Speak")).to_have_attribute("aria-pressed", "true")
        assert await barriers(visit) == []
        await visit.button("Speak").click()
        await expect(visit.button("Speak")).to_have_attribute("aria-pressed", "false")


async def test_browser_without_recognition_offers_none(browser: Browser, echo: Daemon) -> None:
    """It has neither the button nor the setting."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.page.add_init_script("delete window.SpeechRecognition; delete window.webkitSpeechRecognition")
        await visit.go(f"#token={echo.admin_token}")
        await visit.button("Conversation settings").click()
        await expect(visit.page.get_by_label("Language")).to_be_visible()
        await expect(visit.page.get_by_role("checkbox", name="Voice input")).to_have_count(0)
