"""Registers all commands; converts errors to messages and exit codes."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from inferencecenter import __version__
from inferencecenter.cli.output import report
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

_COMMANDS: Final = {
    "serve": "serve",
    "chat": "chat",
    "run": "run",
    "model": "app",
    "token": "app",
    "client": "app",
    "session": "app",
    "stats": "stats",
    "reload": "reload",
    "usage": "usage",
    "backup": "backup",
    "restore": "restore",
    "audit": "audit",
    "config": "app",
    "bench": "bench",
    "doctor": "doctor",
    "healthcheck": "healthcheck",
}
"""Module of each command, and the attribute in it: a function, or an app of subcommands."""


class Commands(TyperGroup):
    """Imports only the module of the command that runs: the daemon starts half a second sooner.

    typer bundles its click types without public names, hence ``Any``.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, ``None`` for an unknown one."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"inferencecenter.cli.{cmd_name}")
        command = getattr(module, _COMMANDS[cmd_name])
        holder = typer.Typer(**_SETTINGS)
        if isinstance(command, typer.Typer):
            holder.add_typer(command, name=cmd_name)
        else:
            holder.command(cmd_name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(command)
        return typer.main.get_group(holder).commands[cmd_name]


_SETTINGS: Final[dict[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}
app = typer.Typer(
    name="inferencecenter",
    cls=Commands,
    help="Serve GGUF models to many concurrent clients over persistent WebSocket sessions.",
    no_args_is_help=True,
    **_SETTINGS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inferencecenter {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options that precede the command."""


def main() -> None:
    """Run the command line; a known error prints one message to standard error and sets the exit code."""
    try:
        app()
    except InferenceCenterError as error:
        _end(error)
    except ModuleNotFoundError as error:
        if not _is_of_server(error):
            raise
        _end(
            InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"this command needs {error.name}, which is not installed",
                hint='Install the daemon: pip install "inferencecenter[server]".',
            )
        )
    except PermissionError as error:
        # HOME or the state directory belongs to another user; any access to a file may fail with this.
        _end(
            InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"{error.filename}: {error.strerror}",
                hint="Run this as its owner; HOME and the state directory must belong to that user, too.",
            )
        )


def _is_of_server(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] != __package__.partition(".")[0]


def _end(error: InferenceCenterError) -> NoReturn:
    report(error)
    raise SystemExit(error.spec.exit_code) from None
