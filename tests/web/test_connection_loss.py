"""What the page shows when the network, the engine or the daemon fails during an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from playwright.async_api import TimeoutError as TooLateError
from playwright.async_api import expect

from tests.e2e.harness import connect_client, run_daemon, start_daemon, stopped
from tests.web.browser import MARKS, bare, said, signed_in
from tests.web.conftest import ECHO, ROOMY
from tests.web.wire import proxy_to

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Browser, Locator, WebSocket

    from tests.e2e.harness import Daemon

pytestmark = MARKS

LOST = "WebSocket connection to|ERR_CONNECTION|ERR_INTERNET_DISCONNECTED|ERR_EMPTY_RESPONSE"
"""What a browser itself writes to the console about a socket that is lost."""
QUESTION = " ".join(f"{n} bottles of beer on the wall," for n in range(1, 40))


async def whole(answer: Locator, question: str = QUESTION) -> None:
    """Assert that an echoed answer is the complete question, once."""
    assert bare(await said(answer)) == bare(question)


async def test_reload_during_an_answer(browser: Browser, echo: Daemon) -> None:
    """After each of two reloads the page shows the answer, up to its end."""
    async with signed_in(browser, echo) as visit:
        await visit.ask(QUESTION)
        await expect(visit.answers.first).to_contain_text("4 bottles")
        with stopped(echo.engine_pid()):  # the answer must not end before the page is shown again
            await visit.page.reload()
            await expect(visit.answers.first).to_contain_text("4 bottles")
        await expect(visit.answers.first).to_contain_text("12 bottles")
        with stopped(echo.engine_pid()):
            await visit.page.reload()
            await expect(visit.button("Stop")).to_be_visible()
        await whole(await visit.answered())
        await visit.page.reload()
        await whole(await visit.answered())


async def test_network_loss_for_seconds(browser: Browser, echo: Daemon) -> None:
    """The page reports it, keeps what it shows, and then shows the complete answer."""
    async with proxy_to(echo.port) as (wire, origin), signed_in(browser, echo, origin=origin) as visit:
        visit.expected = LOST
        await visit.ask(QUESTION)
        await expect(visit.answers.first).to_contain_text("4 bottles")
        wire.pull_out()
        await expect(visit.page.get_by_text("cannot be reached")).to_be_visible()
        await expect(visit.answers.first).to_contain_text("Waiting for the connection")
        await wire.tried(4)  # half a second apart at first, then longer: some five seconds
        await visit.composer.fill("A draft that is kept.")
        wire.plug_in()
        await whole(await visit.answered())
        await expect(visit.page.get_by_text("cannot be reached")).to_have_count(0)
        await expect(visit.composer).to_have_value("A draft that is kept.")


async def test_repeated_disconnects_lose_no_text(browser: Browser, echo: Daemon) -> None:
    """No character is lost or repeated, with one resume per connection."""
    sent: list[list[str]] = []

    def follow(socket: WebSocket) -> None:
        frames: list[str] = []
        sent.append(frames)
        socket.on("framesent", lambda frame: frames.append(json.loads(frame)["op"]))

    async with proxy_to(echo.port) as (wire, origin), signed_in(browser, echo, origin=origin) as visit:
        visit.expected = LOST
        visit.page.on("websocket", follow)
        await visit.ask(QUESTION)
        for bottle in (3, 9, 20):
            await expect(visit.answers.first).to_contain_text(f"{bottle} bottles")
            wire.cut()
        await whole(await visit.answered())
    asked = [frames.count("resume_session") for frames in sent]
    assert asked[:2] == [1, 1]
    assert max(asked) == 1


async def test_online_event_reconnects_at_once(browser: Browser, echo: Daemon) -> None:
    """The page does not wait for its next attempt."""
    async with proxy_to(echo.port) as (wire, origin), signed_in(browser, echo, origin=origin) as visit:
        visit.expected = LOST
        await visit.ask(QUESTION)
        await expect(visit.answers.first).to_contain_text("4 bottles")
        await visit.page.context.set_offline(True)
        wire.cut()
        await expect(visit.page.get_by_text("Retrying in")).to_be_visible()
        await visit.page.context.set_offline(False)
        await whole(await visit.answered())


async def test_question_asked_while_offline(browser: Browser, echo: Daemon) -> None:
    """It is kept, sent after the reconnect, and answered once."""
    async with proxy_to(echo.port) as (wire, origin), signed_in(browser, echo, origin=origin) as visit:
        visit.expected = LOST
        await visit.ask("Before.")
        await visit.answered()
        wire.pull_out()
        await expect(visit.page.get_by_text("cannot be reached")).to_be_visible()
        await visit.ask("Meanwhile.")
        await expect(visit.answers.nth(1)).to_contain_text("Waiting for the connection")
        wire.plug_in()
        with suppress(TooLateError):  # it may be gone: the page has tried by itself
            await visit.button("Retry now").click(timeout=1000)
        assert await said(await visit.answered(count=2)) == "Meanwhile."
        async with connect_client(echo) as client:
            told = await client.ask(op="get_session", session_id=visit.session_id())
        assert [each["content"] for each in told["transcript"]] == ["Before.", "Before.", "Meanwhile.", "Meanwhile."]


async def test_engine_kill_during_an_answer(browser: Browser, tmp_path: Path, demo_model_path: Path) -> None:
    """The page shows the complete answer, as the daemon stores it."""
    with run_daemon(tmp_path / "state", demo_model_path, **ROOMY) as daemon:
        async with connect_client(daemon) as client:
            params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 400}
            session = await client.create(params=params)
        async with signed_in(browser, daemon) as visit:
            await visit.go(f"#/c/{session}")
            await visit.ask("Count from 1 to 100.")
            await expect(visit.answers.first).to_contain_text("3, 4")
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            await expect(visit.page.get_by_text("is restarting")).to_be_visible()
            answer = await visit.answered()
            await expect(answer).to_contain_text("400 tokens")
            await expect(visit.page.get_by_text("is restarting")).to_have_count(0)
            async with connect_client(daemon) as client:
                told = await client.ask(op="get_session", session_id=session)
            assert bare(await said(answer)) == bare(told["transcript"][-1]["content"])


async def test_daemon_kill_during_an_answer(browser: Browser, tmp_path: Path, demo_model_path: Path) -> None:
    """The page resumes the answer after the restart."""
    daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
    try:
        daemon.wait_ready()
        async with signed_in(browser, daemon) as visit:
            visit.expected = LOST
            await visit.ask(QUESTION)
            await expect(visit.answers.first).to_contain_text("9 bottles")
            daemon.process.kill()
            daemon.process.wait()
            await expect(visit.page.get_by_text("cannot be reached")).to_be_visible()
            settings = {**ECHO, "INFERENCECENTER_SERVER__PORT": str(daemon.port)}
            daemon = replace(start_daemon(tmp_path / "state", demo_model_path, **settings), port=daemon.port)
            await whole(await visit.answered())
    finally:
        daemon.process.kill()
        await asyncio.to_thread(daemon.process.wait)


async def test_conversation_moves_between_tabs(browser: Browser, echo: Daemon) -> None:
    """One tab has the conversation; the other says so, and can take it back during an answer."""
    async with signed_in(browser, echo) as one, signed_in(browser, echo) as two:
        await one.ask(QUESTION)
        await expect(one.answers.first).to_contain_text("3 bottles")
        await two.go(f"#/c/{one.session_id()}")
        await expect(two.answers.first).to_contain_text("9 bottles")
        await expect(one.page.get_by_text("open in another tab")).to_be_visible()
        await expect(one.composer).to_be_disabled()
        await one.button("Continue here").click()
        await expect(two.page.get_by_text("open in another tab")).to_be_visible()
        await whole(await one.answered())
        await two.button("Continue here").click()
        await whole(await two.answered())


async def test_address_of_a_missing_conversation(browser: Browser, echo: Daemon) -> None:
    """The page says so and offers another."""
    async with signed_in(browser, echo) as visit:
        await visit.ask("Soon gone.")
        await visit.answered()
        gone = visit.session_id()
        async with connect_client(echo) as client:
            assert (await client.ask(op="close_session", session_id=gone))["op"] == "session_closed"
        await visit.page.reload()
        await expect(visit.page.get_by_text("was deleted, or it expired")).to_be_visible()
        await expect(visit.composer).to_be_disabled()
        await visit.button("New chat", inside=visit.page.get_by_role("status")).click()
        await visit.ask("After it.")
        assert await said(await visit.answered()) == "After it."
        for address in (f"#/c/{gone}", "#/c/never-was", "#/c/%3Cb%3E..%2F", "#/nowhere/else"):
            await visit.go(address)
            await visit.page.reload()
            await expect(visit.composer).to_be_visible()
