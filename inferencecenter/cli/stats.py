"""``inferencecenter stats``: monitor a daemon from a terminal, or log its readings."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import orjson
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.output import stderr, stdout
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.cli.view import describe_notice
from inferencecenter.client import Client, Connected, Reconnecting
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import StatusType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.client import Notice
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.events import Metrics, Thermal
    from inferencecenter.protocol.values import ConnectedClient, EnginePlan, EngineReadings, GpuReadings, ModelSummary


_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH: Final = 10
_MIN_BAR, _MAX_BAR = 10, 80
_FIGURES_WIDTH: Final = 30
_TABLE_FIGURES_WIDTH: Final = 40
_BUSY, _FULL = 0.75, 0.9
_MIB: Final = 2**20
# Names come from files and clients, and could contain escape sequences for the terminal.
_CONTROLS: Final = dict.fromkeys([*range(32), *range(127, 160)])
_STATE_STYLES: Final = {
    "ready": "green",
    "loaded": "green",
    "asleep": "dim",
    "unloaded": "dim",
    "stopped": "dim",
    "failed": "bold red",
}
_HEAT_STYLES: Final = {"warm": "yellow", "hot": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSnapshot:
    """Snapshot of a daemon.

    Attributes:
        address: Its address.
        version: Its version.
        metrics: Its readings; ``None`` before the first.
        status: Readings by scope, as far as this account may read them.
        plan: Placement of the model on GPUs and host; ``None`` for an account that may not read it.
        models: The available models.
        clients: The connected clients; empty for an account that may not list them.
        rates: Tokens per second at each sample, the oldest first.
        heat: The latest thermal event.
        notice: Problem of the connection; empty without one.
    """

    address: str
    version: str = ""
    metrics: Metrics | None = None
    status: Mapping[StatusType, Mapping[str, float | int | str | None]] = field(default_factory=dict)
    plan: EnginePlan | None = None
    models: tuple[ModelSummary, ...] = ()
    clients: tuple[ConnectedClient, ...] = ()
    rates: tuple[float, ...] = ()
    heat: Thermal | None = None
    notice: str = ""


def screen(snapshot: StatsSnapshot, *, width: int) -> RenderableType:
    """Return the full display for a screen of this width in columns."""
    title = Text.assemble(("InferenceCenter", "bold"), f" {snapshot.version}", (f"  {snapshot.address}", "dim"))
    # A line below the title even if empty: a moving display is hard to read.
    notice = Text(_plain(snapshot.notice), style="bold yellow", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [title, notice]
    if snapshot.metrics is None:
        return Group(*parts, Text("no readings yet", style="dim"))
    grid = Table.grid(Column(width=_LABEL_WIDTH, style="dim"), Column(overflow="fold"), padding=(0, 1))
    bar_width = min(_MAX_BAR, max(_MIN_BAR, width - _LABEL_WIDTH - _FIGURES_WIDTH))
    for label, content in _rows(snapshot, snapshot.metrics, bar_width):
        grid.add_row(label, content)
    parts.append(grid)
    if len(snapshot.models) > 1:
        parts += [Text(), models_table(snapshot.models, width=width)]
    if snapshot.clients:
        parts += [Text(), clients_table(snapshot.clients, width=width)]
    return Group(*parts)


def line(snapshot: StatsSnapshot) -> str:
    """Return the main readings in one line, for a pipe or a log."""
    metrics = snapshot.metrics
    if metrics is None:
        return "no readings yet"
    work, gpu = metrics.inference, metrics.gpu
    parts = [
        datetime.fromtimestamp(metrics.timestamp).astimezone().strftime("%H:%M:%S"),
        metrics.engine.state,
        f"{work.tokens_per_s:.1f} tokens/s",
        f"{work.slots_used} of {work.slots} slots",
        f"{work.queue_depth} waiting",
        f"{work.total_sessions} sessions",
        f"{work.parked_sessions} parked",
    ]
    if gpu.vram_used_mb is not None and gpu.vram_total_mb is not None:
        parts.append(f"VRAM {_mib(gpu.vram_used_mb)} of {_mib(gpu.vram_total_mb)}")
    if gpu.temp is not None:
        parts.append(f"{gpu.temp:.0f} °C")
    return "  ".join(parts)


def as_data(snapshot: StatsSnapshot) -> dict[str, Any]:
    metrics = snapshot.metrics
    return {
        "address": snapshot.address,
        "version": snapshot.version,
        "metrics": None if metrics is None else metrics.model_dump(exclude={"op", "id"}),
        "status": {kind: dict(values) for kind, values in snapshot.status.items()},
        "plan": None if snapshot.plan is None else snapshot.plan.model_dump(),
        "models": [model.model_dump() for model in snapshot.models],
        "clients": [client.model_dump() for client in snapshot.clients],
        "thermal": None if snapshot.heat is None else snapshot.heat.model_dump(exclude={"op", "id"}),
    }


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return the latest ``width`` values as block characters in eighths of their maximum; 0 is a visible bar."""
    shown = [value if math.isfinite(value) and value > 0 else 0.0 for value in values[-width:]]
    top = max(shown, default=0.0)
    bars = "".join(_LEVELS[min(8, math.ceil(value / top * 8))] if value else " " for value in shown)
    return bars.rjust(width)


def bar(used: float, total: float, *, width: int, style: str | None = None) -> Text:
    """Return a bar of ``width`` columns, filled in proportion; by default it turns yellow, then red."""
    part = min(1.0, max(0.0, used / total)) if total > 0 else 0.0
    # Any use is visible, and only full use fills the bar.
    filled = min(max(round(part * width), int(used > 0)), width - 1)
    if total <= 0:
        filled = 0
    elif used >= total:
        filled = width
    color = style or ("red" if part >= _FULL else "yellow" if part >= _BUSY else "green")
    return Text.assemble(("█" * filled, color), ("░" * (width - filled), "dim"))


def models_table(models: Sequence[ModelSummary], *, width: int) -> Table:
    """Return the available models as a table; the default one is marked."""
    right = [Column(name, justify="right") for name in ("slots", "context", "size")]
    table = Table(_name_column("model", width), "state", *right, box=None, pad_edge=False, header_style="dim")
    for model in models:
        table.add_row(
            Text(_plain(model.name) + (" *" if model.default else "")),
            Text(model.state, style=_STATE_STYLES.get(model.state, "yellow")),
            *("" if number is None else str(number) for number in (model.slots, model.n_ctx)),
            "" if model.size_mb is None else _mib(model.size_mb),
        )
    return table


def clients_table(clients: Sequence[ConnectedClient], *, width: int) -> Table:
    """Return the connected clients as a table, the busiest first, so that they are visible on a short screen."""
    right = [Column(name, justify="right") for name in ("sockets", "sessions", "busy", "tokens today")]
    table = Table(_name_column("client", width), *right, box=None, pad_edge=False, header_style="dim")
    for client in sorted(clients, key=lambda client: (-client.busy, -client.tokens_today, client.client_id)):
        figures = (client.connections, client.sessions, client.busy, client.tokens_today)
        table.add_row(Text(_plain(client.client_id)), *map(str, figures))
    return table


def _name_column(heading: str, width: int) -> Column:
    """Return a column of names that leaves room for the numbers beside it."""
    return Column(heading, max_width=max(_MIN_BAR, width - _TABLE_FIGURES_WIDTH), overflow="ellipsis", no_wrap=True)


def _rows(snapshot: StatsSnapshot, metrics: Metrics, bar_width: int) -> Iterator[tuple[str, Text]]:
    work = metrics.inference
    yield "model", _model(metrics.engine, snapshot.status.get("model", {}))
    yield "engine", _engine(metrics.engine)
    rates = Text(sparkline(snapshot.rates, width=bar_width), style="cyan")
    yield "tokens/s", rates.append(f" {work.tokens_per_s:.1f}", style="bold")
    yield "last turn", Text(f"{work.last_tps:.1f} tokens/s, the first after {work.last_ttft_ms:.0f} ms")
    slots = bar(work.slots_used, work.slots, width=bar_width, style="green")
    yield "slots", slots.append(f" {work.slots_used} of {work.slots}", style="default")
    yield "queue", Text(f"{work.queue_depth} waiting", style="yellow" if work.queue_depth else "")
    yield "sessions", _sessions(snapshot, metrics)
    yield from _memory(snapshot, bar_width)
    yield from _gpu(metrics.gpu, snapshot.heat, bar_width)
    if snapshot.plan is not None:
        yield from _plan(snapshot.plan)


def _model(engine: EngineReadings, status: Mapping[str, float | int | str | None]) -> Text:
    text = Text(_plain(engine.model or "—"), style="bold")
    facts = []
    if (n_ctx := status.get("n_ctx")) is not None:
        facts.append(f"{n_ctx} tokens of context")
    if engine.gpu_layers is not None:
        layers = status.get("layers")
        of_all = "" if layers is None else f" of {layers}"
        facts.append(f"{engine.gpu_layers}{of_all} layers on the GPU" if engine.gpu_layers else "on the CPU")
    if lora := status.get("lora"):
        facts.append(_plain(str(lora)))
    return text.append("".join(f" · {fact}" for fact in facts), style="not bold")


def _engine(engine: EngineReadings) -> Text:
    text = Text(engine.state, style=_STATE_STYLES.get(engine.state, "yellow"))
    facts = [] if engine.rss_mb is None else [f"{_mib(engine.rss_mb)} resident"]
    if engine.restarts:
        facts.append(f"{engine.restarts} restarts")
    return text.append("".join(f" · {fact}" for fact in facts), style="default")


def _sessions(snapshot: StatsSnapshot, metrics: Metrics) -> Text:
    work, status = metrics.inference, snapshot.status.get("sessions", {})
    facts = [f"{work.total_sessions} open", f"{work.active_generations} answering"]
    facts.append(f"{work.parked_sessions} parked ({_mib(work.parked_mb)})")
    if (connections := status.get("connections")) is not None:
        facts.append(f"{connections} connections")
    text = Text(" · ".join(facts))
    storage = status.get("storage")
    if storage not in (None, "ok"):
        text.append(f" · storage is unavailable: {_plain(str(storage))}", style="bold red")
    return text


def _memory(snapshot: StatsSnapshot, bar_width: int) -> Iterator[tuple[str, Text]]:
    """Yield the host's memory use against its limit, which only operators may read."""
    status = snapshot.status.get("memory", {})
    used, limit, pressure = (status.get(name) for name in ("memory_used_bytes", "memory_limit_bytes", "pressure"))
    if not isinstance(used, int | float) or not isinstance(limit, int | float):
        return
    text = bar(used, limit, width=bar_width).append(f" {_mib(used / _MIB)} of {_mib(limit / _MIB)}", style="default")
    if pressure not in (None, "easy"):
        text.append(f" · {pressure}", style="bold red")
    yield "memory", text


def _gpu(gpu: GpuReadings, heat: Thermal | None, bar_width: int) -> Iterator[tuple[str, Text]]:
    if gpu.name is None and gpu.vram_total_mb is None:
        yield "GPU", Text("—", style="dim")
        return
    if gpu.vram_used_mb is not None and gpu.vram_total_mb is not None:
        figures = f" {_mib(gpu.vram_used_mb)} of {_mib(gpu.vram_total_mb)}"
        yield "VRAM", bar(gpu.vram_used_mb, gpu.vram_total_mb, width=bar_width).append(figures, style="default")
    readings = (
        (gpu.temp, "°C", "{:.0f} °C"),
        (gpu.utilization, "busy", "{:.0f} % busy"),
        (gpu.power_watts, "W", "{:.0f} W"),
        (gpu.fan_percent, "fan", "fan {:.0f} %"),
    )
    facts = [wording.format(value) if value is not None else f"— {unit}" for value, unit, wording in readings]
    text = Text(" · ".join([_plain(gpu.name or "GPU"), *facts]))
    if gpu.throttling:
        text.append(f" · throttled: {', '.join(gpu.throttle_reasons or ('unknown',))}", style="yellow")
    yield "GPU", text
    if heat is not None and heat.state != "cool":
        yield "", Text(f"{heat.state}: {_plain(heat.action)}", style=_HEAT_STYLES[heat.state])


def _plan(plan: EnginePlan) -> Iterator[tuple[str, Text]]:
    """Yield planned and measured memory per GPU."""
    for number, device in enumerate(plan.devices):
        planned = device.weight_bytes + device.kv_bytes + device.compute_bytes + device.context_bytes
        facts = [_plain(device.name), f"{device.layers} of {plan.layers} layers", f"{_mib(planned / _MIB)} planned"]
        if device.used_bytes is not None:
            facts.append(f"{_mib(device.used_bytes / _MIB)} taken")
        yield "" if number else "plan", Text(" · ".join(facts))


def _mib(n_mib: float) -> str:
    return f"{n_mib:.0f} MiB" if n_mib < 1024 else f"{n_mib / 1024:.1f} GiB"


def _plain(text: str) -> str:
    return text.translate(_CONTROLS)


E = TypeVar("E", bound="Event")

_STATUS_TYPES: Final[tuple[StatusType, ...]] = ("model", "sessions", "memory")
_MAX_RATES: Final = 200
_CLIENTS_EVERY_S: Final = 10.0
_QUIT: Final = frozenset(b"qQ\x03\x04")
_READ_BYTES: Final = 64


def stats(  # noqa: PLR0913 - one argument an option
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between samples.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Take one sample and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON, one line per sample.")] = False,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Monitor slots, queue, tokens per second, memory and GPU; q or Ctrl-C quits. When piped, one line per sample."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    live = stdout.is_terminal and not once and not json
    monitor = Monitor(daemon.url)
    if not live:
        monitor.draw = _write_json if json else _print_screen if once else _write_line
        monitor.warn = lambda words: stderr.print(words, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_monitor(monitor, daemon, interval_s=interval, once=once, live=live))


class Monitor:
    """Samples a daemon periodically, and shows each sample.

    Args:
        address: Address of the daemon, as displayed.
        monotonic: Monotonic clock in seconds.

    Attributes:
        snapshot: The latest snapshot.
        draw: Shows the snapshot.
        warn: Reports a connection problem when no screen shows it.
    """

    def __init__(self, address: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.snapshot = StatsSnapshot(address=address)
        self.draw: Callable[[StatsSnapshot], None] = lambda _snapshot: None
        self.warn: Callable[[str], None] | None = None
        self._monotonic = monotonic
        self._next_clients_at = float("-inf")
        self._rates: deque[float] = deque(maxlen=_MAX_RATES)

    def notice(self, notice: Notice) -> None:
        """Record a change of the connection or the thermal state, and show it at once."""
        match notice:
            case events.Thermal():
                self.snapshot = replace(self.snapshot, heat=notice)
            case Reconnecting() | events.GoingAway() | Connected():
                self.snapshot = replace(self.snapshot, notice=describe_notice(notice))
            case _:
                return
        if self.warn is None:
            self.draw(self.snapshot)
        elif isinstance(notice, Reconnecting) and notice.attempt == 1:
            self.warn(self.snapshot.notice)

    async def run(
        self,
        client: Client,
        *,
        interval_s: float,
        once: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Sample and show until cancelled; wait while the connection is lost.

        Raises:
            InferenceCenterError: The connection has ended for good.
        """
        while True:
            await self.sample(client)
            self.draw(self.snapshot)
            if once:
                return
            await sleep(interval_s)

    async def sample(self, client: Client) -> None:
        """Read everything that this account may read.

        Raises:
            InferenceCenterError: The connection has ended for good.
        """
        metrics = await _request(client, requests.Metrics(op="metrics"), events.Metrics)
        models = await _request(client, requests.ListModels(op="list_models"), events.Models)
        statuses = {
            kind: await _request(client, requests.Status(op="status", type=kind), events.Status)
            for kind in _STATUS_TYPES
        }
        clients = await self._clients(client)
        if metrics is not None:
            self._rates.append(metrics.inference.tokens_per_s)
        self.snapshot = replace(
            self.snapshot,
            version=client.hello.version,
            metrics=metrics or self.snapshot.metrics,
            plan=model.plan if (model := statuses["model"]) else None,
            models=models.models if models else (),
            clients=clients,
            status={kind: status.values for kind, status in statuses.items() if status},
            rates=tuple(self._rates),
        )

    async def _clients(self, client: Client) -> tuple[ConnectedClient, ...]:
        """Return the connected clients; queried rarely, since the daemon records it in its audit log."""
        if Scope.ADMIN not in client.account.scopes:
            return ()
        now = self._monotonic()
        if now < self._next_clients_at:
            return self.snapshot.clients
        self._next_clients_at = now + _CLIENTS_EVERY_S
        answer = await _request(client, requests.ListClients(op="list_clients"), events.Clients)
        return answer.clients if answer else ()


async def _request(client: Client, request: Request, kind: type[E]) -> E | None:
    """Return the reply; ``None`` if the daemon, or the account, has none."""
    try:
        answer = await client.request(request)
    except InferenceCenterError as error:
        if client.ended is not None:
            raise client.ended from error
        return None
    return answer if isinstance(answer, kind) else None


async def _monitor(monitor: Monitor, daemon: DaemonAccess, *, interval_s: float, once: bool, live: bool) -> None:
    # A monitor waits for the daemon to return, however long that takes.
    give_up_after_s = None if live else 300.0
    connection = daemon.client(on_notice=monitor.notice, give_up_after_s=give_up_after_s)
    async with connection as client:
        if not live:
            await monitor.run(client, interval_s=interval_s, once=once)
            return
        with _until_quit(), Live(console=stdout, screen=True, auto_refresh=False) as shown:
            hint = Text("\nq quits", style="dim")
            monitor.draw = lambda snapshot: shown.update(
                Group(screen(snapshot, width=stdout.width), hint), refresh=True
            )
            await monitor.run(client, interval_s=interval_s)


@contextlib.contextmanager
def _until_quit() -> Iterator[None]:
    """Cancel the block silently when q is typed or the process is terminated.

    Afterwards the terminal's mode is restored: echo, and line buffering.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "must run in a task"
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if keyboard is None else termios.tcgetattr(keyboard)

    def typed() -> None:
        assert keyboard is not None
        keys = os.read(keyboard, _READ_BYTES)
        if not keys or _QUIT & set(keys):
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if keyboard is not None:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, typed)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if keyboard is not None and before is not None:
            loop.remove_reader(keyboard)
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _print_screen(snapshot: StatsSnapshot) -> None:
    stdout.print(screen(snapshot, width=stdout.width))


def _write_line(snapshot: StatsSnapshot) -> None:
    typer.echo(line(snapshot))


def _write_json(snapshot: StatsSnapshot) -> None:
    typer.echo(orjson.dumps(as_data(snapshot)).decode())
