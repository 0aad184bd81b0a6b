"""A user of the web page in a browser: actions, and errors that must never occur."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Playwright, Request

    from tests.e2e.harness import Daemon

BROWSER_VARIABLE: Final = "INFERENCECENTER_TEST_BROWSER"
"""Names the Chromium to use; with it, tests fail where there is none instead of being skipped."""
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
OPTIONS: Final = (
    "--no-sandbox",  # root in a container has no sandbox
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks",  # would block other sites before the daemon does
)
PATIENCE_MS: Final = 60_000
DESKTOP: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 390, "height": 844}

MARKS: Final = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
"""Of every module of browser tests: its tests share a browser, which lives in their event loop."""


def find_browser() -> str:
    """Return the path of Chromium; skip the test where there is none and none is configured."""
    named = os.environ.get(BROWSER_VARIABLE)
    if named:
        return named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"there is no Chromium here; {BROWSER_VARIABLE} names one elsewhere")
    return found


async def launch(playwright: Playwright) -> Browser:
    """Start Chromium; it can resolve no name but this machine's."""
    expect.set_options(timeout=PATIENCE_MS)
    return await playwright.chromium.launch(executable_path=find_browser(), args=list(OPTIONS))


MOST_STOPS: Final = 200
_FOCUSED: Final = """() => {
  const at = document.activeElement;
  window.stops ??= new Map();
  if (!window.stops.has(at)) window.stops.set(at, window.stops.size);
  const { outlineStyle, outlineWidth, boxShadow, opacity } = getComputedStyle(at);
  const box = at.getBoundingClientRect();
  const marked = (outlineStyle !== "none" && parseFloat(outlineWidth) > 0) || boxShadow !== "none";
  const there = box.width > 0 && box.height > 0 && Number(opacity) > 0.5;
  const name = at.getAttribute("aria-label") ?? at.textContent.trim();
  return [name, window.stops.get(at), at === document.body || (marked && there)];
}"""


@dataclass
class Visit:
    """One tab on the page of one daemon, and its errors.

    Attributes: page is the tab; origin is the page's origin, the only one it may contact; faults are console
    errors, uncaught exceptions and requests to other hosts; expected is a pattern of faults that this test allows.
    """

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list)
    expected: str = ""

    def __post_init__(self) -> None:
        self.page.on("console", self._take_message)
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("request", self._take_request)
        self.page.on("websocket", lambda socket: self._take_address(socket.url))

    def check(self) -> None:
        """Assert that only expected faults occurred."""
        surprises = [each for each in self.faults if not (self.expected and re.search(self.expected, each))]
        assert not surprises, surprises

    # Elements of the page, by their visible names.

    @property
    def token(self) -> Locator:
        """The token field."""
        return self.page.get_by_label("Token", exact=True)

    @property
    def composer(self) -> Locator:
        """The message field."""
        return self.page.get_by_role("textbox", name="Message")

    @property
    def answers(self) -> Locator:
        """All answers of the conversation."""
        return self.page.get_by_role("article", name="Answer")

    @property
    def questions(self) -> Locator:
        """All questions of the conversation."""
        return self.page.get_by_role("article", name="You")

    def button(self, name: str, *, inside: Locator | None = None) -> Locator:
        """Return the button of exactly that name."""
        return (inside or self.page).get_by_role("button", name=name, exact=True)

    def conversation(self, title: str) -> Locator:
        """Return the entry in the list of conversations."""
        return self.page.get_by_role("navigation").get_by_role("button", name=title, exact=True)

    def session_id(self) -> str:
        """Return the session that the address names."""
        found = re.search(r"#/c/([\w-]+)$", self.page.url)
        assert found, self.page.url
        return found[1]

    # Actions of the user.

    async def go(self, fragment: str = "") -> None:
        """Open the page, or another view of it."""
        await self.page.goto(f"{self.origin}/{fragment}")

    async def sign_in(self, token: str) -> None:
        """Open the page and sign in with the form."""
        await self.go()
        await self.token.fill(token)
        await self.button("Sign in").click()

    async def ask(self, text: str) -> None:
        """Write a message and send it."""
        await self.composer.fill(text)
        await self.button("Send").click()

    async def answered(self, *, count: int = 1) -> Locator:
        """Wait until there are so many complete answers; return the last."""
        await expect(self.answers).to_have_count(count)
        last = self.answers.last
        await expect(last).to_have_attribute("aria-busy", "false")
        await expect(last.locator(".prose[aria-busy]")).to_have_count(0)
        return last

    async def look_again(self) -> None:
        """Return to the tab from another one."""
        await self.page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")

    async def tab_through(self) -> list[str]:
        """Move the focus around the page and return the focused elements; each must have a visible focus."""
        names: list[str] = []
        first = None
        for _ in range(MOST_STOPS):
            await self.page.keyboard.press("Tab")
            name, key, shown = await self.page.evaluate(_FOCUSED)
            assert shown, f"the focus on {name!r} cannot be seen"
            if key == first:
                return names
            first = key if first is None else first
            names.append(name)
        raise AssertionError(f"the focus never came back: {names}")

    def _take_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _take_request(self, request: Request) -> None:
        self._take_address(request.url)

    def _take_address(self, url: str) -> None:
        host = self.origin.removeprefix("http://")
        if not re.match(rf"(?:http|ws)://{re.escape(host)}/|data:|blob:{re.escape(self.origin)}", url):
            self.faults.append(f"a request elsewhere: {url}")


@contextlib.asynccontextmanager
async def visiting(browser: Browser, origin: str, **options: Any) -> AsyncIterator[Visit]:
    """Open a tab with its own browser profile; no unexpected fault may occur."""
    context: BrowserContext = await browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
    context.set_default_timeout(PATIENCE_MS)
    try:
        visit = Visit(await context.new_page(), origin)
        yield visit
        visit.check()
    finally:
        await context.close()


@contextlib.asynccontextmanager
async def signed_in(browser: Browser, daemon: Daemon, *, origin: str = "", **options: Any) -> AsyncIterator[Visit]:
    """Open a signed-in tab with an empty conversation."""
    async with visiting(browser, origin or origin_of(daemon), **options) as visit:
        await visit.go(f"#token={daemon.admin_token}")
        await expect(visit.composer).to_be_visible()
        yield visit


def origin_of(daemon: Daemon) -> str:
    """Return the origin of a daemon's page."""
    return f"http://127.0.0.1:{daemon.port}"


_AXE: Final = Path(__file__).parent / "vendor" / "axe.min.js"
_JUDGE: Final = """async () => {
  const found = await axe.run({ resultTypes: ["violations"], preload: false });
  return found.violations.flatMap(({ id, impact, help, nodes }) =>
    nodes.map((node) => ({ id, impact, help, where: node.target.join(" "), why: node.failureSummary })));
}"""


async def barriers(visit: Visit) -> list[str]:
    """Return axe's findings of any impact."""
    n_faults = len(visit.faults)
    await visit.page.evaluate(f"{_AXE.read_text(encoding='utf-8')};0")
    found = await visit.page.evaluate(_JUDGE)
    del visit.faults[n_faults:]  # axe tries styles that the page's policy refuses
    return [f"{each['id']} ({each['impact']}) at {each['where']}: {each['why']}" for each in found]


async def said(answer: Locator) -> str:
    """Return the text of an answer without its controls."""
    return (await answer.locator(".prose").last.inner_text()).strip()


def bare(text: str) -> str:
    """Return letters and digits alone, to compare texts of any markup."""
    return re.sub(r"[\W_]+", "", text)
