"""``inferencecenter model load`` and ``unload``, and what a running daemon says of its models."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stderr, stdout
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, admin_token_file, reach_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.config.settings import Settings
    from inferencecenter.protocol.events import Swap
    from inferencecenter.protocol.values import ModelSummary

NameArgument: TypeAlias = Annotated[str, typer.Argument(help="The model's name.")]

_LOOK_TIMEOUT_S: Final = 3.0
_PHASES: Final = {"draining": "waiting for the turns of the model whose memory it needs", "loading": "loading"}


def load(  # noqa: PLR0913 - one argument an option
    name: NameArgument,
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Have the running daemon load a model and give it to all sessions that name none; nobody's turn is cut."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    try:
        with _shown_swap(name) as show:
            asyncio.run(_load(daemon, name, show))
    except KeyboardInterrupt:
        stderr.print("The daemon goes on with it.", style="dim")
        raise
    if json:
        print_json({"model": name, "default": True})
    else:
        stdout.print(f"{name} answers from now on.", markup=False)


def unload(  # noqa: PLR0913 - one argument an option
    name: NameArgument,
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Have the running daemon free a model's memory when its turns have ended; the next turn loads it again."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    asyncio.run(_unload(daemon, name))
    if json:
        print_json({"model": name, "unloaded": True})
    else:
        stdout.print(f"{name} leaves memory when its turns have ended.", markup=False)


def models_of_daemon(
    settings: Settings, *, url: str | None, token: str | None, token_file: Path | None
) -> dict[str, ModelSummary]:
    """Return what the running daemon says of its models, by name; nothing if there is no daemon.

    One that was named, or that answers and refuses, is worth a line on standard error.
    """
    nothing_given = url is None and token is None and token_file is None
    if nothing_given and not os.path.exists(admin_token_file(settings)):  # noqa: PTH110 - Path.exists raises
        return {}
    try:
        daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
        return asyncio.run(_ask_models(daemon))
    except InferenceCenterError as error:
        if url is not None or error.code is not ErrorCode.DAEMON_UNREACHABLE:
            stderr.print(f"What the daemon has loaded is not known: {error.message}", markup=False, soft_wrap=True)
        return {}


def state(model: ModelSummary) -> str:
    """Return where a model is, in words."""
    words = f"{model.state}, default" if model.default else model.state
    return f"{words}: {model.detail}" if model.state == "failed" and model.detail else words


async def _load(daemon: DaemonAccess, name: str, show: Callable[[Swap], None]) -> None:
    # Here, so that the commands that need no daemon start faster.
    from inferencecenter.client import Client  # noqa: PLC0415

    async with Client(daemon.url, token=daemon.token, **daemon.tls_option) as client:
        await client.load_model(name, on_progress=show)


async def _unload(daemon: DaemonAccess, name: str) -> None:
    from inferencecenter.client import Client  # noqa: PLC0415

    async with Client(daemon.url, token=daemon.token, **daemon.tls_option) as client:
        await client.unload_model(name)


async def _ask_models(daemon: DaemonAccess) -> dict[str, ModelSummary]:
    from inferencecenter.client import Client  # noqa: PLC0415

    once = Client(daemon.url, token=daemon.token, open_timeout_s=_LOOK_TIMEOUT_S, reconnect=False, **daemon.tls_option)
    async with once as client:
        return {model.name: model for model in await client.models()}


@contextmanager
def _shown_swap(name: str) -> Iterator[Callable[[Swap], None]]:
    """Show on standard error how far a swap is: a bar while somebody looks, else a line for each of its phases."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    told = ""
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as shown:
        task = shown.add_task(name, total=1.0)

        def show(swap: Swap) -> None:
            nonlocal told
            words = f"{name}: {_PHASES[swap.phase]}"
            shown.update(task, description=words, completed=swap.done)
            if not stderr.is_terminal and words != told:
                stderr.print(words, markup=False)
            told = words

        yield show
