"""Accessibility: phones, dark mode, screen readers, keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import DESKTOP, MARKS, PHONE, Visit, barriers, origin_of, signed_in, visiting

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

DEVICES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": DESKTOP},
    "phone": {"viewport": PHONE, "device_scale_factor": 2, "is_mobile": True, "has_touch": True},
}
SAID = """# A heading

Words with `code`, **weight** and a [link](https://example.com).

- [ ] one
- [x] two

```python
print("a line that is much too long for any phone, so that it has to be scrolled sideways, however small it is set")
```

| operation | mean | worst |
| --- | ---: | ---: |
| look up | O(1) | O(n) |

> It is only as good as its hash function.
"""
CALL = {"call_id": "c1", "name": "look_up", "arguments": '{"key": "hash"}'}
HISTORY = [
    {"role": "user", "content": "How does a hash table work?"},
    {"role": "assistant", "content": SAID, "reasoning": "They want code.", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "So that is how."},
]


async def fill_session(echo: Daemon) -> str:
    """Create a session with every kind of content and return its id."""
    async with connect_client(echo) as client:
        session = await client.create(system="Be brief.", metadata={"title": "Some of everything"})
        await client.turn(session, "Hello.")
        told = await client.ask(op="append", session_id=session, messages=HISTORY)
        assert told["op"] == "appended", told
        await client.turn(session, "Thank you.")
    return session


async def fits(visit: Visit) -> None:
    """Assert that no view needs horizontal scrolling."""
    width, there = await visit.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert width <= there


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("device", DEVICES)
async def test_pages_meet_the_accessibility_rules(
    browser: Browser, echo: Daemon, device: str, theme: Literal["light", "dark"]
) -> None:
    """Axe finds nothing of any impact in any view, and all of it fits."""
    session = await fill_session(echo)
    async with visiting(browser, origin_of(echo), color_scheme=theme, **DEVICES[device]) as visit:
        await visit.go()
        await expect(visit.token).to_be_visible()
        found = {"sign-in": await barriers(visit)}
        await visit.page.goto("about:blank")
        await visit.go(f"#token={echo.admin_token}")
        await expect(visit.composer).to_be_visible()
        found["a new chat"] = await barriers(visit)
        await visit.go(f"#/c/{session}")
        await expect(visit.answers.last).to_contain_text("Thank you")
        found["a conversation"] = await barriers(visit)
        await fits(visit)
        await visit.page.locator(".fact-model").click()
        await expect(visit.page.get_by_role("listbox", name="Model")).to_be_focused()
        found["the models of a conversation"] = await barriers(visit)
        await visit.page.keyboard.press("Escape")
        await visit.page.keyboard.press("Control+/")
        await expect(visit.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        found["shortcuts"] = await barriers(visit)
        await visit.page.keyboard.press("Escape")
        await visit.page.keyboard.press("Control+k")
        await visit.page.get_by_role("searchbox").fill("hash")
        await expect(visit.page.locator(".found").first).to_be_visible()
        found["search"] = await barriers(visit)
        await visit.page.get_by_role("searchbox").fill("")
        await visit.page.keyboard.press("Escape")
        await visit.button("Conversation settings").click()
        await expect(visit.page.get_by_label("Temperature", exact=True)).to_be_attached()
        found["its settings"] = await barriers(visit)
        await fits(visit)
        for fragment, heading, ready in (
            ("#/dashboard", "Dashboard", "Slots in use"),
            ("#/models", "Models", "In memory"),
            ("#/admin", "Administration", "New account"),
        ):
            await visit.go(fragment)
            await expect(visit.page.get_by_role("heading", name=heading)).to_be_visible()
            await expect(visit.page.get_by_text(ready).first).to_be_visible()
            found[heading] = await barriers(visit)
            await fits(visit)
    assert not any(found.values()), found


async def test_accessibility_check_can_fail(browser: Browser, echo: Daemon) -> None:
    """A defect is found."""
    async with visiting(browser, origin_of(echo)) as visit:
        await visit.go()
        await expect(visit.token).to_be_visible()
        await visit.page.evaluate("() => document.documentElement.removeAttribute('lang')")
        assert [each.partition(" at ")[0] for each in await barriers(visit)] == ["html-has-lang (serious)"]


async def test_phone_layout(browser: Browser, echo: Daemon) -> None:
    """The list overlays the conversation and closes on a choice; every control is large enough."""
    await fill_session(echo)
    async with signed_in(browser, echo, **DEVICES["phone"]) as visit:
        await expect(visit.button("New chat")).not_to_be_in_viewport()
        await visit.button("Conversations").tap()
        await expect(visit.button("New chat")).to_be_in_viewport()
        await visit.conversation("Some of everything").first.tap()
        await expect(visit.button("New chat")).not_to_be_in_viewport()
        await expect(visit.questions.first).to_contain_text("Hello.")
        await visit.composer.fill("From a phone.")
        await visit.button("Send").tap()
        await visit.answered(count=5)
        await visit.button("Edit", inside=visit.questions.last).tap()
        await visit.page.get_by_role("textbox", name="Edit the message").fill("From a phone, again.")
        await visit.button("Send", inside=visit.page.locator(".editor")).tap()
        await expect(await visit.answered(count=5)).to_contain_text("again")
        edited = visit.session_id()
        await visit.button("Conversations").tap()
        await visit.button("Dashboard").tap()
        await expect(visit.page.get_by_role("heading", name="Dashboard")).to_be_in_viewport()
        await visit.page.go_back()
        assert visit.session_id() == edited
        await expect(visit.answers.last).to_contain_text("again")


async def test_dialog_closes_before_the_list(browser: Browser, echo: Daemon) -> None:
    """Escape in a question of the list answers it; the list stays open, with the focus where it was."""
    await fill_session(echo)
    async with signed_in(browser, echo, **DEVICES["phone"]) as visit:
        await visit.button("Conversations").tap()
        entry = visit.conversation("Some of everything").first
        await entry.press("Delete")
        dialog = visit.page.get_by_role("dialog", name="Delete this conversation?")
        await expect(dialog).to_be_visible()
        await visit.page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(entry).to_be_focused()
        await expect(entry).to_be_in_viewport()
        await visit.page.keyboard.press("Escape")
        await expect(entry).not_to_be_in_viewport()
        await expect(visit.button("Conversations")).to_be_focused()


SMALL = """() => [...document.querySelectorAll("button, summary, select, input:not([type=range], [type=checkbox])")]
  .filter((each) => each.checkVisibility({ visibilityProperty: true }))
  .map((each) => [each.ariaLabel ?? each.textContent.trim(), each.getBoundingClientRect()])
  .filter(([, { width, height }]) => width > 0 && (width < 44 || height < 44))
  .map(([name, { width, height }]) => `${name}: ${width} by ${height}`)"""


async def test_touch_targets_are_large(browser: Browser, echo: Daemon) -> None:
    """Each is at least 44 px wide and high in every view of a phone."""
    session = await fill_session(echo)
    found: dict[str, list[str]] = {}
    async with signed_in(browser, echo, **DEVICES["phone"]) as visit:
        found["a new chat"] = await visit.page.evaluate(SMALL)
        await visit.go(f"#/c/{session}")
        await expect(visit.answers.last).to_contain_text("Thank you")
        found["a conversation"] = await visit.page.evaluate(SMALL)
        await visit.button("Conversations").tap()
        found["the list"] = await visit.page.evaluate(SMALL)
        await visit.button("Close the list").first.tap()
        await visit.button("Conversation settings").tap()
        await expect(visit.page.get_by_label("Temperature", exact=True)).to_be_visible()
        found["the settings"] = await visit.page.evaluate(SMALL)
        await fits(visit)
        for fragment, ready in (("#/dashboard", "Slots in use"), ("#/models", "In memory")):
            await visit.go(fragment)
            await expect(visit.page.get_by_text(ready).first).to_be_visible()
            found[fragment] = await visit.page.evaluate(SMALL)
            await fits(visit)
    assert not any(found.values()), found


async def test_answer_is_announced(browser: Browser, echo: Daemon) -> None:
    """A live region gets the whole answer and its end; the stream itself is not live."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("First this. Then that.")
        await visit.answered()
        log = visit.page.get_by_role("log")
        await expect(log).to_have_attribute("aria-live", "polite")
        await expect(log).to_have_text("First this. Then that. End of the answer.")
        assert await visit.answers.first.locator("[aria-live]").count() == 0


async def test_themes(browser: Browser, echo: Daemon) -> None:
    """The page follows the system's theme until the user chooses one; the choice survives a reload."""
    async with signed_in(browser, echo, color_scheme="dark") as visit:
        body = visit.page.locator("body")
        dark = await body.evaluate("(body) => getComputedStyle(body).backgroundColor")
        await visit.page.emulate_media(color_scheme="light")
        await expect(body).not_to_have_css("background-color", dark)
        await visit.button("Theme: system").click()
        await visit.button("Theme: light").click()
        await expect(body).to_have_css("background-color", dark)
        await visit.page.reload()
        await expect(visit.button("Theme: dark")).to_be_visible()
        await expect(body).to_have_css("background-color", dark)
