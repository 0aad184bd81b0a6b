"""Tools of MCP servers in the page: chosen, approved, run, denied, interrupted."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect

from tests.e2e.harness import connect_client
from tests.mcp.daemon import declared, mcp_daemon
from tests.mcp.serving import HOSTILE, CallFile, serve
from tests.web.browser import MARKS, PHONE, Visit, barriers, signed_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.async_api import Browser

    from tests.e2e.harness import Daemon

pytestmark = MARKS


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> CallFile:
    """The calls that the server ran."""
    return CallFile(tmp_path_factory.mktemp("mcp") / "calls")


@pytest.fixture(scope="module")
def server(calls: CallFile) -> Iterator[int]:
    """The port of an MCP server."""
    with serve(calls) as (_, port):
        yield port


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory, server: int) -> Iterator[Daemon]:
    """A daemon with MCP servers."""
    with mcp_daemon(tmp_path_factory.mktemp("daemon"), declared(server)) as running:
        yield running


async def choose_weather(visit: Visit) -> None:
    """Switch the tools of the server on, in the settings."""
    await visit.button("Conversation settings").click()
    await visit.page.get_by_role("checkbox", name="weather").check()
    await visit.button("Close the settings").click()
    await expect(visit.button("Tools: weather")).to_be_visible()


async def test_servers_and_their_tools_are_shown(browser: Browser, tooled: Daemon) -> None:
    """The settings show which cannot be used, and why; the choice is a chip and survives a reload."""
    async with signed_in(browser, tooled) as visit:
        await visit.button("Conversation settings").click()
        drawer = visit.page.get_by_role("complementary", name="Conversation settings")
        await expect(drawer.get_by_role("checkbox", name="gone")).to_be_disabled()
        await expect(drawer).to_contain_text("Cannot be used: no connection")
        await drawer.get_by_text("8 tools").click()
        await expect(drawer).to_contain_text("The weather of a city.")
        await expect(drawer).to_contain_text("get_weather runs without confirmation")
        assert await barriers(visit) == []
        await drawer.get_by_role("checkbox", name="weather").check()
        await visit.page.reload()
        await expect(visit.button("Tools: weather")).to_be_visible()
        await visit.button("Clear: Tools: weather").click()
        await expect(visit.button("Tools: weather")).to_have_count(0)


async def test_harmless_tool_runs_without_a_question(browser: Browser, tooled: Daemon) -> None:
    """The operator said so; the result is in the conversation, also after a reload, and the model continues."""
    async with signed_in(browser, tooled) as visit:
        await choose_weather(visit)
        await visit.ask("weather in Oslo")
        answer = await visit.answered(count=2)
        await expect(answer).to_contain_text("So it is.")
        await expect(visit.answers.first).to_contain_text("Called get_weather")
        await visit.page.get_by_text("Tool output").click()
        await expect(visit.page.get_by_text("-3 °C in Oslo")).to_be_visible()
        await visit.page.reload()
        await visit.answered(count=2)
        await visit.page.get_by_text("Tool output").click()
        await expect(visit.page.get_by_text("-3 °C in Oslo")).to_be_visible()


async def test_user_allows_once_always_and_denies(browser: Browser, tooled: Daemon) -> None:
    """Nothing runs before; "always" holds for this conversation only; a denial is told to the model."""
    async with signed_in(browser, tooled, viewport=PHONE) as visit:
        await choose_weather(visit)
        await visit.ask("fail please")
        await expect(visit.button("Allow once")).to_be_visible()
        assert await barriers(visit) == []
        await visit.button("Allow once").click()
        await visit.answered(count=2)
        assert await visit.page.evaluate("document.activeElement !== document.body")
        await visit.ask("fail again")
        await visit.button("Deny").click()
        await visit.answered(count=4)
        await expect(visit.page.get_by_text("Tool output")).to_have_count(2)
        async with connect_client(tooled) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert [each["content"] for each in told["transcript"] if each["role"] == "tool"][
            -1
        ] == "The user denied this call."
        await visit.ask("fail a third time")
        await visit.button("Always in this conversation").click()
        await visit.answered(count=6)
        await visit.ask("fail a fourth time")
        await visit.answered(count=8)
        await visit.button("Conversations").click()
        await visit.page.get_by_role("navigation").get_by_role("button", name="New chat").click()
        await visit.ask("fail elsewhere")
        await expect(visit.button("Allow once")).to_be_visible()


async def test_hostile_result_is_text(browser: Browser, tooled: Daemon) -> None:
    """No script runs and nothing is requested."""
    async with signed_in(browser, tooled) as visit:
        await choose_weather(visit)
        await visit.ask("hostile")
        await visit.button("Allow once").click()
        await visit.answered(count=2)
        await visit.page.get_by_text("Tool output").click()
        await expect(visit.page.locator(".tool pre").last).to_have_text(HOSTILE)
        assert await visit.page.evaluate("window.hacked === undefined")
        assert await visit.page.locator(".tool img, .tool script, .tool a").count() == 0


async def test_stopped_call_can_be_answered_by_hand(browser: Browser, tooled: Daemon, calls: CallFile) -> None:
    """Stop aborts it; then it can be run again, denied, or answered."""
    async with signed_in(browser, tooled) as visit:
        await choose_weather(visit)
        await visit.ask("slow")
        await visit.button("Allow once").click()
        await expect(visit.page.get_by_text("Running slow on weather…")).to_be_visible()
        await calls.until("slow began")
        await visit.button("Stop").click()
        await expect(visit.page.get_by_text("Interrupted, result unknown")).to_be_visible()
        await visit.button("Enter the output").click()
        await visit.page.get_by_label("Output of slow").fill("waited")
        await visit.button("Send output").click()
        await visit.answered(count=2)


async def test_kill_in_mid_call_is_shown(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, server: int, calls: CallFile
) -> None:
    """After a kill -9 of the daemon the page shows an unknown result, and runs the call only on request."""
    folder = tmp_path_factory.mktemp("killed")
    before = calls.count("slow began")
    with mcp_daemon(folder, declared(server)) as daemon:
        async with signed_in(browser, daemon) as visit:
            await choose_weather(visit)
            await visit.ask("slow")
            await visit.button("Always in this conversation").click()
            await calls.until("slow began", before + 1)
            session = visit.session_id()
            visit.expected = "WebSocket|ERR_CONNECTION_REFUSED"
            daemon.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(daemon.process.wait)
    with mcp_daemon(folder, declared(server)) as daemon:
        async with signed_in(browser, daemon) as visit:
            await visit.go(f"#/c/{session}")
            await expect(visit.page.get_by_text("Output of slow")).to_be_visible()
            await choose_weather(visit)
            await expect(visit.page.get_by_text("Interrupted, result unknown: it may have run.")).to_be_visible()
            assert await barriers(visit) == []
            assert calls.count("slow began") == before + 1
            await visit.button("Run again").click()
            await calls.until("slow began", before + 2)
            await visit.button("Stop").click()
            await visit.button("Continue without it").click()
            await visit.answered(count=2)
            await visit.page.get_by_text("Tool output").click()
            await expect(visit.page.get_by_text("It may have run; its result is unknown.")).to_be_visible()
