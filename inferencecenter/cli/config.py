"""``inferencecenter config``: show, check and generate configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from inferencecenter.auth.clients_file import load_clients
from inferencecenter.cli import config_reference as reference
from inferencecenter.cli.options import ConfigOption, JsonOption
from inferencecenter.cli.output import as_json, print_json, problems_of, report, stdout
from inferencecenter.config.loader import read_layers
from inferencecenter.config.settings import setting_fields
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.models.registry import default_model, read_registry
from inferencecenter.protocol.params import cross_check, parse_params
from inferencecenter.sessions.context import parse_config_params
from inferencecenter.telemetry.traces import check_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.config.loader import Layers
    from inferencecenter.config.settings import Settings
    from inferencecenter.models.registry import ModelSpec

app = typer.Typer(help="Show, check and write settings.", no_args_is_help=True)


@app.command("show")
def show(*, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show every effective setting and its origin."""
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
        Path | None, typer.Argument(help="File to check; the effective one by default.", show_default=False)
    ] = None,
    *,
    json: JsonOption = False,
) -> None:
    """Check a configuration file combined with the environment; exits with 78 on an invalid one."""
    layers: Layers | None = None
    problems: list[InferenceCenterError] = []
    warnings: tuple[str, ...] = ()
    try:
        layers = read_layers(file)
        settings = layers.settings()
        problems = list(_deeper_problems(settings))
        warnings = () if problems else tuple(_warnings(settings))
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
    """Yield the problems that only other parts detect: parameters, models, the clients file, installed packages."""

    def find_default_model() -> None:
        spec = default_model(settings)
        if settings.engine.backend == "llama" and (missing := next(_missing_files(spec), None)) is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_MODEL_FILE,
                f"{missing[0]}: {missing[1]}; the daemon does not start without the files of its default model",
                field="model.path" if missing[0] == settings.model.path else "model",
                hint="`inferencecenter model list` lists those available, `inferencecenter model pull` downloads one.",
            )

    looks: tuple[Callable[[], object], ...] = (
        partial(check_installed, settings.telemetry),
        partial(parse_config_params, settings),
        find_default_model,
        partial(load_clients, settings.auth),
    )
    for look in looks:
        try:
            look()
        except InferenceCenterError as error:
            yield error


def _warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings about valid settings: parameters without effect, files that do not exist here (yet)."""
    yield from cross_check(parse_params(settings.params))
    for name, entry in settings.models.items():
        for warning in cross_check(parse_params(entry.params)):
            yield f"models.{name}: {warning}"
    registry = read_registry(settings)
    yield from registry.remarks
    if settings.engine.backend != "llama":
        return
    for spec in registry.models.values():
        for path, reason in _missing_files(spec):
            yield f"the model {spec.name!r} needs {path}: {reason}"


def _missing_files(spec: ModelSpec) -> Iterator[tuple[Path, str]]:
    """Yield the files of a model that this user cannot read, with the reasons."""
    for path in spec.files:
        try:
            if not path.is_file():
                yield path, "does not exist" if not path.exists() else "is not a file"
        except OSError as error:  # in an inaccessible directory
            yield path, error.strerror or str(error)


def _value(settings: Settings, name: str) -> Any:
    here: Any = settings
    for part in name.split("."):
        here = getattr(here, part)
    return here
