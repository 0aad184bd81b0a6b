"""Choosing, loading and changing models in ``inferencecenter chat``."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from inferencecenter.cli.view import PlainView, TerminalView
from inferencecenter.protocol.events import EngineChanged, ModelChanged, Queued, Thermal, Token
from tests.cli.chat_harness import Screen, answer, chat_on_terminal, run_chat

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.client.peer import Peer, Start

CHANGED = ModelChanged(model="phi", n_ctx=2048)
WARM = Thermal(state="warm", temp=81.4, action="half of the slots are in use")
COOL = Thermal(state="cool", action="all slots are in use")
CHANGED_LINE = "phi is the model from now on, with a context of 2048 tokens"
WARM_LINE = "the GPU is warm at 81 °C: half of the slots are in use"


async def _refuse_loading(peer: Peer, op: str) -> dict[str, object]:
    request = await peer.receive()
    assert request["op"] == op
    await peer.refuse(request, "model_loading", retryable=True, retry_after_ms=0)
    return request


async def test_chosen_model_is_awaited(cli: Cli, monkeypatch: pytest.MonkeyPatch, scripted: Start) -> None:
    """Every session request names it, and a pipe shows only the answer."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        assert (await _refuse_loading(peer, "create_session"))["model"] == "phi"
        await peer.open_session("s1")
        await answer(peer, "One.", session_id="s1")
        await peer.open_session("s2")
        assert peer.received[-1]["model"] == "phi"
        await answer(peer, "Two.", session_id="s2")

    url = await scripted(daemon)
    result = await run_chat(cli, monkeypatch, url, "a\n/new\nb\n", "--model", "phi")
    assert (result.code, result.out, result.err) == (0, "One.\nTwo.\n", "")


async def test_resumed_session_waits_for_its_model(cli: Cli, monkeypatch: pytest.MonkeyPatch, scripted: Start) -> None:
    """The turn is requested again until the session's own model is loaded."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle", seq=0)
        first = await _refuse_loading(peer, "infer")
        second = await answer(peer, "Here.")
        assert first["prompt"] == second["prompt"] == "hello"

    result = await run_chat(cli, monkeypatch, await scripted(daemon), "hello\n", "--resume", "s1")
    assert (result.code, result.out) == (0, "Here.\n")


@pytest.mark.parametrize("options", [("--resume", "s1"), ("--continue",)])
async def test_model_option_conflicts_with_resuming(cli: Cli, options: tuple[str, ...]) -> None:
    """It is refused before any connection."""
    result = cli.run("chat", "--model", "phi", *options)
    assert result.code == 64
    assert "new conversations only" in result.err


async def test_ctrl_c_cancels_waiting_for_the_model(scripted: Start) -> None:
    """The prompt is dropped and the chat continues; sent again once the model is loaded, it is answered."""
    is_loaded = False

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        while not is_loaded:
            request = await peer.receive()
            await peer.refuse(request, "model_loading", retryable=True, retry_after_ms=10)
        await peer.open_session()
        assert (await answer(peer, "Two."))["prompt"] == "b"

    with chat_on_terminal(await scripted(daemon), "--model", "phi") as (_process, terminal):
        screen = Screen(terminal)
        await screen.until("phi at ws://")
        await screen.until("> ")
        os.write(terminal, b"a\n")
        await screen.until("loading phi…")
        os.write(terminal, b"\x03")
        await screen.until("> ")
        is_loaded = True
        os.write(terminal, b"b\n")
        await screen.until("Two.")
        await screen.until("the first after")


async def test_model_events_are_shown_on_a_terminal(scripted: Start) -> None:
    """They are on lines of their own, before the next prompt."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin("t")
        await peer.token("t", "One, ")
        await peer.send(**CHANGED.model_dump(exclude_none=True))
        await peer.send(**WARM.model_dump(exclude_none=True))
        await peer.token("t", "two.")
        await peer.end("t")

    with chat_on_terminal(await scripted(daemon)) as (_process, terminal):
        screen = Screen(terminal)
        await screen.until("> ")
        os.write(terminal, b"count\n")
        for text in ("two.", "the first after", "> "):
            await screen.until(text)
    assert CHANGED_LINE in screen.text
    assert WARM_LINE in screen.text


def _terminal(*, model: str | None = None) -> tuple[TerminalView, io.StringIO]:
    """A view on a terminal that records its output."""
    written = io.StringIO()
    return TerminalView(Console(file=written, width=100), model=model), written


def _queued() -> Queued:
    return Queued(session_id="s", seq=1, turn_id="t", position=0)


def _token() -> Token:
    return Token(session_id="s", seq=2, turn_id="t", content="Hello")


def test_model_events_do_not_interrupt_output() -> None:
    """They wait at the prompt and within an answer, but not before its first token."""
    view, written = _terminal()
    view.notice(WARM)
    view.notice(COOL)
    assert written.getvalue() == ""
    view.begin()
    assert "the GPU is cool: all slots are in use\n" in written.getvalue()
    assert "warm" not in written.getvalue()
    view.show(_queued())
    view.notice(CHANGED)
    assert CHANGED_LINE in written.getvalue()
    view.show(_token())
    view.notice(WARM)
    assert WARM_LINE not in written.getvalue()
    view.finish()
    assert WARM_LINE in written.getvalue()


def test_only_events_of_the_sessions_model_are_shown() -> None:
    """A changed default and other models' engines are irrelevant."""
    view, written = _terminal(model="phi")
    view.begin()
    view.notice(ModelChanged(model="large", n_ctx=4096))
    view.notice(EngineChanged(state="failed", model="large"))
    view.show(_token())
    view.finish()
    assert "large" not in written.getvalue()
    assert "failed" not in written.getvalue()
    view.begin()
    view.show(_token())
    view.notice(EngineChanged(state="failed", model="phi"))
    assert "the engine has failed" in written.getvalue()
    view.finish()


def test_pipe_shows_no_model_events(capsys: pytest.CaptureFixture[str]) -> None:
    """Only answers are written."""
    view = PlainView()
    view.begin()
    for notice in (CHANGED, WARM):
        view.notice(notice)
    view.loading("phi")
    view.show(_token())
    view.finish()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello\n", "")


def test_model_names_are_escaped() -> None:
    """Text from the network is shown without control characters."""
    view, written = _terminal()
    view.notice(ModelChanged(model="p\x1b[2Jhi", n_ctx=1))
    view.begin()
    view.finish()
    assert "p[2Jhi is the model" in written.getvalue()
