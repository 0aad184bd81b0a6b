"""What the page shows of a conversation's state: answering, unread, the settings that apply, the focus, the context."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.e2e.harness import connect_client, run_daemon
from tests.web.browser import MARKS, PHONE, barriers, signed_in

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

LONG = "Many words. " * 400


async def test_answering_and_unread_follow_events(browser: Browser, echo: Daemon) -> None:
    """A conversation in the background is marked without another read of the list; unread survives a reload."""
    async with signed_in(browser, echo) as visit:
        await visit.ask(LONG)
        await expect(visit.answers.first).to_contain_text("Many words. Many")
        session = visit.session_id()
        await visit.button("New chat").click()
        entry = visit.page.locator(".item").filter(has=visit.page.locator(".item-open")).first
        await expect(entry.get_by_label("Answering")).to_be_visible()
        async with connect_client(echo) as client:
            await client.send(op="abort", session_id=session)
        await expect(entry.get_by_label("Answering")).to_have_count(0)
        await expect(entry.get_by_label("Unread answer")).to_be_visible()
        await expect(visit.page).to_have_title(re.compile(r"^\(1\) "))
        await visit.page.reload()
        await expect(entry.get_by_label("Unread answer")).to_be_visible()
        await entry.locator(".item-open").click()
        await expect(visit.questions).to_have_count(1)
        await expect(entry.get_by_label("Unread answer")).to_have_count(0)
        await expect(visit.page).to_have_title(re.compile(r"^Many"))


async def test_settings_that_apply_are_shown_and_cleared(browser: Browser, echo: Daemon) -> None:
    """A new chat shows the settings it inherits; cleared ones are not sent."""
    async with signed_in(browser, echo) as visit:
        await visit.button("Conversation settings").click()
        await visit.page.get_by_label("System prompt").fill("Be brief.")
        await visit.page.get_by_label("Temperature", exact=True).fill("0.3")
        await visit.button("Close the settings").click()
        chips = visit.page.get_by_role("group", name="Settings that apply")
        await expect(visit.button("System prompt", inside=chips)).to_have_attribute("title", "Be brief.")
        await visit.ask("First.")
        await visit.answered()
        await expect(visit.button("System prompt", inside=chips)).to_have_count(0)  # it cannot be changed any more
        await expect(visit.button("Temperature: 0.3", inside=chips)).to_be_visible()
        await visit.button("New chat").click()
        await expect(visit.button("Temperature: 0.3", inside=chips)).to_be_visible()
        await visit.button("Clear: System prompt", inside=chips).click()
        await expect(visit.composer).to_be_focused()
        await visit.button("Clear: Temperature: 0.3", inside=chips).click()
        await expect(chips).to_have_count(0)
        await visit.ask("Second.")
        await visit.answered()
        async with connect_client(echo) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert [each["role"] for each in told["transcript"]] == ["user", "assistant"]


async def test_focus_returns_where_it_was(browser: Browser, echo: Daemon) -> None:
    """It does after Esc in the settings, the editor and a phone's list, and after Regenerate."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Hello.")
        await visit.answered()
        settings = visit.button("Conversation settings")
        await settings.press("Enter")
        await expect(visit.button("Close the settings")).to_be_focused()
        await visit.page.keyboard.press("Escape")
        await expect(settings).to_be_focused()
        await visit.button("Edit").press("Enter")
        await expect(visit.page.get_by_role("textbox", name="Edit the message")).to_be_focused()
        await visit.page.keyboard.press("Escape")
        await expect(visit.button("Edit")).to_be_focused()
        await visit.button("Edit").press("Enter")
        await visit.page.get_by_role("textbox", name="Edit the message").press("Enter")
        await visit.answered()
        await expect(visit.composer).to_be_focused()
        await visit.button("Regenerate").press("Enter")
        await expect(visit.composer).to_be_focused()
        await visit.answered()
    async with signed_in(browser, echo, viewport=PHONE) as visit:
        await visit.button("Conversations").press("Enter")
        await expect(visit.button("New chat")).to_be_focused()
        await visit.page.keyboard.press("Escape")
        await expect(visit.button("Conversations")).to_be_focused()


async def test_context_meter(browser: Browser, tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> None:
    """It shows the tokens and their limit; the notice of dropped turns stays after a reload."""
    long = "Count from 1 to 20, and then from 20 to 1 again, and so on. " * 4
    small = {"INFERENCECENTER_ENGINE__N_CTX": "512", "INFERENCECENTER_ENGINE__SLOTS": "2"}
    with run_daemon(tmp_path_factory.mktemp("small") / "state", demo_model_path, **small) as daemon:
        async with connect_client(daemon) as client:
            session = await client.create(params={"max_tokens": 24})
        async with signed_in(browser, daemon) as visit:
            await visit.go(f"#/c/{session}")
            facts = visit.page.locator(".conversation-facts")
            await visit.ask("Count from 1 to 3.")
            await visit.answered()
            await expect(facts).to_contain_text(re.compile(r"\d+ / 512 tokens"))
            await expect(facts).not_to_contain_text("no longer read")
            answer = visit.answers.last
            for count in range(2, 9):
                await visit.ask(long)
                answer = await visit.answered(count=count)
                if "no longer reads the oldest" in await answer.inner_text():
                    break
            await expect(answer).to_contain_text("no longer reads the oldest")
            async with connect_client(daemon) as client:
                told = await client.ask(op="get_session", session_id=session)
            assert told["dropped_messages"] > 0
            for _ in range(2):
                await expect(facts).to_contain_text(f"{told['n_tokens']} / 512 tokens")
                await expect(facts).to_contain_text(
                    re.compile(f"Oldest {told['dropped_messages']} messages no longer read")
                )
                await visit.page.reload()
                await visit.answered(count=count)


async def test_long_question_is_folded(browser: Browser, echo: Daemon) -> None:
    """A button unfolds it; a short one is not folded."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("line\n" * 40)
        await visit.answered()
        folded = await visit.questions.first.bounding_box()
        await visit.button("Show all").click()
        await expect(visit.button("Show less")).to_have_attribute("aria-expanded", "true")
        whole = await visit.questions.first.bounding_box()
        assert folded is not None
        assert whole is not None
        assert folded["height"] < whole["height"] / 2
        await visit.ask("Short.")
        await visit.answered(count=2)
        await expect(visit.page.get_by_role("button", name="Show")).to_have_count(1)


async def test_text_has_its_own_direction(browser: Browser, echo: Daemon) -> None:
    """Each block follows its own first letters; code always runs from left to right."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("English first.\n\n\u0627\u0644\u0633 \u0627\u0644\n\n```\n\u0627\u0644\n```")
        answer = await visit.answered()
        directions = "(all) => all.map((each) => getComputedStyle(each).direction)"
        assert await answer.locator(".block").evaluate_all(directions) == ["ltr", "rtl", "ltr"]
        assert await answer.locator("pre").evaluate_all(directions) == ["ltr"]


async def test_speed_survives_a_reload(browser: Browser, echo: Daemon) -> None:
    """The time to the first token does, too."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("How fast is this?")
        outcome = (await visit.answered()).locator(".outcome")
        await expect(outcome).to_contain_text(re.compile("tokens/s.*to first token"))
        told = await outcome.inner_text()
        await visit.page.reload()
        await expect(outcome).to_contain_text("to first token")
        assert await outcome.inner_text() == told


async def test_detached_page_does_not_offer_to_stop(browser: Browser, echo: Daemon) -> None:
    """It says where the answer continues."""
    async with signed_in(browser, echo) as visit:
        await visit.ask(LONG)
        await expect(visit.answers.first).to_contain_text("Many words. Many")
        async with connect_client(echo) as client:
            await client.ask(op="resume_session", session_id=visit.session_id())
            await expect(visit.answers.first).to_contain_text("Continues in another tab")
            await expect(visit.button("Stop")).to_have_count(0)
            await expect(visit.button("Send")).to_be_disabled()


async def test_too_long_prompt_is_explained(browser: Browser, echo: Daemon) -> None:
    """The page has its own words for it, with both sizes."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("word " * 4000)
        problem = visit.answers.first.get_by_role("alert")
        await expect(problem).to_contain_text("This message is too long for the model.")
        await expect(problem).to_contain_text(
            re.compile(r"the limit, including the answer, is [\d,]+\. Shorten it, or start a new chat\.")
        )


async def test_shortcuts_are_listed_and_work(browser: Browser, echo: Daemon) -> None:
    """A question mark shows them, except where it is text; Ctrl+K searches."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Find me.")
        await visit.answered()
        await visit.composer.press("?")
        await expect(visit.composer).to_have_value("?")
        await visit.composer.press("Control+/")
        await expect(visit.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
        await visit.page.keyboard.press("Escape")
        await expect(visit.composer).to_be_focused()
        await visit.button("Conversation settings").focus()
        await visit.page.keyboard.press("?")
        shown = visit.page.get_by_role("dialog", name="Keyboard shortcuts")
        await expect(shown).to_contain_text("Search conversations")
        assert await barriers(visit) == []
        await visit.page.keyboard.press("Escape")
        await expect(shown).to_have_count(0)
        await visit.page.keyboard.press("Control+k")
        search = visit.page.get_by_role("searchbox", name="Search conversations")
        await expect(search).to_be_focused()
        await search.fill("nothing like it")
        await expect(visit.page.get_by_text("No matching conversations")).to_be_visible()
        await search.fill("find")
        await expect(visit.conversation("Find me.")).to_be_visible()
