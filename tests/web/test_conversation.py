"""A conversation in a browser, with the demo model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.async_api import expect

from tests.e2e.harness import ENDLESS, connect_client
from tests.web.browser import MARKS, bare, said, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS


async def test_answer_streams_to_its_end(browser: Browser, daemon: Daemon) -> None:
    """It grows, then shows its statistics; address, list and title name the conversation."""
    question = "Count from 1 to 20."
    async with signed_in(browser, daemon) as visit:
        await visit.ask(question)
        await expect(visit.answers.first).to_contain_text("3, 4")
        answer = await visit.answered()
        text = await said(answer)
        assert text.startswith("1, 2, 3, 4, 5")
        await expect(answer).to_contain_text(re.compile(r"\d+ tokens.*tokens/s.*\d+ m?s to first token"))
        await expect(visit.conversation(question)).to_have_attribute("aria-current", "page")
        await expect(visit.page).to_have_title(re.compile(re.escape(question)))
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert bare(text) == bare(told["transcript"][-1]["content"])


async def test_stop(browser: Browser, daemon: Daemon) -> None:
    """The partial text stays, in the page and the daemon, and the next question is answered."""
    async with connect_client(daemon) as client:
        session = await client.create(params=ENDLESS)
    async with signed_in(browser, daemon) as visit:
        await visit.go(f"#/c/{session}")
        await visit.ask("Count from 1 to 100.")
        await expect(visit.answers.first).to_contain_text("7, 8")
        await visit.button("Stop").click()
        answer = await visit.answered()
        await expect(answer).to_contain_text("Stopped")
        text = await said(answer)
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=session)
            assert bare(told["transcript"][-1]["content"]) == bare(text)
            assert told["turns"][-1]["finish_reason"] == "aborted"
        await visit.ask("Count from 1 to 5.")
        await expect(visit.answers.nth(1)).to_contain_text("1, 2")
        await visit.page.keyboard.press("Escape")
        await expect(await visit.answered(count=2)).to_contain_text("Stopped")


async def test_edited_question_replaces_the_turn(browser: Browser, daemon: Daemon) -> None:
    """The page and the daemon remove later turns."""
    async with signed_in(browser, daemon) as visit:
        for count, question in enumerate(("My name is Ada.", "Count from 1 to 3.", "Count from 1 to 4."), start=1):
            await visit.ask(question)
            await visit.answered(count=count)
        await visit.questions.nth(1).hover()
        await visit.button("Edit", inside=visit.questions.nth(1)).click()
        editor = visit.page.get_by_role("textbox", name="Edit the message")
        await expect(editor).to_be_focused()
        await editor.fill("What is my name?")
        await editor.press("Enter")
        answer = await visit.answered(count=2)
        await expect(visit.questions).to_have_text([re.compile("My name is Ada"), re.compile("What is my name")])
        await expect(answer).to_contain_text("Ada")
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        asked = [each["content"] for each in told["transcript"] if each["role"] == "user"]
        assert asked == ["My name is Ada.", "What is my name?"]


async def test_regenerate(browser: Browser, daemon: Daemon) -> None:
    """The last answer is replaced by another."""
    async with signed_in(browser, daemon) as visit:
        await visit.ask("Count from 1 to 6.")
        first = await visit.answered()
        shown = await first.element_handle()
        await visit.button("Regenerate", inside=first).click()
        await shown.wait_for_element_state("hidden")
        answer = await visit.answered()
        await expect(visit.questions).to_have_count(1)
        await expect(answer).to_contain_text("1, 2, 3")
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert [each["role"] for each in told["transcript"]] == ["user", "assistant"]


async def test_fork(browser: Browser, daemon: Daemon) -> None:
    """The fork has the conversation up to that point; the first one is unchanged."""
    async with signed_in(browser, daemon) as visit:
        await visit.ask("My name is Grace.")
        await visit.answered()
        await visit.ask("Count from 1 to 3.")
        await visit.answered(count=2)
        first = visit.session_id()
        await visit.button("Fork from here", inside=visit.answers.first).click()
        await expect(visit.questions).to_have_count(1)
        await expect(visit.conversation("My name is Grace. (fork)")).to_have_attribute("aria-current", "page")
        assert visit.session_id() != first
        await visit.ask("What is my name?")
        await expect(await visit.answered(count=2)).to_contain_text("Grace")
        await visit.conversation("My name is Grace.").click()
        await expect(visit.questions).to_have_count(2)
        assert visit.session_id() == first


async def test_rename_and_delete(browser: Browser, daemon: Daemon) -> None:
    """The new name is visible to other browsers; deletion asks for confirmation and applies there too."""
    async with signed_in(browser, daemon) as visit:
        await visit.ask("Count from 1 to 2.")
        await visit.answered()
        session = visit.session_id()
        await visit.conversation("Count from 1 to 2.").hover()
        await visit.button("Rename Count from 1 to 2.").click()
        title = visit.page.get_by_role("textbox", name="Title")
        await title.fill("Numbers <b>&amp; such")
        await title.press("Enter")
        await expect(visit.conversation("Numbers <b>&amp; such")).to_be_focused()
        await visit.page.reload()
        await expect(visit.conversation("Numbers <b>&amp; such")).to_be_visible()
        await visit.conversation("Numbers <b>&amp; such").press("Delete")
        await visit.button("Cancel").click()
        await expect(visit.questions).to_have_count(1)
        await visit.conversation("Numbers <b>&amp; such").press("Delete")
        await visit.button("Delete", inside=visit.page.get_by_role("dialog")).click()
        await expect(visit.conversation("Numbers <b>&amp; such")).to_have_count(0)
        await expect(visit.questions).to_have_count(0)
        async with connect_client(daemon) as client:
            told = await client.ask(op="get_session", session_id=session)
        assert (told["op"], told["code"]) == ("error", "session_not_found")


async def test_parameters_and_output_format_apply(browser: Browser, daemon: Daemon) -> None:
    """A token limit and a regular expression chosen in the panel apply to the next answers."""
    async with signed_in(browser, daemon) as visit:
        await visit.button("Conversation settings").click()
        settings = visit.page.get_by_role("complementary", name="Conversation settings")
        await settings.get_by_label("Max tokens", exact=True).fill("0.5")
        await expect(settings.get_by_role("alert")).not_to_be_empty()
        await settings.get_by_label("Max tokens", exact=True).fill("7")
        await expect(settings.get_by_role("alert")).to_have_count(0)
        await visit.button("Close the settings").click()
        await visit.ask("Count from 1 to 100.")
        answer = await visit.answered()
        await expect(answer).to_contain_text("Reached the token limit")
        await expect(answer).to_contain_text("7 tokens")
        await visit.button("Conversation settings").click()
        await settings.get_by_label("Response format").select_option("regex")
        await settings.get_by_role("textbox", name="Regular expression").fill("(yes|no)")
        await visit.page.keyboard.press("Escape")
        await visit.ask("Is the sky blue?")
        assert await said(await visit.answered(count=2)) in ("yes", "no")


async def test_keyboard_operation(browser: Browser, daemon: Daemon) -> None:
    """Asking, listing, renaming and starting a new chat work by keyboard, which leaves the focus where it is needed."""
    async with signed_in(browser, daemon) as visit:
        keyboard = visit.page.keyboard
        await expect(visit.composer).to_be_focused()
        await keyboard.type("Count from 1 to 3.")
        await keyboard.press("Shift+Enter")
        await keyboard.type("Slowly.")
        await keyboard.press("Enter")
        await visit.answered()
        await expect(visit.composer).to_be_focused()
        names = await visit.tab_through()
        for wanted in ("New chat", "Count from 1 to 3. Slowly.", "Rename Count from 1 to 3. Slowly.", "Dashboard"):
            assert wanted in names
        for wanted in ("Sign out", "Conversation settings", "Edit", "Copy", "Regenerate", "Fork from here"):
            assert wanted in names
        await visit.conversation("Count from 1 to 3. Slowly.").focus()
        await keyboard.press("F2")
        await keyboard.type("Three")
        await keyboard.press("Enter")
        await expect(visit.conversation("Three")).to_be_focused()
        await keyboard.press("Control+Shift+o")
        await expect(visit.questions).to_have_count(0)
        await expect(visit.composer).to_be_focused()
