"""Tests of ``inferencecenter model load``, ``unload`` and ``list`` where a daemon answers."""

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


def swaps(*frames: dict[str, Any]) -> Any:
    """Return a daemon that answers ``load_model`` with these frames."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.receive()
        assert (asked["op"], asked["name"]) == ("load_model", "phi")
        for frame in frames:
            await peer.send(op="swap", id=asked["id"], model="phi", **frame)

    return daemon


def tells(*models: dict[str, Any]) -> Any:
    """Return a daemon that has these models."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.receive()
        assert asked["op"] == "list_models"
        await peer.send(op="models", id=asked["id"], models=models)

    return daemon


WHOLE = (
    {"phase": "draining"},
    {"phase": "loading", "done": 0.1},
    {"phase": "loading", "done": 0.9},
    {"phase": "done", "done": 1.0},
)


async def test_a_model_is_loaded(cli: Cli, scripted: Start) -> None:
    """In a pipe each phase is a line on standard error; what has happened is on standard output."""
    result = await run(cli, "load", "phi", url=await scripted(swaps(*WHOLE)))
    assert (result.code, result.out) == (0, "phi is now the default model.\n")
    assert result.err.splitlines() == [
        "phi: waiting for the turns of the model whose memory it needs",
        "phi: loading",
    ]


async def test_a_terminal_shows_how_far_it_is(cli: Cli, scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bar that is gone afterwards."""
    shown = StringIO()
    monkeypatch.setattr(model, "stderr", Console(file=shown, force_terminal=True, width=120, highlight=False))
    result = await run(cli, "load", "phi", url=await scripted(swaps(*WHOLE)))
    assert (result.code, result.out) == (0, "phi is now the default model.\n")
    assert "phi: loading" in shown.getvalue()
    assert "90%" in shown.getvalue()


async def test_a_model_is_loaded_by_a_script(cli: Cli, scripted: Start) -> None:
    """It reads JSON."""
    result = await run(cli, "load", "phi", "--json", url=await scripted(swaps(WHOLE[-1])))
    assert (result.code, json.loads(result.out), result.err) == (0, {"model": "phi", "default": True}, "")


async def test_a_model_that_cannot_be_loaded(cli: Cli, scripted: Start) -> None:
    """The daemon's reason is told and the exit code says that it did not work."""
    failed = {"phase": "failed", "detail": "phi.gguf ends too early"}
    result = await run(cli, "load", "phi", url=await scripted(swaps({"phase": "loading"}, failed)))
    assert (result.code, result.out) == (69, "")
    assert "phi cannot be loaded: phi.gguf ends too early" in result.err


@pytest.mark.parametrize(
    ("code", "exit_code"), [("forbidden", 77), ("model_not_found", 66), ("model_loading", 75), ("unknown_op", 64)]
)
@pytest.mark.parametrize("command", ["load", "unload"])
async def test_what_the_daemon_refuses(cli: Cli, scripted: Start, command: str, code: str, exit_code: int) -> None:
    """Has the exit code of its row in the error table."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), code, message="no")

    result = await run(cli, command, "phi", url=await scripted(daemon))
    assert (result.code, result.out) == (exit_code, "")
    assert code in result.err


async def test_a_daemon_that_goes_away_while_it_loads(cli: Cli, scripted: Start) -> None:
    """Its outcome is unknown."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.receive()
        peer.socket.transport.abort()

    result = await run(cli, "load", "phi", url=await scripted(daemon))
    assert result.code == 69
    assert "load_model" in result.err


def test_ctrl_c_leaves_the_daemon_to_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that has begun goes on, and that is said."""

    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_load", interrupted)
    result = cli.run("model", "load", "phi", "--token", "t")
    assert result.code != 0
    assert "continues to load" in result.err


@pytest.mark.parametrize("command", ["load", "unload"])
def test_no_daemon_and_no_token(cli: Cli, command: str) -> None:
    """Each is told by its code."""
    assert cli.run("model", command, "phi").code == 77
    result = cli.run("model", command, "phi", "--token", "t", "--url", "ws://127.0.0.1:1/")
    assert result.code == 69
    assert "no daemon answers" in result.err


async def test_a_model_is_unloaded(cli: Cli, scripted: Start) -> None:
    """In words, or for a script."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.receive()
        assert (asked["op"], asked["name"]) == ("unload_model", "phi")
        await peer.send(op="model_unloaded", id=asked["id"], model="phi")

    url = await scripted(daemon)
    told = await run(cli, "unload", "phi", url=url)
    assert (told.code, told.out) == (0, "phi is unloaded once its turns have ended.\n")
    assert json.loads((await run(cli, "unload", "phi", "--json", url=url)).out) == {"model": "phi", "unloaded": True}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, demo_model_path: Path) -> Path:
    """A directory with a model that the daemon has too, and one that it does not know."""
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("phi", "new"):
        shutil.copy(demo_model_path, directory / f"{name}.gguf")
    monkeypatch.setenv("INFERENCECENTER_MODELS_DIR", str(directory))
    return directory


@pytest.mark.usefixtures("models")
async def test_the_list_says_what_the_daemon_has(cli: Cli, scripted: Start) -> None:
    """States stand beside files; models from elsewhere come after them, with what the daemon knows of them."""
    url = await scripted(tells(DEMO, PHI))
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
async def test_the_list_needs_no_daemon(cli: Cli, scripted: Start) -> None:
    """Without one, or a token for it, there is a list all the same; one that was named, or refuses, is told of."""
    for options in ((), ("--token", "t")):
        result = await asyncio.to_thread(cli.run, "model", "list", *options)
        assert (result.code, len(result.out.splitlines()), result.err) == (0, 2, "")
    gone = await run(cli, "list", url="ws://127.0.0.1:1/")
    assert (gone.code, len(gone.out.splitlines())) == (0, 2)
    assert "unknown: no daemon answers" in gone.err

    async def refuses(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), "forbidden", message="this requires the scope user")

    url = await scripted(refuses)
    refused = await run(cli, "list", url=url)
    assert (refused.code, len(refused.out.splitlines())) == (0, 2)
    assert "this requires the scope user" in refused.err
