"""``inferencecenter serve``: run the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.reach import admin_token_file, on_this_machine
from inferencecenter.config.loader import load_settings
from inferencecenter.config.settings import ServerSettings
from inferencecenter.ipc.engine_child import import_ahead
from inferencecenter.telemetry import logs

if TYPE_CHECKING:
    from inferencecenter.config.settings import Settings
    from inferencecenter.daemon import Announcement


def serve(  # noqa: PLR0913 - one argument an option
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 selects a free one.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="GGUF file, or the name of a registered model.", metavar="FILE|NAME", show_default=False),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backend: llama, echo or script.", show_default=False)] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="File with the rules of the backend script.", metavar="FILE", show_default=False),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Number of slots: turns that decode concurrently.", show_default=False)
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", help="Tokens of context per slot.", show_default=False)
    ] = None,
    n_gpu_layers: Annotated[
        int | None, typer.Option("--n-gpu-layers", help="Layers on the GPU; -1 for all.", show_default=False)
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error.", show_default=False)
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="Format of the log: auto, pretty or json.", show_default=False)
    ] = None,
) -> None:
    """Run the daemon until it is stopped. Options override the environment, which overrides the configuration file."""
    overrides = given(
        state_dir=state_dir,
        server__host=host,
        server__port=port,
        **(_model_option(model) if model is not None else {}),
        engine__backend=backend,
        engine__script=script and str(script),
        engine__slots=slots,
        engine__n_ctx=n_ctx,
        engine__n_gpu_layers=n_gpu_layers,
        log__level=log_level,
        log__format=log_format,
    )
    settings = load_settings(config, overrides)
    logs.apply(settings.log)
    if settings.engine.backend == "llama":
        import_ahead()
    from inferencecenter.first_engine import launched_ahead  # noqa: PLC0415 - not for the help
    from inferencecenter.server.control import exclusive_state_dir  # noqa: PLC0415

    with exclusive_state_dir(settings.state_dir), launched_ahead(settings) as first_engine:
        from inferencecenter import daemon  # noqa: PLC0415 - imported while the engine loads, see first_engine.py

        status = daemon.serve(
            settings,
            announce=lambda announcement: announce(announcement, settings),
            reload_settings=lambda: load_settings(config, overrides),
            first_engine=first_engine,
        )
    raise typer.Exit(status)


def _model_option(model: str) -> dict[str, str]:
    """Return the setting for ``--model``: a file path if the value looks like one, else a name."""
    is_file = model.endswith(".gguf") or "/" in model or Path(model).exists()
    return {"model__path": model} if is_file else {"model__name": model}


def announce(announcement: Announcement, settings: Settings) -> None:
    """Print the daemon's address; on the first run also the administrator's token, to a terminal only.

    Redirected output ends up in a log file, the journal or a container's log: it gets the path of the token file.
    """
    token_file = admin_token_file(settings)
    # Not the console's `is_terminal`, which FORCE_COLOR sets for a pipe.
    token = announcement.admin_token if sys.stdout.isatty() else None
    lines = [("Address  ", announcement.address), ("Model    ", announcement.model)]
    lines += [("Socket   ", path) for path in announcement.unix_paths]
    if token is not None:
        lines += [("Token    ", token)]
        lines += [("Token in ", f"{token_file} (shown once, kept hashed; this file is for the command line)")]
    elif announcement.admin_token is not None:
        lines += [("Token in ", str(token_file))]
    usual = settings.server.port == ServerSettings.model_fields["port"].default
    url = "" if usual else f" --url {on_this_machine(announcement.address).replace('http', 'ws', 1)}"
    lines += [("Chat     ", f"inferencecenter chat{url}")]
    link = web_link(announcement.address, token) if settings.server.web else None
    if _is_plain():
        lines += [("Web      ", link)] if link is not None else []
        typer.echo("\n".join(label + value for label, value in lines))
    else:
        _announce_to_terminal(lines, link)


def _is_plain() -> bool:
    """Return whether standard output takes plain text; ``rich`` then need not be imported, in a twentieth of a second.

    Otherwise it decides, by its rules.
    """
    return not sys.stdout.isatty() and not {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys()


def _announce_to_terminal(lines: list[tuple[str, str]], link: str | None) -> None:
    from rich.panel import Panel  # noqa: PLC0415 - see _is_plain
    from rich.text import Text  # noqa: PLC0415

    from inferencecenter.cli.output import stdout  # noqa: PLC0415

    text = Text("\n").join(Text.assemble((label, "dim"), value) for label, value in lines)
    if stdout.is_terminal:
        stdout.print(Panel(text, title="InferenceCenter", expand=False))
    else:
        stdout.print(text, soft_wrap=True)
    if link is not None:
        # Outside the frame, which would break a long link.
        stdout.print(Text.assemble(("Web      ", "dim"), link), soft_wrap=True)


def web_link(address: str, token: str | None) -> str:
    """Return the local URL of the web page; with a token, the page signs in with it.

    The token is in the fragment, which browsers do not send.
    """
    address = on_this_machine(address)
    return f"{address}#token={token}" if token else address
