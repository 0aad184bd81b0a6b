"""Screenshots of the page in light, dark and on a phone; ``INFERENCECENTER_SCREENSHOTS`` names a folder for them."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, PHONE, origin_of, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

    from tests.e2e.harness import Daemon

pytestmark = MARKS

FOLDER_VARIABLE: Final = "INFERENCECENTER_SCREENSHOTS"
WINDOW: Final = {"width": 1120, "height": 700}
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"viewport": WINDOW, "color_scheme": "light"},
    "dark": {"viewport": WINDOW, "color_scheme": "dark"},
    "phone": {
        "viewport": PHONE,
        "color_scheme": "light",
        "is_mobile": True,
        "has_touch": True,
        "device_scale_factor": 2,
    },
}
LEAST_COLORS: Final = 40
"""A page without text or style has two or three."""
COLORS: Final = """async (png) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const points = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const middle = points[Math.floor(points.length / 2) + 1];
  return [image.width, image.height, new Set(points).size, middle & 255];
}"""
QUESTIONS: Final = ("Count from 1 to 20.", "What is the capital of Kenya?")


async def fill(daemon: Daemon) -> None:
    """Have other conversations."""
    async with connect_client(daemon) as client:
        for title in ("A haiku about rain", "Hash tables"):
            await client.turn(await client.create(metadata={"title": title}), "Hello!", max_tokens=16)


@pytest.mark.parametrize("look", LOOKS)
async def test_screenshots(browser: Browser, daemon: Daemon, look: str, tmp_path: Path) -> None:
    """Each view shows what belongs there, in the colors of its theme."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tmp_path)
    await fill(daemon)
    async with visiting(browser, origin_of(daemon), **LOOKS[look]) as visit:
        await visit.go(f"#token={daemon.admin_token}")
        await expect(visit.composer).to_be_visible()
        for count, question in enumerate(QUESTIONS, start=1):
            await visit.ask(question)
            await visit.answered(count=count)
        await expect(visit.questions.last).to_contain_text(QUESTIONS[-1])
        await expect(visit.page.locator(".outcome").last).to_contain_text("to first token")
        await take(visit.page, folder / f"chat-{look}.png", look)
        await visit.button("Conversation settings").click()
        await expect(visit.page.get_by_label("Temperature", exact=True)).to_be_attached()
        await take(visit.page, folder / f"settings-{look}.png", look)
        for view, shown in (("dashboard", "Slots in use"), ("models", "In memory"), ("admin", "New account")):
            await visit.go(f"#/{view}")
            await expect(visit.page.get_by_text(shown).first).to_be_visible()
            await take(visit.page, folder / f"{view}-{look}.png", look)


async def take(page: Page, path: Path, look: str) -> None:
    """Take a screenshot, and assert its size, that it is not blank, and that it is light or dark."""
    await page.evaluate("() => document.fonts.ready")
    png = await page.screenshot(path=path, animations="disabled")
    blank = await page.context.browser.new_page()  # type: ignore[union-attr]
    try:
        width, height, colors, middle = await blank.evaluate(COLORS, base64.b64encode(png).decode())
    finally:
        await blank.close()
    scale, size = LOOKS[look].get("device_scale_factor", 1), LOOKS[look]["viewport"]
    assert (width, height) == (size["width"] * scale, size["height"] * scale)
    assert colors >= LEAST_COLORS, f"{path.name} has {colors} colors"
    assert (middle < 128) == (look == "dark"), f"{path.name} has the colors of another theme"
