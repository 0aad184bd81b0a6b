"""Registers all commands; converts errors to messages and exit codes."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from inferencecenter import __version__
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

_COMMANDS: Final = {
    "serve": "Run the daemon.",
    "chat": "Chat with a daemon.",
    "embed": "Compute embeddings of texts with a daemon.",
    "rerank": "Rank documents by relevance to a query with a daemon.",
    "run": "Run one prompt without a daemon.",
    "wasm": "Run WebAssembly guests that use models of a daemon.",
    "model": "Download, inspect and delete models; load and unload them.",
    "token": "Create, list, rotate and revoke tokens.",
    "client": "List accounts and set their limits.",
    "session": "List, export, purge and salvage sessions.",
    "share": "Share conversations by links.",
    "stats": "Monitor a daemon: slots, queue, speed, memory and GPU.",
    "reload": "Reload the configuration of a daemon.",
    "usage": "Show turns and tokens by client and day.",
    "backup": "Back up accounts and sessions.",
    "restore": "Restore a backup.",
    "audit": "Show the audit log.",
    "config": "Show, check and write settings.",
    "bench": "Measure speed, alone or side by side with other servers.",
    "cluster": "Show and drain the machines that run engines for a daemon.",
    "node": "Make this machine a node of a cluster that runs engines.",
    "doctor": "Check this machine and its configuration.",
    "healthcheck": "Check the health of the daemon.",
}
"""Each command with its summary. Its module has a function of its name, or an ``app`` of subcommands."""


class Commands(TyperGroup):
    """Imports only the module of the command that runs, and none for the list of commands.

    typer bundles its click types without public names, hence ``Any``.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"inferencecenter.cli.{cmd_name}")
        holder = typer.Typer(**_SETTINGS)
        if (subcommands := getattr(module, "app", None)) is not None:
            holder.add_typer(subcommands, name=cmd_name)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            holder.command(cmd_name, context_settings=settings)(getattr(module, cmd_name))
        return typer.main.get_group(holder).commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


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
                hint="Run the command as the owner of the file; HOME and the state directory must belong to that user.",
            )
        )


def _is_of_server(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] != __package__.partition(".")[0]


def _end(error: InferenceCenterError) -> NoReturn:
    from inferencecenter.cli.output import report  # noqa: PLC0415 - the help needs no console

    report(error)
    raise SystemExit(error.spec.exit_code) from None
