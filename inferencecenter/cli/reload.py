"""``inferencecenter reload``: reload the configuration of a running daemon, and report the result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, report, stdout
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ERRORS, InferenceCenterError
from inferencecenter.server import control


def reload(
    *,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds.", min=1, max=3600)] = 50.0,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Reload configuration, certificate and clients.toml in the daemon; fails if any of it is invalid.

    Invalid parts are not applied, and the daemon keeps running.
    """
    settings = load_settings(config, given(state_dir=state_dir))
    result = control.request_reload(settings.state_dir, timeout_s=timeout)
    if json:
        print_json({"reloaded": not result.problems, **asdict(result)})
    else:
        for problem in result.problems:
            message = f"not reloaded: {problem.what}: {problem.message}"
            report(InferenceCenterError(problem.code, message, hint=problem.hint, field=problem.field))
        if result.needs_restart:
            waiting = ", ".join(result.needs_restart)
            stdout.print(f"These changed settings need a restart: {waiting}", markup=False, soft_wrap=True)
        if not result.problems:
            stdout.print("Reloaded.")
    if result.problems:
        raise typer.Exit(ERRORS[result.problems[0].code].exit_code)
