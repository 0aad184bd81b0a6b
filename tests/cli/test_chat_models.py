"""Tests of ``inferencecenter chat`` where models are chosen, loaded and changed."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from inferencecenter.cli.view import PlainView, TerminalView
from inferencecenter.protocol.events import EngineChanged, ModelChanged, Queued, Thermal, Token
from tests.cli.chatting import Screen, answer, converse, on_terminal

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


async def test_a_model_is_chosen_and_waited_for(cli: Cli, monkeypatch: pytest.MonkeyPatch, scripted: Start) -> None:
    """Every session names it, and a pipe shows nothing but the answer that came late."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        assert (await _refuse_loading(peer, "create_session"))["model"] == "phi"
        await peer.open_session("s1")
        await answer(peer, "One.", session_id="s1")
        await peer.open_session("s2")
        assert peer.received[-1]["model"] == "phi"
        await answer(peer, "Two.", session_id="s2")

    url = await scripted(daemon)
    result = await converse(cli, monkeypatch, url, "a\n/new\nb\n", "--model", "phi")
    assert (result.code, result.out, result.err) == (0, "One.\nTwo.\n", "")


async def test_a_conversation_waits_for_its_own_model(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, scripted: Start
) -> None:
    """One that goes on may have a model that was not loaded since the daemon began: the question is asked again."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle", seq=0)
        first = await _refuse_loading(peer, "infer")
        second = await answer(peer, "Here.")
        assert first["prompt"] == second["prompt"] == "hello"

    result = await converse(cli, monkeypatch, await scripted(daemon), "hello\n", "--resume", "s1")
    assert (result.code, result.out) == (0, "Here.\n")


@pytest.mark.parametrize("options", [("--resume", "s1"), ("--continue",)])
async def test_a_conversation_that_goes_on_keeps_its_model(cli: Cli, options: tuple[str, ...]) -> None:
    """Another one for it is refused before anybody is asked."""
    result = cli.run("chat", "--model", "phi", *options)
    assert result.code == 64
    assert "new conversations only" in result.err


async def test_a_terminal_shows_what_is_loaded_and_ctrl_c_gives_it_up(scripted: Start) -> None:
    """The question is forgotten and the chat goes on; asked again when the model is there, it is answered."""
    is_loaded = False

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        while not is_loaded:
            request = await peer.receive()
            await peer.refuse(request, "model_loading", retryable=True, retry_after_ms=10)
        await peer.open_session()
        assert (await answer(peer, "Two."))["prompt"] == "b"

    with on_terminal(await scripted(daemon), "--model", "phi") as (_process, terminal):
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


async def test_news_are_told_on_a_terminal(scripted: Start) -> None:
    """Each in a line of its own, before or after the answer, and before the next prompt."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin("t")
        await peer.token("t", "One, ")
        await peer.send(**CHANGED.model_dump(exclude_none=True))
        await peer.send(**WARM.model_dump(exclude_none=True))
        await peer.token("t", "two.")
        await peer.end("t")

    with on_terminal(await scripted(daemon)) as (_process, terminal):
        screen = Screen(terminal)
        await screen.until("> ")
        os.write(terminal, b"count\n")
        for text in ("two.", "the first after", "> "):
            await screen.until(text)
    assert CHANGED_LINE in screen.text
    assert WARM_LINE in screen.text


def _terminal(*, model: str | None = None) -> tuple[TerminalView, io.StringIO]:
    """A view on a terminal that keeps what is written."""
    written = io.StringIO()
    return TerminalView(Console(file=written, width=100), model=model), written


def _queued() -> Queued:
    return Queued(session_id="s", seq=1, turn_id="t", position=0)


def _token() -> Token:
    return Token(session_id="s", seq=2, turn_id="t", content="Hello")


def test_news_wait_where_they_would_be_in_the_way() -> None:
    """At the prompt and in an answer they wait, before an answer's first word they do not."""
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


def test_only_the_chosen_models_engine_is_reported() -> None:
    """Another default is nothing to them, nor is the engine of a third; their own model's engine is."""
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


def test_news_are_nothing_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_hostile_name_moves_no_cursor() -> None:
    """What comes over the wire is shown without control characters."""
    view, written = _terminal()
    view.notice(ModelChanged(model="p\x1b[2Jhi", n_ctx=1))
    view.begin()
    view.finish()
    assert "p[2Jhi is the model" in written.getvalue()
