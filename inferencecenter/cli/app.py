"""All commands under one name, and the border at which errors become words and exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from inferencecenter import __version__
from inferencecenter.cli import bench, chat, config, docs, doctor, serve, token
from inferencecenter.cli.output import report
from inferencecenter.errors import InferenceCenterError

app = typer.Typer(
    name="inferencecenter",
    help="One GGUF model, lent to many clients over persistent WebSockets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.add_typer(token.app, name="token")
app.add_typer(config.app, name="config")
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("docs", hidden=True)(docs.docs)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inferencecenter {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Take the options that stand before the command."""


def main() -> None:
    """Run the command line; a known failure is one message on standard error and its exit code."""
    try:
        app()
    except InferenceCenterError as error:
        report(error)
        raise SystemExit(error.spec.exit_code) from None
