"""``inferencecenter cluster``: the machines that run engines for a daemon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import typer

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, print_rows
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events, requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.values import ClusterNode

_GIB: Final = 1024.0
_COLUMNS: Final = ("node", "address", "state", "sessions", "heartbeat", "version", "memory", "GPU memory", "engines")

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Name of the machine.", show_default=False)]

app = typer.Typer(help="Show and drain the machines that run engines for a daemon.", no_args_is_help=True)


@app.command("status")
def status(  # noqa: PLR0913 - one argument an option
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show each machine with its engines, memory, and the sessions whose KV it has."""
    settings = load_settings(config, given(state_dir=state_dir))
    nodes = _exchange(
        reach_daemon(settings, url=url, token=token, token_file=token_file), requests.ListNodes(op="list_nodes")
    )
    if not nodes and not json:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, "the daemon is in no cluster", field="cluster.address", hint="Set it."
        )
    _print(nodes, json=json)


def _add_node_command(name: str, purpose: str, request: Callable[[str], Request]) -> None:
    """Add a command that sends a request about one machine, and shows all of them."""

    @app.command(name, help=purpose)
    def command(  # noqa: PLR0913 - one argument an option
        node: NodeArgument,
        *,
        config: ConfigOption = None,
        state_dir: StateDirOption = None,
        url: UrlOption = None,
        token: TokenOption = None,
        token_file: TokenFileOption = None,
        json: JsonOption = False,
    ) -> None:
        settings = load_settings(config, given(state_dir=state_dir))
        daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
        _print(_exchange(daemon, request(node)), json=json)


_add_node_command(
    "drain",
    "Move the sessions of a machine to other ones, before it is stopped; `cluster status` shows when that is done.",
    lambda node: requests.DrainNode(op="drain_node", node=node),
)
_add_node_command(
    "undrain", "Use a machine again that was drained.", lambda node: requests.UndrainNode(op="undrain_node", node=node)
)


def _print(nodes: tuple[ClusterNode, ...], *, json: bool) -> None:
    if json:
        print_json([node.model_dump() for node in nodes])
    else:
        print_rows(_COLUMNS, map(_cells, nodes))


def _exchange(daemon: DaemonAccess, request: Request) -> tuple[ClusterNode, ...]:
    """Send a request whose reply is ``nodes``, and return them."""

    async def exchange() -> tuple[ClusterNode, ...]:
        async with daemon.client() as client:
            reply = await client.request(request)
        assert isinstance(reply, events.Nodes), "the daemon replies with nodes or an error"
        return reply.nodes

    return asyncio.run(exchange())


def _cells(node: ClusterNode) -> Iterator[str]:
    yield node.name
    yield node.address or "-"
    yield _state(node)
    yield str(node.sessions)
    yield "-" if node.heartbeat_age_s is None else f"{node.heartbeat_age_s:.1f} s"
    yield node.version or "-"
    yield _memory(node.ram_used_mb, node.ram_total_mb)
    yield ", ".join(_memory(gpu.used_mb, gpu.total_mb) for gpu in node.gpus) or "-"
    yield "; ".join(_engines(node)) or "-"


def _state(node: ClusterNode) -> str:
    if node.drain == "none":
        return node.state
    waits = f" (waits for {', '.join(node.drain_waits_for)})" if node.drain_waits_for else ""
    return f"{node.state}, {node.drain}{waits}"


def _engines(node: ClusterNode) -> Iterator[str]:
    for engine in node.engines:
        detail = f" ({engine.detail})" if engine.detail else ""
        yield f"{engine.model}/{engine.replica} {engine.state}{detail}"
    for server in node.rpc_servers:
        detail = f" ({server.detail})" if server.detail else ""
        yield f"RPC server of {server.model} {server.state}{detail}"


def _memory(used_mb: float | None, total_mb: float | None) -> str:
    if used_mb is None or total_mb is None:
        return "-"
    return f"{used_mb / _GIB:.1f} of {total_mb / _GIB:.1f} GiB"
