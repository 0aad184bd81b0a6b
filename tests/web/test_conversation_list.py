"""A long list of conversations: read and shown by windows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from playwright.async_api import expect

from tests.web.browser import MARKS, Visit, origin_of, visiting
from tests.web.stub import Stub

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS

MANY: Final = 10_000
WINDOW: Final = 100
NOW_S: Final = 1_700_000_000.0
USAGE: Final = {"live": 0, "max_sessions": 16, "stored_chars": 1, "max_stored_chars": 2**30}
STORED: Final = {
    "op": "session_resumed", "session_id": "s9999", "resumed": False, "reason": "no_position", "state": "idle",
    "epoch": "e1", "seq": 9, "turns": [{"turn_id": "t1", "finish_reason": "stop", "messages": 2}],
    "transcript": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}],
}  # fmt: skip


def summary(number: int, *, used_at: float) -> dict[str, Any]:
    """Return a session of the list."""
    return {
        "session_id": f"s{number}", "state": "idle", "mode": "chat", "model": "stub", "messages": 2, "tokens": 9,
        "created_at": NOW_S - number, "last_used_at": used_at, "metadata": {"title": f"Conversation {number}"},
        "archived": True,
    }  # fmt: skip


@dataclass
class Shelf:
    """Answers `list_sessions` with many sessions, keeps the requests, and notes when all sessions were read."""

    rows: list[dict[str, Any]] = field(
        default_factory=lambda: [summary(number, used_at=NOW_S - number) for number in range(MANY)]
    )
    requests: list[tuple[str, int]] = field(default_factory=list)
    is_read: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a page in the order asked for."""
        order = asked.get("order", "oldest")
        self.requests.append((order, asked["limit"]))
        recent = sorted(self.rows, key=lambda row: -row["last_used_at"])
        rows = recent if order == "recent" else sorted(self.rows, key=lambda row: row["created_at"])
        start, end = int(asked.get("after", 0)), int(asked.get("after", 0)) + asked["limit"]
        page = {"op": "sessions", "sessions": rows[start:end], "session_usage": {**USAGE, "archived": len(self.rows)}}
        if end < len(rows):
            return {**page, "next": str(end)}
        self.is_read.set()
        return page


async def opened(visit: Visit, shelf: Shelf) -> None:
    """Open the page on the shelf, and wait until its whole list is read."""
    answers = {"list_sessions": shelf.answer, "resume_session": lambda _: STORED}
    await Stub(answers=answers).take_over(visit.page)
    await visit.go("#token=any")
    await expect(visit.page.locator(".item").first).to_be_visible()
    await shelf.is_read.wait()


async def test_long_list_is_shown_by_windows(browser: Browser, echo: Daemon) -> None:
    """Of 10,000 conversations only those near the view are elements, and the first page is what is shown first."""
    shelf = Shelf()
    async with visiting(browser, origin_of(echo)) as visit:
        await opened(visit, shelf)
        assert shelf.requests[0] == ("recent", WINDOW)
        items = visit.page.locator(".item")
        await expect(items).to_have_count(WINDOW)
        await expect(items.first).to_have_text("Conversation 0")
        await visit.page.locator(".sidebar-list").evaluate("(each) => each.scrollTo(0, each.scrollHeight)")
        await expect(items).to_have_count(2 * WINDOW)
        await items.last.get_by_role("button").first.focus()
        await expect(items).to_have_count(3 * WINDOW)
        await visit.page.keyboard.press("ArrowDown")
        await expect(visit.conversation(f"Conversation {2 * WINDOW}")).to_be_focused()


async def test_conversation_beyond_the_window_is_found_by_its_title(browser: Browser, echo: Daemon) -> None:
    """The search has all titles, and what is found opens."""
    async with visiting(browser, origin_of(echo)) as visit:
        await opened(visit, Shelf())
        await visit.page.get_by_role("searchbox").fill("conversation 9999")
        await expect(visit.page.locator(".item")).to_have_count(1)
        await visit.conversation("Conversation 9999").click()
        await expect(visit.answers).to_contain_text("Good day.")
        await expect(visit.page.get_by_role("heading", name="Conversation 9999")).to_be_visible()


async def test_known_list_is_read_by_what_changed(browser: Browser, echo: Daemon) -> None:
    """One short page is read, and the whole list only if its count shows that a conversation is missing."""
    shelf = Shelf()
    async with visiting(browser, origin_of(echo)) as visit:
        await opened(visit, shelf)
        items = visit.page.locator(".item")
        await expect(items).to_have_count(WINDOW)
        shelf.requests.clear()
        shelf.rows[7000] = summary(7000, used_at=NOW_S + 1)
        await visit.look_again()
        await expect(items.first).to_have_text("Conversation 7000")
        assert shelf.requests == [("recent", WINDOW)]
        del shelf.rows[5000]
        await visit.look_again()
        await visit.page.get_by_role("searchbox").fill("conversation 5000")
        await expect(items).to_have_count(0)
        assert shelf.requests[1:3] == [("recent", WINDOW), ("oldest", 1000)]


async def test_list_is_one_stop_of_the_tab_key(browser: Browser, echo: Daemon) -> None:
    """Tab reaches one conversation with its actions, then what follows the list; the arrow keys reach the others."""
    async with visiting(browser, origin_of(echo)) as visit:
        await opened(visit, Shelf())
        keyboard = visit.page.keyboard
        await visit.page.get_by_role("searchbox").focus()
        await keyboard.press("Tab")
        await expect(visit.conversation("Conversation 0")).to_be_focused()
        await keyboard.press("ArrowDown")
        await keyboard.press("ArrowDown")
        await expect(visit.conversation("Conversation 2")).to_be_focused()
        for action in ("Rename Conversation 2", "Delete Conversation 2", "Chat"):
            await keyboard.press("Tab")
            await expect(visit.button(action)).to_be_focused()
        await keyboard.press("Shift+Tab")
        await expect(visit.conversation("Conversation 2")).to_be_focused()
