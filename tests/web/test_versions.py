"""Versions of questions and answers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.web import node
from tests.web.browser import MARKS, barriers, signed_in

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

TREE: Final = {
    "a": {},
    "b": {"version_root": "a", "version_of": "a", "version_at": "1"},
    "c": {"version_root": "a", "version_of": "a", "version_at": "1"},
    "d": {"version_root": "a", "version_of": "b", "version_at": "2"},
    "other": {},
}
"""Sessions by age: two more versions of the second turn of a, and one of the third turn of b."""
WHICH: Final = """
  const entries = Object.entries(input.tree);
  const list = entries.map(([session_id, metadata], created_at) => ({ session_id, metadata, created_at }));
  return input.asked.map(([id, index]) => {
    const { ids, at } = versionsAt(list, id, index);
    return [ids.join(""), at, versionFields(list, id, index).version_of];
  });
"""


async def test_versions_of_a_turn_are_found_from_each() -> None:
    """A turn that is shared belongs to the version in which it began."""
    asked = [["a", 0], ["a", 1], ["b", 1], ["d", 1], ["d", 2], ["b", 2], ["c", 2], ["other", 0]]
    found = node.run(
        'import { versionFields, versionsAt } from "JS/versions.js";', WHICH, given={"tree": TREE, "asked": asked}
    )
    assert found == [
        ["a", 0, "a"],
        ["abc", 0, "a"],
        ["abc", 1, "a"],
        ["abc", 1, "a"],
        ["bd", 1, "b"],
        ["bd", 0, "b"],
        ["c", 0, "c"],
        ["other", 0, "other"],
    ]


async def test_edit_and_regenerate_keep_the_version_before(browser: Browser, echo: Daemon) -> None:
    """Later messages are kept with it; the list has one entry, whose title follows its first question."""
    async with signed_in(browser, echo) as visit:
        versions = visit.page.get_by_role("group", name="Versions")
        await visit.ask("First question.")
        await visit.answered()
        await visit.ask("Second question.")
        await visit.answered(count=2)
        before = visit.session_id()
        await visit.button("Edit", inside=visit.questions.first).click()
        await visit.page.get_by_role("textbox", name="Edit the message").fill("Another question.")
        await visit.page.get_by_role("textbox", name="Edit the message").press("Enter")
        await expect(visit.questions).to_have_count(1)
        await expect(await visit.answered()).to_contain_text("Another question.")
        await expect(versions).to_contain_text("2/2")
        assert visit.session_id() != before
        await expect(visit.page.locator(".item")).to_have_count(1)
        await expect(visit.conversation("Another question.")).to_have_attribute("aria-current", "page")
        await visit.button("Previous version").click()
        await expect(visit.questions).to_have_text([re.compile("First"), re.compile("Second")])
        await expect(versions).to_contain_text("1/2")
        assert visit.session_id() == before
        assert await barriers(visit) == []
        await visit.button("Regenerate", inside=visit.answers.last).click()
        await expect(versions).to_have_count(2)
        await expect(versions.last).to_contain_text("2/2")
        await visit.answered(count=2)
        await visit.page.reload()
        await expect(versions).to_have_count(2)
        await expect(visit.page.locator(".item")).to_have_count(1)
        async with connect_client(echo) as client:
            told = await client.ask(op="get_session", session_id=before)
        assert [each["content"] for each in told["transcript"] if each["role"] == "user"] == [
            "First question.",
            "Second question.",
        ]
        await visit.conversation("Another question.").press("Delete")
        dialog = visit.page.get_by_role("dialog")
        await expect(dialog).to_contain_text("with its 3 versions")
        await visit.button("Delete", inside=dialog).click()
        await expect(visit.page.locator(".item")).to_have_count(0)
        async with connect_client(echo) as client:
            assert (await client.ask(op="get_session", session_id=before))["op"] == "error"


async def test_edit_is_undone(browser: Browser, echo: Daemon) -> None:
    """The version before is shown with its title, the new one is deleted, and the focus stays in the page."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("The first question.")
        await visit.answered()
        before = visit.session_id()
        await visit.button("Edit", inside=visit.questions.first).click()
        await visit.page.get_by_role("textbox", name="Edit the message").fill("A worse question.")
        await visit.page.get_by_role("textbox", name="Edit the message").press("Enter")
        await expect(visit.conversation("A worse question.")).to_be_visible()
        await expect(await visit.answered()).to_contain_text("A worse question.")
        made = visit.session_id()
        assert await barriers(visit) == []
        await visit.button("Undo").click()
        await expect(visit.questions).to_have_text([re.compile("The first question.")])
        await expect(visit.conversation("The first question.")).to_have_attribute("aria-current", "page")
        await expect(visit.page.get_by_role("group", name="Versions")).to_have_count(0)
        await expect(visit.button("Undo")).to_have_count(0)
        await expect(visit.composer).to_be_focused()
        assert visit.session_id() == before
        async with connect_client(echo) as client:
            assert (await client.ask(op="get_session", session_id=made))["op"] == "error"
        await visit.button("Regenerate").click()
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("2/2")
        await visit.answered()
        await visit.button("Keep both").click()
        await expect(visit.button("Undo")).to_have_count(0)
        await expect(visit.page.get_by_role("group", name="Versions")).to_contain_text("2/2")
