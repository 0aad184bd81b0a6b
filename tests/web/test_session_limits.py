"""The limits of sessions and of their archive in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from playwright.async_api import expect

from tests.e2e.harness import Daemon, command_line, connect_client, run_daemon
from tests.web.browser import MARKS, barriers, signed_in
from tests.web.conftest import ECHO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.async_api import Browser

pytestmark = MARKS

MOST: Final = 4
N_CHATS: Final = 6
N_FILLING: Final = 2**20 // 4096
"""Empty archived sessions that fill an archive of 1 Mi characters."""


@pytest.fixture
def small(tmp_path: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon with few live sessions and the smallest archive."""
    settings = ECHO | {"INFERENCECENTER_SESSIONS__ARCHIVE_MIB": "1"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as running:
        command_line(running, "client", "limits", "admin", f"max_sessions={MOST}")
        yield running


async def test_chats_beyond_the_session_limit_are_archived(browser: Browser, small: Daemon) -> None:
    """Each stays in the list, opens with its text and continues, in this page and in one opened later."""
    questions = [f"Question {n}." for n in range(1, N_CHATS + 1)]
    async with signed_in(browser, small) as visit:
        limits = visit.page.locator(".limits")
        for n, question in enumerate(questions, start=1):
            await visit.button("New chat").click()
            await visit.ask(question)
            await visit.answered()
            if n == MOST - 1:
                await expect(limits).to_have_count(0)
            elif n == MOST:
                await expect(limits).to_have_text(f"{n} of {MOST} conversations active.")
        await expect(limits).to_contain_text(f"{MOST} of {MOST} conversations active, {N_CHATS - MOST} archived")
        assert await barriers(visit) == []
        for question in questions:
            await visit.conversation(question).click()
            await expect(visit.questions).to_have_text([question])
            await expect(await visit.answered()).to_contain_text(question)
        await visit.conversation(questions[0]).click()
        await visit.ask("And more.")
        await expect(await visit.answered(count=2)).to_contain_text("And more.")
        await visit.page.reload()
        await expect(visit.page.locator(".item")).to_have_count(N_CHATS)
        await visit.conversation(questions[1]).click()
        await expect(visit.questions).to_have_text([questions[1]])
        await visit.ask("Continued.")
        await expect(await visit.answered(count=2)).to_contain_text("Continued.")
    told = await _sessions(small)
    assert sorted(each["metadata"]["title"] for each in told["sessions"]) == questions
    assert told["session_usage"]["live"] == MOST


async def test_versions_at_the_session_limit(browser: Browser, small: Daemon) -> None:
    """A version is a session, so the first ones are archived; each can be shown again."""
    async with signed_in(browser, small) as visit:
        versions = visit.page.get_by_role("group", name="Versions")
        await visit.ask("Question.")
        for n in range(2, N_CHATS + 1):
            await visit.answered()
            await visit.button("Regenerate").click()
            await expect(versions).to_contain_text(f"{n}/{n}")
        await visit.answered()
        for n in range(N_CHATS - 1, 0, -1):
            await visit.button("Previous version").click()
            await expect(versions).to_contain_text(f"{n}/{N_CHATS}")
            await expect(await visit.answered()).to_contain_text("Question.")
        await expect(visit.page.locator(".item")).to_have_count(1)
    told = await _sessions(small)
    assert (len(told["sessions"]), told["session_usage"]["live"]) == (N_CHATS, MOST)


async def test_full_archive_is_explained_in_the_page(browser: Browser, small: Daemon) -> None:
    """Nothing is deleted, and what exists continues; another attempt is offered after a deletion."""
    async with connect_client(small) as client:
        for n in range(N_FILLING + MOST):
            await client.create(metadata={"title": f"Old {n}"})
    async with signed_in(browser, small) as visit:
        again = visit.button("Try again", inside=visit.answers)
        await expect(visit.page.locator(".limits")).to_contain_text("The space for conversations is full")
        search = visit.page.get_by_role("searchbox")
        await search.fill("Old 3")
        await visit.conversation("Old 3").click()
        await expect(visit.conversation("Old 3")).to_have_attribute("aria-current", "page")
        await visit.ask("It continues.")
        await expect(await visit.answered()).to_contain_text("It continues.")
        await visit.button("Regenerate").click()
        await expect(visit.page.locator(".toast")).to_contain_text("no further conversation or version can be stored")
        await visit.button("Dismiss").click()
        await expect(visit.page.get_by_role("article", name="Answer")).to_contain_text("It continues.")
        await visit.button("New chat").click()
        await visit.ask("New question.")
        notice = visit.answers.get_by_role("alert")
        await expect(notice).to_contain_text("The space for conversations is full")
        await expect(notice).to_contain_text("delete some from the list; Settings can export all of them first")
        await expect(notice).not_to_contain_text("sessions.archive_mib")
        await expect(again).to_have_count(0)
        assert len((await _sessions(small))["sessions"]) == N_FILLING + MOST
        await search.fill("Old 0")
        await visit.conversation("Old 0").press("Delete")
        await visit.button("Delete", inside=visit.page.get_by_role("dialog")).click()
        await expect(visit.conversation("Old 0")).to_have_count(0)
        await expect(visit.page.locator(".limits")).to_contain_text("99 % of the space for conversations is used")
        await again.click()
        await expect(await visit.answered()).to_contain_text("New question.")
    told = await _sessions(small)
    assert len(told["sessions"]) == N_FILLING + MOST


async def _sessions(daemon: Daemon) -> dict[str, Any]:
    async with connect_client(daemon) as client:
        told: dict[str, Any] = await client.ask(op="list_sessions", limit=1000)
    return told
