"""``inferencecenter config``: what is set, whether it is right, and what there is to set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from inferencecenter.cli.options import ConfigOption, JsonOption
from inferencecenter.cli.output import as_json, print_json, problems_of, report, stdout
from inferencecenter.cli.reference import configuration as reference
from inferencecenter.config_params import parse_config_params
from inferencecenter.configuration import read_layers
from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import cross_check, parse_params
from inferencecenter.server.clients_file import load_clients
from inferencecenter.settings import setting_fields
from inferencecenter.telemetry.traces import check_installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.configuration import Layers
    from inferencecenter.settings import Settings

app = typer.Typer(help="Show, check and write settings.", no_args_is_help=True)


@app.command("show")
def show(*, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show every setting in force and where its value comes from."""
    layers = read_layers(config)
    settings = layers.settings()
    if json:
        print_json({"file": layers.path, "settings": settings.model_dump(mode="json")})
        return
    table = Table(Column("setting", no_wrap=True), Column("value", overflow="fold"), Column("from", overflow="fold"))
    for name, _ in setting_fields():
        table.add_row(name, reference.toml_value(_value(settings, name)) or "not set", layers.origin(name))
    stdout.print(table)


@app.command("check")
def check(
    file: Annotated[
        Path | None, typer.Argument(help="File to check; the one in force when not given.", show_default=False)
    ] = None,
    *,
    json: JsonOption = False,
) -> None:
    """Check a configuration file, with the environment over it; a wrong one is told and exits with 78."""
    layers: Layers | None = None
    problems: list[InferenceCenterError] = []
    warnings: tuple[str, ...] = ()
    try:
        layers = read_layers(file)
        settings = layers.settings()
        problems = list(_deeper_problems(settings))
        warnings = () if problems else cross_check(parse_params(settings.params))
    except InferenceCenterError as error:
        problems = list(problems_of(error))
    if json:
        listed = [as_json(problem) for problem in problems]
        print_json({"valid": not problems, "problems": listed, "warnings": warnings})
    else:
        for problem in problems:
            report(problem)
        for warning in warnings:
            stdout.print(f"warning: {warning}", markup=False, soft_wrap=True)
        if not problems:
            checked = layers.path if layers and layers.path else "No file; the defaults and the environment"
            stdout.print(f"{checked}: valid", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(ERRORS[ErrorCode.INVALID_CONFIG].exit_code)


@app.command("default")
def default() -> None:
    """Write the annotated default configuration to standard output."""
    typer.echo(reference.default_toml(), nl=False)


def _deeper_problems(settings: Settings) -> Iterator[InferenceCenterError]:
    """What only other parts can tell: the parameters' meaning, the file of clients, and what is installed."""
    try:
        check_installed(settings.telemetry)
    except InferenceCenterError as error:
        yield error
    try:
        parse_config_params(settings)
    except InferenceCenterError as error:
        yield error
    if settings.auth.clients_file is not None:
        try:
            load_clients(
                settings.auth.clients_file,
                default_max_sessions=settings.auth.default_max_sessions,
                default_priority=settings.auth.default_priority,
            )
        except InferenceCenterError as error:
            yield error


def _value(settings: Settings, name: str) -> Any:
    here: Any = settings
    for part in name.split("."):
        here = getattr(here, part)
    return here
