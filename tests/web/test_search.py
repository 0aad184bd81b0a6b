"""The search for conversations by the words of their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web.browser import MARKS, PHONE, barriers, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator

    from tests.e2e.harness import Daemon
    from tests.web.browser import Visit

pytestmark = MARKS

HOSTILE: Final = "<img src=x onerror=alert(1)> walrus <b>here</b>"
MOST_TURNS: Final = 6
N_RESULTS: Final = 25


def search_field(visit: Visit) -> Locator:
    """The field above the list."""
    return visit.page.get_by_role("searchbox", name="Search conversations")


async def converse(visit: Visit, *questions: str) -> None:
    """Ask questions in a new chat, each answered with itself."""
    await visit.button("New chat").click()
    for n, question in enumerate(questions, 1):
        await visit.ask(question)
        await visit.answered(count=n)


async def test_messages_are_found_and_opened_at_their_turn(browser: Browser, echo: Daemon) -> None:
    """The text around the words is shown as text, and the turn is in view; titles are listed as before."""
    filler = "\n\n".join(["A paragraph of a long answer."] * 30)
    questions = [f"Turn {n} {'narwhal' if n == 1 else ''} {filler}" for n in range(MOST_TURNS)]
    async with signed_in(browser, echo) as visit:
        await converse(visit, *questions)
        await converse(visit, "Animals", HOSTILE)
        await search_field(visit).fill("anim")
        await expect(visit.conversation("Animals")).to_be_visible()
        await search_field(visit).fill("walr")
        entry = visit.page.locator(".found")
        await expect(entry).to_have_count(1)
        await expect(entry).to_contain_text("Animals")
        await expect(entry.locator(".found-text")).to_have_text(HOSTILE)
        await expect(entry.locator("mark")).to_have_text("walrus")
        await expect(entry.locator("img")).to_have_count(0)
        assert await barriers(visit) == []
        await search_field(visit).fill("NARWHAL")
        await expect(entry.locator("mark")).to_have_text("narwhal")
        await entry.click()
        await expect(visit.questions).to_have_count(MOST_TURNS)
        await expect(visit.questions.nth(1)).to_be_in_viewport()
        await expect(visit.questions.nth(MOST_TURNS - 1)).not_to_be_in_viewport()
        await search_field(visit).fill("nothing like it")
        await expect(visit.page.get_by_text("No matching conversations")).to_be_visible()
        await expect(entry).to_have_count(0)


async def test_results_are_reached_by_keyboard_and_on_a_phone(browser: Browser, echo: Daemon) -> None:
    """The arrow keys move through them; opening one closes the list on a narrow screen."""
    async with signed_in(browser, echo, viewport=PHONE, has_touch=True) as visit:
        await visit.ask("First")
        await visit.answered()
        await visit.ask("An ocelot")
        await visit.answered(count=2)
        await visit.page.locator(".list-opener").click()
        await search_field(visit).fill("ocelot")
        entry = visit.page.locator(".found")
        await expect(entry).to_have_count(1)
        assert await barriers(visit) == []
        box = await entry.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        await entry.focus()
        await visit.page.keyboard.press("Enter")
        await expect(visit.questions.nth(1)).to_be_in_viewport()
        await expect(entry).not_to_be_in_viewport()
        assert await visit.page.evaluate("document.activeElement !== document.body")


async def test_pages_of_results_follow(browser: Browser, echo: Daemon) -> None:
    """A button loads them as long as there are some."""
    async with connect_client(echo) as client:
        for n in range(N_RESULTS):
            made = await client.ask(op="create_session", metadata={"title": f"Chat {n}"})
            messages = [{"role": "user", "content": f"A capybara {n}"}]
            await client.ask(op="append", session_id=made["session_id"], messages=messages)
    async with signed_in(browser, echo) as visit:
        await search_field(visit).fill("capybara")
        entry = visit.page.locator(".found")
        await expect(entry).to_have_count(20)
        await visit.button("Show more").click()
        await expect(entry).to_have_count(N_RESULTS)
        await expect(visit.button("Show more")).to_have_count(0)


async def test_versions_with_the_same_text_are_one_result(browser: Browser, echo: Daemon) -> None:
    """A version is listed where its text differs."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("A quokka")
        await visit.answered()
        await visit.ask("Something else")
        await visit.answered(count=2)
        await visit.button("Regenerate").click()
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("2/2")
        await visit.answered(count=2)
        await visit.button("Edit", inside=visit.questions.last).click()
        await visit.page.get_by_role("textbox", name="Edit the message").fill("Else a wombat")
        await visit.page.keyboard.press("Enter")
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("3/3")
        await visit.answered(count=2)
        entry = visit.page.locator(".found")
        await search_field(visit).fill("quokka")
        await expect(entry).to_have_count(1)
        await search_field(visit).fill("else")
        await expect(entry).to_have_count(2)
