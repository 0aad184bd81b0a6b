"""``inferencecenter model load``, ``unload`` and ``list`` with a running daemon."""

from __future__ import annotations

import asyncio
import json
import shutil
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from inferencecenter.cli import model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli, Result
    from tests.client.peer import Peer, Start

DEMO = {"name": "demo", "default": True, "state": "loaded", "n_ctx": 1024, "parameters": 2_560_000, "size_mb": 2.75}
PHI = {"name": "phi", "default": False, "state": "failed", "detail": "phi.gguf ends too early"}


async def run(cli: Cli, *arguments: str, url: str) -> Result:
    """Run ``model`` with a daemon at ``url``."""
    return await asyncio.to_thread(cli.run, "model", *arguments, "--url", url, "--token", "ic_a_b")


def swap_script(*frames: dict[str, Any]) -> Any:
    """Return a daemon that answers ``load_model`` with these frames."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        assert (request["op"], request["name"]) == ("load_model", "phi")
        for frame in frames:
            await peer.send(op="swap", id=request["id"], model="phi", **frame)

    return daemon


def models_script(*models: dict[str, Any]) -> Any:
    """Return a daemon with these models."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        assert request["op"] == "list_models"
        await peer.send(op="models", id=request["id"], models=models)

    return daemon


WHOLE = (
    {"phase": "draining"},
    {"phase": "loading", "done": 0.1},
    {"phase": "loading", "done": 0.9},
    {"phase": "done", "done": 1.0},
)


async def test_model_is_loaded(cli: Cli, scripted: Start) -> None:
    """In a pipe each phase is a line on standard error, and the result is on standard output."""
    result = await run(cli, "load", "phi", url=await scripted(swap_script(*WHOLE)))
    assert (result.code, result.out) == (0, "phi is now the default model.\n")
    assert result.err.splitlines() == [
        "phi: waiting for the turns of the model whose memory it needs",
        "phi: loading",
    ]


async def test_terminal_shows_a_progress_bar(cli: Cli, scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed afterwards."""
    progress = StringIO()
    monkeypatch.setattr(model, "stderr", Console(file=progress, force_terminal=True, width=120, highlight=False))
    result = await run(cli, "load", "phi", url=await scripted(swap_script(*WHOLE)))
    assert (result.code, result.out) == (0, "phi is now the default model.\n")
    assert "phi: loading" in progress.getvalue()
    assert "90%" in progress.getvalue()


async def test_load_prints_json(cli: Cli, scripted: Start) -> None:
    """The result is JSON for scripts."""
    result = await run(cli, "load", "phi", "--json", url=await scripted(swap_script(WHOLE[-1])))
    assert (result.code, json.loads(result.out), result.err) == (0, {"model": "phi", "default": True}, "")


async def test_failed_load_is_reported(cli: Cli, scripted: Start) -> None:
    """The message has the daemon's reason, and the exit code is that of the error."""
    failed = {"phase": "failed", "detail": "phi.gguf ends too early"}
    result = await run(cli, "load", "phi", url=await scripted(swap_script({"phase": "loading"}, failed)))
    assert (result.code, result.out) == (69, "")
    assert "phi cannot be loaded: phi.gguf ends too early" in result.err


@pytest.mark.parametrize(
    ("code", "exit_code"), [("forbidden", 77), ("model_not_found", 66), ("model_loading", 75), ("unknown_op", 64)]
)
@pytest.mark.parametrize("command", ["load", "unload"])
async def test_refusal_has_its_exit_code(cli: Cli, scripted: Start, command: str, code: str, exit_code: int) -> None:
    """The exit code is that of the error table."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), code, message="no")

    result = await run(cli, command, "phi", url=await scripted(daemon))
    assert (result.code, result.out) == (exit_code, "")
    assert code in result.err


async def test_connection_lost_during_load(cli: Cli, scripted: Start) -> None:
    """The outcome is unknown."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.receive()
        peer.socket.transport.abort()

    result = await run(cli, "load", "phi", url=await scripted(daemon))
    assert result.code == 69
    assert "load_model" in result.err


def test_ctrl_c_leaves_the_load_running(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that the daemon continues to load."""

    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_load", interrupted)
    result = cli.run("model", "load", "phi", "--token", "t")
    assert result.code != 0
    assert "continues to load" in result.err


@pytest.mark.parametrize("command", ["load", "unload"])
def test_missing_daemon_or_token_is_reported(cli: Cli, command: str) -> None:
    """Each case has its own exit code."""
    assert cli.run("model", command, "phi").code == 77
    result = cli.run("model", command, "phi", "--token", "t", "--url", "ws://127.0.0.1:1/")
    assert result.code == 69
    assert "no daemon answers" in result.err


async def test_model_is_unloaded(cli: Cli, scripted: Start) -> None:
    """The result is text, or JSON."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        assert (request["op"], request["name"]) == ("unload_model", "phi")
        await peer.send(op="model_unloaded", id=request["id"], model="phi")

    url = await scripted(daemon)
    result = await run(cli, "unload", "phi", url=url)
    assert (result.code, result.out) == (0, "phi is unloaded once its turns have ended.\n")
    assert json.loads((await run(cli, "unload", "phi", "--json", url=url)).out) == {"model": "phi", "unloaded": True}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, demo_model_path: Path) -> Path:
    """A directory with a model that the daemon has and one that it does not know."""
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("phi", "new"):
        shutil.copy(demo_model_path, directory / f"{name}.gguf")
    monkeypatch.setenv("INFERENCECENTER_MODELS_DIR", str(directory))
    return directory


@pytest.mark.usefixtures("models")
async def test_list_includes_the_daemons_state(cli: Cli, scripted: Start) -> None:
    """States stand beside files; models without a local file follow with the daemon's data."""
    url = await scripted(models_script(DEMO, PHI))
    lines = [line.split("\t") for line in (await run(cli, "list", url=url)).out.splitlines()]
    assert [(line[0], line[6]) for line in lines] == [
        ("new", ""),
        ("phi", "failed: phi.gguf ends too early"),
        ("demo", "loaded, default"),
    ]
    assert lines[2] == ["demo", "", "", "2.6 M", "2.8 MiB", "", "loaded, default", ""]
    new, phi, demo = json.loads((await run(cli, "list", "--json", url=url)).out)
    assert (new["served"], phi["served"]["state"], demo["served"]["n_ctx"]) == (None, "failed", 1024)
    assert set(new) == set(phi) == set(demo)
    assert (demo["files"], demo["facts"]) == ([], None)


@pytest.mark.usefixtures("models")
async def test_list_works_without_a_daemon(cli: Cli, scripted: Start) -> None:
    """A daemon that was named explicitly or refuses is reported."""
    for options in ((), ("--token", "t")):
        result = await asyncio.to_thread(cli.run, "model", "list", *options)
        assert (result.code, len(result.out.splitlines()), result.err) == (0, 2, "")
    result = await run(cli, "list", url="ws://127.0.0.1:1/")
    assert (result.code, len(result.out.splitlines())) == (0, 2)
    assert "unknown: no daemon answers" in result.err

    async def refuses(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), "forbidden", message="this requires the scope user")

    url = await scripted(refuses)
    refused = await run(cli, "list", url=url)
    assert (refused.code, len(refused.out.splitlines())) == (0, 2)
    assert "this requires the scope user" in refused.err
