"""``inferencecenter stats``: watch a daemon from a terminal, or write down how it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import orjson
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from inferencecenter.cli.options import ConfigOption, StateDirOption, given
from inferencecenter.cli.output import stderr, stdout
from inferencecenter.cli.reach import TokenFileOption, TokenOption, UrlOption, reach_daemon
from inferencecenter.cli.stats_view import Glance, as_data, line, screen
from inferencecenter.cli.view import describe_notice
from inferencecenter.client import Client, Connected, Reconnecting
from inferencecenter.config.loader import load_settings
from inferencecenter.errors import InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import StatusType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from inferencecenter.cli.reach import DaemonAccess
    from inferencecenter.client import Notice
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.values import ConnectedClient

E = TypeVar("E", bound="Event")

_SIDES: Final[tuple[StatusType, ...]] = ("model", "sessions", "memory")
_MAX_RATES: Final = 200
_CLIENTS_EVERY_S: Final = 10.0
_QUIT: Final = frozenset(b"qQ\x03\x04")
_READ_BYTES: Final = 64


def stats(  # noqa: PLR0913 - one argument an option
    *,
    url: UrlOption = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSON, a line for each look.")] = False,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Watch slots, queue, tokens a second, memory and GPU; q or Ctrl-C leaves. In a pipe, a line for each look."""
    settings = load_settings(config, given(state_dir=state_dir))
    daemon = reach_daemon(settings, url=url, token=token, token_file=token_file)
    live = stdout.is_terminal and not once and not json
    watch = Watch(daemon.url)
    if not live:
        watch.draw = _write_json if json else _print_screen if once else _write_line
        watch.complain = lambda words: stderr.print(words, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(watch, daemon, interval_s=interval, once=once, live=live))


class Watch:
    """Looks at a daemon again and again, and shows each time what it saw.

    Args:
        address: Where the daemon is, as it is shown.
        monotonic: Seconds that only rise.

    Attributes:
        glance: What is known now.
        draw: Shows it.
        complain: Says what is the matter with the connection where no screen shows it.
    """

    def __init__(self, address: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.glance = Glance(address=address)
        self.draw: Callable[[Glance], None] = lambda _glance: None
        self.complain: Callable[[str], None] | None = None
        self._monotonic = monotonic
        self._next_clients_at = float("-inf")
        self._rates: deque[float] = deque(maxlen=_MAX_RATES)

    def notice(self, notice: Notice) -> None:
        """Take note of what happens to the connection and the GPUs, and show it at once."""
        match notice:
            case events.Thermal():
                self.glance = replace(self.glance, heat=notice)
            case Reconnecting() | events.GoingAway() | Connected():
                self.glance = replace(self.glance, notice=describe_notice(notice))
            case _:
                return
        if self.complain is None:
            self.draw(self.glance)
        elif isinstance(notice, Reconnecting) and notice.attempt == 1:
            self.complain(self.glance.notice)

    async def run(
        self,
        client: Client,
        *,
        interval_s: float,
        once: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Look and show until this is cancelled; while the connection is lost, wait.

        Raises:
            InferenceCenterError: The connection is over for good.
        """
        while True:
            await self.look(client)
            self.draw(self.glance)
            if once:
                return
            await sleep(interval_s)

    async def look(self, client: Client) -> None:
        """Ask for all that this account may see.

        Raises:
            InferenceCenterError: The connection is over for good.
        """
        metrics = await _ask(client, requests.Metrics(op="metrics"), events.Metrics)
        models = await _ask(client, requests.ListModels(op="list_models"), events.Models)
        sides = {side: await _ask(client, requests.Status(op="status", type=side), events.Status) for side in _SIDES}
        clients = await self._clients(client)
        if metrics is not None:
            self._rates.append(metrics.inference.tokens_per_s)
        self.glance = replace(
            self.glance,
            version=client.hello.version,
            metrics=metrics or self.glance.metrics,
            plan=model.plan if (model := sides["model"]) else None,
            models=models.models if models else (),
            clients=clients,
            status={side: status.values for side, status in sides.items() if status},
            rates=tuple(self._rates),
        )

    async def _clients(self, client: Client) -> tuple[ConnectedClient, ...]:
        """Return who is connected; asked seldom, since the daemon notes in its audit log who asks."""
        if Scope.ADMIN not in client.account.scopes:
            return ()
        now = self._monotonic()
        if now < self._next_clients_at:
            return self.glance.clients
        self._next_clients_at = now + _CLIENTS_EVERY_S
        answer = await _ask(client, requests.ListClients(op="list_clients"), events.Clients)
        return answer.clients if answer else ()


async def _ask(client: Client, request: Request, kind: type[E]) -> E | None:
    """Return the answer; ``None`` where the daemon, or the account, has none."""
    try:
        answer = await client.request(request)
    except InferenceCenterError as error:
        if client.ended is not None:
            raise client.ended from error
        return None
    return answer if isinstance(answer, kind) else None


async def _watch(watch: Watch, daemon: DaemonAccess, *, interval_s: float, once: bool, live: bool) -> None:
    # Who watches wants to see the daemon come back, whenever that is.
    give_up_after_s = None if live else 300.0
    connection = Client(
        daemon.url,
        token=daemon.token,
        on_notice=watch.notice,
        give_up_after_s=give_up_after_s,
        **daemon.tls_option,
    )
    async with connection as client:
        if not live:
            await watch.run(client, interval_s=interval_s, once=once)
            return
        with _until_quit(), Live(console=stdout, screen=True, auto_refresh=False) as shown:
            hint = Text("\nq leaves", style="dim")
            watch.draw = lambda glance: shown.update(Group(screen(glance, width=stdout.width), hint), refresh=True)
            await watch.run(client, interval_s=interval_s)


@contextlib.contextmanager
def _until_quit() -> Iterator[None]:
    """End the block, which awaits, without a word when q is typed or the process is told to end.

    The terminal is as before afterwards: what is typed is shown again, and waits for the end of a line.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "called by a task"
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


def _print_screen(glance: Glance) -> None:
    stdout.print(screen(glance, width=stdout.width))


def _write_line(glance: Glance) -> None:
    typer.echo(line(glance))


def _write_json(glance: Glance) -> None:
    typer.echo(orjson.dumps(as_data(glance)).decode())
