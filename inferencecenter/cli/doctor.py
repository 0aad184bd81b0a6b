"""``inferencecenter doctor``: look at this machine and say what would keep the daemon from running well."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from inferencecenter.cli import checks
from inferencecenter.cli.checks import Check, Verdict
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.cli.plan import parse_size, show_plan
from inferencecenter.cli.proxy_check import proxy
from inferencecenter.cli.storage_checks import storage
from inferencecenter.config.loader import load_settings, read_layers
from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}


def doctor(  # noqa: PLR0913 - one argument an option
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
    plan: Annotated[
        Path | None, typer.Option(help="Show how this GGUF file would be run, and why.", metavar="MODEL")
    ] = None,
    vram: Annotated[
        list[str] | None,
        typer.Option(help="With --plan: a GPU with so much free memory, as 3GiB; once for each.", metavar="SIZE"),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="With --plan: so much memory available.", metavar="SIZE", show_default=False)
    ] = None,
) -> None:
    """Check Python, llama.cpp, memory, files, port and GPU; exits with the code of the first failure."""
    if plan is not None:
        show_plan(
            load_settings(config, given(state_dir=state_dir)),
            plan,
            vram_bytes=[parse_size(size) for size in vram or ()],
            ram_bytes=None if ram is None else parse_size(ram),
            as_json=json,
        )
        return
    if vram or ram:
        raise typer.BadParameter("--vram and --ram describe a machine for --plan MODEL.")
    found = examine(config, state_dir)
    if json:
        print_json([asdict(check) for check in found])
    else:
        table = Table("check", "", "found")
        for check in found:
            detail = Text.assemble(check.detail, ("\n" + check.hint, "dim") if check.hint else "")
            table.add_row(check.name, Text(check.verdict.value, style=_STYLES[check.verdict]), detail)
        stdout.print(table)
    failed = next((check for check in found if check.verdict is Verdict.FAILED), None)
    if failed is not None:
        raise typer.Exit(ERRORS[failed.code or ErrorCode.INTERNAL].exit_code)


def examine(config: ConfigOption, state_dir: StateDirOption) -> list[Check]:
    """Return the result of every check that can be made; without settings most cannot."""
    found = [checks.python()]
    try:
        layers = read_layers(config, given(state_dir=state_dir))
        settings = layers.settings()
    except InferenceCenterError as error:
        return [*found, Check("settings", Verdict.FAILED, error.message, error.hint or "", error.code)]
    gpu = checks.gpu()
    return [
        *found,
        Check("settings", Verdict.OK, str(layers.path or "no file; defaults and environment")),
        checks.llama_cpp(needed=settings.engine.backend == "llama", gpu=gpu.verdict is Verdict.OK),
        gpu,
        checks.cores(),
        *checks.model_files(settings),
        checks.memory(settings),
        *checks.placement(settings),
        checks.state_dir(settings.state_dir),
        *storage(settings),
        checks.port(settings),
        proxy(settings),
    ]
