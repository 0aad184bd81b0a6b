"""``inferencecenter node``: the machines that run engines for a daemon."""

from __future__ import annotations

import asyncio
import importlib.util
import json as json_module
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec.structs import asdict

from inferencecenter.cli.options import ConfigOption, JsonOption, given
from inferencecenter.cli.output import print_json, print_rows
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_PORT: Final = 6380
_TOKEN_BYTES: Final = 32
_STORE_BYTES: Final = 80_000_000
"""Shared memory of a node's object store, the least that Ray takes: nothing is put into it."""

app = typer.Typer(help="Make this machine a node of a cluster that runs engines.", no_args_is_help=True)

NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of this machine; its host name by default.", show_default=False)
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="The cluster's token; ~/.ray/auth_token by default.", show_default=False),
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--directory", help="Directory for models, KV and locks.", show_default=False)
]


@app.command("head")
def head(
    address: Annotated[
        str, typer.Argument(help=f"Address of this machine for the other ones, with port {DEFAULT_PORT} if none.")
    ],
    *,
    name: NameOption = None,
    token_file: TokenFileOption = None,
    directory: DirectoryOption = None,
) -> None:
    """Start a cluster on this machine, and be its first node; the token is created where there is none."""
    host, port = split_address(address)
    path = token_path(token_file)
    if not path.exists():
        _create_token(path)
    typer.echo(f"On other machines, with a copy of {path}: inferencecenter node join {host}:{port}", err=True)
    typer.echo(f'In the configuration of the daemon here: [cluster] address = "{host}:{port}"', err=True)
    _run_ray(
        ["--head", "--node-ip-address", host, "--port", str(port), "--include-dashboard", "false"],
        path,
        name=name,
        directory=directory,
    )


@app.command("join")
def join(
    address: Annotated[str, typer.Argument(help="Address of the cluster's head.")],
    *,
    own_address: Annotated[
        str | None,
        typer.Option("--own-address", help="Address of this machine, if not that of the route.", show_default=False),
    ] = None,
    name: NameOption = None,
    token_file: TokenFileOption = None,
    directory: DirectoryOption = None,
) -> None:
    """Join a cluster, and run until the cluster or this command ends."""
    host, port = split_address(address)
    path = token_path(token_file)
    if not path.exists():
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, f"{path} does not exist", hint="Copy the token file of the head to this machine."
        )
    own = own_address or _route_to(host, port)
    _run_ray(["--address", f"{host}:{port}", "--node-ip-address", own], path, name=name, directory=directory)


@app.command("list")
def list_nodes(*, config: ConfigOption = None, json: JsonOption = False) -> None:
    """List the machines of the cluster of the daemon's configuration."""
    settings = load_settings(config, given())
    address = settings.cluster.address
    if address is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, "the daemon is in no cluster", field="cluster.address", hint="Set it."
        )
    _require_ray()
    from inferencecenter.cluster.ray_cluster import RayCluster, RayNode  # noqa: PLC0415 - only for this command

    async def nodes() -> tuple[RayNode, ...]:
        cluster = RayCluster(address, token_file=settings.cluster.token_file)
        try:
            return await cluster.nodes()
        finally:
            await cluster.close()

    try:
        found = asyncio.run(nodes())
    except OSError as error:
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, reason_of(error)) from error
    if json:
        print_json([asdict(node) for node in found])
        return
    print_rows(["node", "address", "state"], [(n.name, n.address, "alive" if n.alive else "dead") for n in found])


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a head's address.

    Raises:
        InferenceCenterError: ``invalid_config``; it is none.
    """
    host, _, port = address.partition(":")
    if not host or (port and not port.isdigit()):
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, f"{address!r} is no address", hint="Give a host and a port, as in 10.0.0.1:6380."
        )
    return host, int(port or DEFAULT_PORT)


def _route_to(host: str, port: int) -> str:
    """Return the address from which this machine reaches another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, f"{host} cannot be reached: {reason_of(error)}") from error


def token_path(token_file: Path | None) -> Path:
    """Return where the cluster's token is; Ray's own default if none is given."""
    return (token_file or Path.home() / ".ray" / "auth_token").absolute()


def _create_token(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "nodes of a cluster need the package ray",
            hint="pip install 'inferencecenter[server,cluster]'",
        )


def _run_ray(arguments: Sequence[str], token: Path, *, name: str | None, directory: Path | None) -> None:
    """Become Ray's node process, with token authentication."""
    _require_ray()
    from inferencecenter.cluster.node import DIRECTORY_VARIABLE, default_directory  # noqa: PLC0415
    from inferencecenter.cluster.ray_cluster import node_resource, ray_environment  # noqa: PLC0415

    resources = json_module.dumps({node_resource(name or socket.gethostname()): 1})
    environment = ray_environment(token) | {DIRECTORY_VARIABLE: str((directory or default_directory()).absolute())}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    options = ["--num-cpus", "0", "--num-gpus", "0", "--resources", resources]
    limits = ["--object-store-memory", str(_STORE_BYTES), "--include-log-monitor", "false", "--disable-usage-stats"]
    os.execve(sys.executable, [*command, *options, *limits, "--block"], environment)  # noqa: S606
