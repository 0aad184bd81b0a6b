"""``inferencecenter wasm``: run WebAssembly guests that use models of a daemon."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.wasm.run import GuestOptions

_MIB: Final = 1024 * 1024

app = typer.Typer(help="Run WebAssembly guests that use models of a daemon.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make `run` a subcommand, beside which others may come."""


@app.command("run")
def run(  # noqa: PLR0913 - one argument an option
    guest: Annotated[Path, typer.Argument(metavar="GUEST", help="A core module or a component, binary or text.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT]...", help="Arguments of the guest; put -- before options.", show_default=False
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="A model under the name by which the guest loads it; may be repeated.",
            show_default="all of the account's",
        ),
    ] = None,
    directory: Annotated[
        list[str] | None,
        typer.Option(
            "--dir",
            metavar="HOST[::GUEST]",
            help="A directory that the guest may read, and its path there; may be repeated.",
            show_default=False,
        ),
    ] = None,
    fuel: Annotated[int, typer.Option(min=1, max=2**63, help="Fuel, about one unit an instruction.")] = 100_000_000_000,
    memory_mib: Annotated[int, typer.Option(min=1, max=4096, help="MiB of memory.")] = 256,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds until the end.")] = 600.0,
    store: Annotated[
        bool, typer.Option("--store", help="Store its sessions until it ends: they survive a restart of the daemon.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Write each call to standard error.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Run a guest, which gets models of the daemon, standard streams and the given directories, and nothing else."""
    _require_wasmtime()
    # Imported here: the message above is for those that lack its dependency.
    from inferencecenter.wasm.run import GuestLimits, GuestOptions  # noqa: PLC0415

    options = GuestOptions(
        arguments=arguments or (),
        directories=dict(map(_directory, directory or ())),
        models=_models(model) if model else None,
        stores=store,
        limits=GuestLimits(fuel=fuel, memory_bytes=memory_mib * _MIB, timeout_s=timeout_s),
    )
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    raise typer.Exit(_run(guest, daemon, options, trace=trace))


def _run(guest: Path, daemon: DaemonAccess, options: GuestOptions, *, trace: bool) -> int:
    from inferencecenter.wasm.guest_loop import GuestLoop  # noqa: PLC0415 - see above
    from inferencecenter.wasm.host import GuestLog  # noqa: PLC0415 - see above
    from inferencecenter.wasm.run import GuestRun, read_guest  # noqa: PLC0415

    # A guest's sessions are closed when it is terminated, too.
    signal.signal(signal.SIGTERM, _terminate)
    binary = read_guest(guest)
    log = GuestLog(lambda line: typer.echo(line, err=True), traces=trace)
    client, loop = daemon.client(), GuestLoop()
    try:
        loop.call(client.open())
        try:
            return GuestRun(guest.name, binary, client, loop, options=options, log=log).run()
        finally:
            loop.call(client.close())
    finally:
        loop.close()


def _terminate(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _require_wasmtime() -> None:
    if find_spec("wasmtime") is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "this command needs wasmtime, which is not installed",
            hint='Install it: pip install "inferencecenter[wasm]".',
        )


def _models(pairs: Iterable[str]) -> dict[str, str]:
    return {name: model or name for name, _, model in (pair.partition("=") for pair in pairs)}


def _directory(given_text: str) -> tuple[str, Path]:
    host, _, inside = given_text.partition("::")
    path = Path(host)
    if not path.is_dir():
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"--dir {host!r} is not a directory", field="dir")
    return inside or host, path
