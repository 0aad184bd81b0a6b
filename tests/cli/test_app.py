"""The command line as a whole."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter import __version__, daemon
from inferencecenter import cli as cli_package
from inferencecenter.cli import app, checks
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.core.errors import ERRORS, ErrorCode
from inferencecenter.ipc import engine_child
from inferencecenter.server.listener import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Cli


def test_version_option(cli: Cli) -> None:
    """``--version`` prints the package's version."""
    assert cli.run("--version").out == f"inferencecenter {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["chat"],
        ["token", "create"],
        ["token", "list"],
        ["token", "revoke"],
        ["session", "list"],
        ["session", "export"],
        ["session", "purge"],
        ["usage"],
        ["backup"],
        ["audit"],
        ["config", "show"],
        ["doctor"],
    ],
)
def test_every_command_has_help(cli: Cli, command: list[str]) -> None:
    """``--help`` describes the command and lists its options."""
    result = cli.run(*command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out
    assert "--config" in result.out


LOG = ("structlog", "opentelemetry")
SERVER = ("uvicorn", "starlette", "prometheus_client", "uvloop", "inferencecenter.daemon", "inferencecenter.api")
MESSAGES = ("inferencecenter.protocol.events", "inferencecenter.protocol.codec", "inferencecenter.protocol.params")
CONNECTION = ("websockets", "http.client")
HTTP_APIS = ("operations", "endpoint", "body", "plain", "openai", "anthropic", "ollama", "responses", "openapi")


HELP_OF_EACH = """
import json, os, sys
from inferencecenter.cli.app import app

for command in sys.argv[1:]:
    if command == "chat":  # those before it import less
        import asyncio, inferencecenter.cli.output, inferencecenter.config.loader
    if os.fork() == 0:
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
        app([*command.split(), "--help"], standalone_mode=False)
        print(json.dumps([command, [*sys.modules]]), file=stdout, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, command
"""
UNNEEDED: dict[str, tuple[str, ...]] = {
    "": (*LOG, *SERVER, *MESSAGES, *CONNECTION, "asyncio", "pydantic", "rich", "orjson", "inferencecenter.config"),
    "healthcheck": (*LOG, *SERVER, *MESSAGES, *CONNECTION, "rich", "sqlite3"),
    "chat": (*LOG, *SERVER, *CONNECTION, "sqlite3", "inferencecenter.sessions", "inferencecenter.models"),
    "stats": (*LOG, *SERVER, *CONNECTION, "sqlite3", "inferencecenter.sessions", "inferencecenter.models"),
    "model": (*SERVER, *MESSAGES, *CONNECTION, "sqlite3", "huggingface_hub", "inferencecenter.client"),
    "session": (*SERVER, "http.client", "huggingface_hub", "inferencecenter.client"),
    "usage": (*SERVER, "http.client", "huggingface_hub", "inferencecenter.client"),
    "token": (*SERVER, *MESSAGES[:2], *CONNECTION, "inferencecenter.client", "inferencecenter.supervisor"),
    "client": (*SERVER, *MESSAGES[:2], *CONNECTION, "inferencecenter.client", "inferencecenter.supervisor"),
    "reload": (*SERVER, *MESSAGES, *CONNECTION, "inferencecenter.client", "inferencecenter.sessions"),
    "serve": (*SERVER, *MESSAGES, *CONNECTION, "inferencecenter.client", "inferencecenter.sessions"),
}


@pytest.fixture(scope="module")
def modules_of_commands() -> dict[str, set[str]]:
    """The modules imported by ``--help`` of each command.

    It is run in a fork of a process with the application and, for most, with what they have in common.
    """
    program = [sys.executable, "-c", HELP_OF_EACH, *UNNEEDED]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    return {command: set(names) for command, names in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("command", UNNEEDED)
def test_command_imports_only_its_dependencies(command: str, modules_of_commands: dict[str, set[str]]) -> None:
    """Listing commands imports none of them, and client commands import nothing of the daemon."""
    assert [name for name in UNNEEDED[command] if name in modules_of_commands[command]] == []


@pytest.mark.parametrize(
    ("process", "unneeded"),
    [
        ("inferencecenter.daemon", ("jinja2", "llama_cpp", "numpy", "llguidance", "huggingface_hub", "httpx2")),
        ("inferencecenter.daemon", tuple(f"inferencecenter.api.{name}" for name in HTTP_APIS)),
        ("inferencecenter.cli.serve", ("rich", "pygments", "colorama", "attr", "greenlet")),
        ("inferencecenter.first_engine", (*SERVER, "inferencecenter.protocol", "sqlite3", "inferencecenter.sessions")),
        ("inferencecenter.engine.__main__", ("asyncio", "structlog", "sqlite3", "uvicorn", "rich", "typer", "regex")),
        ("inferencecenter.engine.llama.backend", ("jinja2", "llama_cpp.llama", "uvicorn", "sqlite3", "structlog")),
    ],
)
def test_process_imports_only_its_dependencies(process: str, unneeded: tuple[str, ...]) -> None:
    """Templates are rendered elsewhere, and of llama.cpp's bindings the engine needs the declarations."""
    assert [name for name in unneeded if name in _import(process).modules] == []


def test_import_of_the_daemon_builds_no_message_model() -> None:
    """They are built while the engine loads."""
    built = _import("inferencecenter.daemon").built_messages
    assert len(built) > 100
    assert [name for name, is_built in built.items() if is_built] == []


@dataclass(frozen=True)
class _Imported:
    """What an import in a new process results in."""

    modules: list[str]
    built_messages: dict[str, bool]
    """Each message of the protocol that is imported, and whether its model is built."""


@cache
def _import(name: str) -> _Imported:
    code = """
import json, sys
__import__(sys.argv[1])
modules = [*sys.modules]
from inferencecenter.protocol.base import Event, Request
from inferencecenter.protocol.values import Value

def models(base):
    for each in base.__subclasses__():
        yield each
        yield from models(each)

found = [*models(Request), *models(Event), *models(Value)]
print(json.dumps([modules, {each.__name__: each.__pydantic_complete__ for each in found}]))
"""
    done = subprocess.run([sys.executable, "-c", code, name], check=True, capture_output=True, text=True)
    return _Imported(*json.loads(done.stdout))


def test_daemon_starts_without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``serve`` disables garbage collection, and only during the imports."""
    collects: list[bool] = []
    monkeypatch.setattr(app, "app", lambda: collects.append(gc.isenabled()))
    monkeypatch.setattr(engine_child, "prespawned", nullcontext)
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for command in ("serve", "stats"):
        monkeypatch.setattr(sys, "argv", ["inferencecenter", command])
        cli_package.main()
        assert gc.isenabled()
    assert collects == [False, True]


async def test_listening_daemon_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of the start are excluded from later collections."""
    frozen = asyncio.Event()

    class Listening(Listener):
        def __init__(self) -> None:
            pass

        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            assert not sockets
            await frozen.wait()

    imported = asyncio.Event()

    async def import_apis() -> None:
        imported.set()

    monkeypatch.setattr(gc, "freeze", frozen.set)
    gc.disable()
    try:
        await daemon._listen(Listening(), [], import_apis=import_apis)
        assert gc.isenabled()
        assert imported.is_set()
    finally:
        gc.enable()


def test_command_list_is_not_truncated(cli: Cli) -> None:
    """Each summary fits its line, and is a sentence."""
    listed = cli.run("--help").out.partition("Commands:\n")[2].splitlines()
    assert len(listed) > 15
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_unknown_command_is_an_error(cli: Cli) -> None:
    """It exits with 2 and names the command."""
    result = cli.run("sevre")
    assert result.code == 2
    assert "sevre" in result.err


def test_error_is_one_message_with_its_exit_code(cli: Cli) -> None:
    """Code, message and hint go to standard error, without a traceback."""
    result = cli.run("serve", "--config", "/nowhere/inferencecenter.toml")
    assert result.code == ERRORS[ErrorCode.INVALID_CONFIG].exit_code == 78
    assert result.out == ""
    assert result.err.startswith("invalid_config: /nowhere/inferencecenter.toml: cannot be read: No such file")
    assert "\nhint: " in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["doctor"], 73, "cannot be written"),
        (["backup", "copy"], 73, "Permission denied"),
        (["token", "list"], 73, "Permission denied"),
        (["session", "list"], 73, "Permission denied"),
        (["model", "list"], 73, "models cannot be read: Permission denied"),
        (["config", "check"], 0, "models cannot be read: Permission denied"),
        (["reload"], 69, "no daemon listens"),
        (["stats", "--once"], 77, "admin.token: Permission denied"),
    ],
)
def test_inaccessible_home_is_reported(  # noqa: PLR0917 - cases and fixtures
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], code: int, words: str
) -> None:
    """Commands report the directory or work without it, and none prints a traceback."""
    home = str(tmp_path / "home")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")  # a table wraps where a path is long
    for name, place in (
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_DATA_HOME", "data"),
        ("INFERENCECENTER_STATE_DIR", "state"),
    ):
        monkeypatch.setenv(name, f"{home}/{place}")
    monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
    for name in ("stat", "open", "scandir", "listdir", "mkdir"):
        monkeypatch.setattr(os, name, _deny_below(getattr(os, name), home))
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    monkeypatch.setattr(io, "open", _deny_below(io.open, home))
    result = cli.run(*command)
    assert result.code == code, result.err
    assert "Traceback" not in result.err
    assert words in result.err + result.out


def _deny_below(function: Callable[..., Any], home: str) -> Callable[..., Any]:
    """Wrap a system function so that it refuses everything below a directory."""

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(f"{home}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return function(path, *arguments, **options)

    return refuse
