"""The host of an engine: the process beside it that connects it to a front on another machine.

``python -m inferencecenter.cluster.engine_host`` reads a ``LinkTicket`` as a line of JSON from standard input. It ends
with its parent, when its engine ends, when the front refuses it, or after ``orphan_s`` without a connection.

The engine is a child as on the front's own machine: with a socket pair, a heartbeat page and a lock. The host passes
its messages on, reads the page after its death, and keeps it while there is no connection. Then what the engine sends
is dropped, and ``Reattach`` has it drop its turns: the front gives them to an engine again, with what was generated.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter import __version__
from inferencecenter.cluster.file_transfer import CopyCancelledError, FileCopier
from inferencecenter.cluster.host_process import CONNECT_TIMEOUT_S, connect, run_host
from inferencecenter.cluster.node import Node
from inferencecenter.core.errors import InferenceCenterError, reason_of
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.framing import MAX_FRAME_BYTES
from inferencecenter.ipc.keepalive import Keepalive
from inferencecenter.ipc.link import (
    BEAT_S,
    EndEngine,
    FrontBeat,
    HostBeat,
    HostedEngineEnded,
    HostedEngineStarted,
    HostHello,
    HostRefused,
    HostWelcome,
    LinkTicket,
    StartEngine,
    to_host_decoder,
)
from inferencecenter.ipc.messages import Configure, LoadFailed, Loading, Reattach, Suspended
from inferencecenter.supervisor.process import EngineLockError, LocalLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.link import FromHost, ToHost
    from inferencecenter.ipc.messages import FromEngine
    from inferencecenter.supervisor.process import EngineProcess

RETRY_S: Final = 0.5
"""Seconds between two attempts to connect."""
_OTHER_ENGINE: Final = "the front wants another engine"
_RESOURCES_EVERY: Final = 5
"""Heartbeats between two readings of the machine's memory."""
_log = structlog.get_logger(__name__)


class FrontLink:
    """One connection to the front.

    Args:
        ticket: Whose front, and how long its silence may last.
        hello: The first message.
        on_message: Called with each message of the front but its heartbeats and its welcome.
        on_drain: Called when the connection has room again.
        ticks: Returns the engine's progress counter.
    """

    def __init__(
        self,
        ticket: LinkTicket,
        hello: HostHello,
        *,
        on_message: Callable[[ToHost], None],
        on_drain: Callable[[], None],
        ticks: Callable[[], int],
    ) -> None:
        self._ticket = ticket
        self._hello = hello
        self._on_message = on_message
        self._ticks = ticks
        self._tasks = TaskGroup("front-link")
        self.welcome: HostWelcome | None = None
        self.channel: Channel[FromHost, ToHost] = Channel(
            to_host_decoder(max_frame_bytes=MAX_FRAME_BYTES), self._receive, on_drain=on_drain
        )
        self._keepalive = Keepalive(self.channel, beat=self._beat, lost_after_s=lambda: ticket.lost_after_s)

    async def run(self, *, connect_within_s: float) -> None:
        """Connect, and exchange heartbeats until the connection is lost.

        Raises:
            OSError: The front cannot be reached, or is not the one that issued the ticket.
        """
        await connect(self._ticket, self.channel, within_s=connect_within_s)
        self.channel.send(self._hello)
        reading = self._tasks.spawn(self._report_resources(), name="resources")
        try:
            await self._keepalive.run()
        finally:
            reading.cancel()

    def _beat(self) -> None:
        if self.welcome is not None:
            self.channel.send(HostBeat(self._ticks(), time.monotonic()))

    async def _report_resources(self) -> None:
        """Send the machine's memory again and again. It is read in a thread: a driver may block for long."""
        while True:
            resources = await asyncio.to_thread(Node.resources)
            if self.welcome is not None:
                self.channel.send(resources)
            await asyncio.sleep(_RESOURCES_EVERY * BEAT_S if self.welcome else BEAT_S)

    def _receive(self, message: ToHost) -> None:
        self._keepalive.received()
        if isinstance(message, HostWelcome):
            self.welcome = message
        elif not isinstance(message, FrontBeat):
            self._on_message(message)


class EngineHost:
    """Runs one engine for a front.

    Args:
        ticket: From the front.
        node: This machine.
    """

    def __init__(self, ticket: LinkTicket, node: Node) -> None:
        self._ticket = ticket
        self._key = ticket.key
        self._node = node
        self._launcher = LocalLauncher(node.lock_path(ticket.engine))
        self._order: StartEngine | None = None
        self._copier: FileCopier | None = None
        self._engine: EngineProcess | None = None
        self._link: FrontLink | None = None
        self._is_over = asyncio.Event()
        self._tasks = TaskGroup("engine-host")

    async def run(self) -> None:
        """Serve the front until the engine has ended or is not wanted any more."""
        try:
            connecting = self._tasks.spawn(self._stay_connected(), name="connect")
            over = self._tasks.spawn(self._until_over(), name="over")
            await asyncio.wait([connecting, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._cancel_copying()
            if self._engine is not None:
                await self._engine.end()
            await self._tasks.cancel()

    def stop(self) -> None:
        """End the engine, and ``run``."""
        self._is_over.set()

    async def _until_over(self) -> None:
        await self._is_over.wait()

    async def _stay_connected(self) -> None:
        """Connect again and again; return when the front has not answered for too long."""
        loop = asyncio.get_running_loop()
        connected_s = loop.time()
        while (left_s := connected_s + self._ticket.orphan_s - loop.time()) > 0:
            if await self._connect(within_s=min(CONNECT_TIMEOUT_S, left_s)):
                connected_s = loop.time()
            await asyncio.sleep(RETRY_S)
        _log.warning("front_lost", engine=self._ticket.engine, orphan_s=self._ticket.orphan_s)

    async def _connect(self, *, within_s: float) -> bool:
        """Serve one connection; return whether there was one."""
        hello = HostHello(
            version=__version__,
            engine=self._ticket.engine,
            epoch=self._ticket.epoch,
            key=self._key,
            node=self._ticket.node or socket.gethostname(),
        )
        link = FrontLink(
            self._ticket,
            hello,
            on_message=self._on_front_message,
            on_drain=self._resume_engine,
            ticks=lambda: self._engine.ticks if self._engine else 0,
        )
        self._link = link
        try:
            await link.run(connect_within_s=within_s)
        except (OSError, ValueError) as error:
            _log.info("front_not_reached", engine=self._ticket.engine, reason=reason_of(error))
        finally:
            self._link = None
            link.channel.abort()
            self._resume_engine()
        if link.welcome is None:
            return False
        self._key = link.welcome.resume_key
        if self._engine is not None:
            self._engine.channel.send(Reattach())
        return True

    # Messages of the front.

    def _on_front_message(self, message: ToHost) -> None:
        match message:
            case HostRefused(reason=reason):
                _log.warning("host_refused", engine=self._ticket.engine, reason=reason)
                self.stop()
            case StartEngine():
                self._start(message)
            case EndEngine(kill=kill) if self._engine is not None:
                if kill:
                    self._engine.kill()
                else:
                    self._engine.close()
            case EndEngine():
                self._cancel_copying()
                self._report(HostedEngineEnded(detail="there is no engine", by_itself=False))
            case HostWelcome() | FrontBeat() | Configure():
                pass
            case _ if self._engine is not None:
                self._engine.channel.send(message)
                if not self._engine.channel.has_room and self._link is not None:
                    self._link.channel.pause_reading()

    def _start(self, order: StartEngine) -> None:
        running, self._order = self._order, order
        if running is None:
            self._tasks.spawn(self._run_engine(order), name="engine")
        elif not _is_same(order, running):
            self._cancel_copying()
            if self._engine is not None:
                self._engine.kill(because=_OTHER_ENGINE)
        elif self._engine is not None:
            self._send(HostedEngineStarted(self._engine.pid))
            self._engine.channel.send(Reattach())

    def _cancel_copying(self) -> None:
        if self._copier is not None:
            self._copier.cancel()

    def _on_copy_progress(self, loop: asyncio.AbstractEventLoop, name: str, done: float) -> None:
        """Report the progress; called from the copying thread."""
        loop.call_soon_threadsafe(self._send, Loading(done, copying=name))

    def _files_access(self) -> tuple[int, str]:
        welcome = self._link.welcome if self._link is not None else None
        port = self._order.files_port if self._order is not None else 0
        return port, self._key if welcome is None else welcome.resume_key

    async def _run_engine(self, order: StartEngine) -> None:
        self._copier = FileCopier(
            self._node.copies,
            self._ticket,
            access=self._files_access,
            on_progress=partial(self._on_copy_progress, asyncio.get_running_loop()),
        )
        try:
            options = await asyncio.to_thread(self._node.complete, order, self._copier)
            engine = await self._launcher.launch(
                options,
                is_first=options.kv_adopt == "durable",
                on_message=self._on_engine_message,
                on_drain=self._resume_front,
            )
        except CopyCancelledError:
            self._report(HostedEngineEnded(detail=_OTHER_ENGINE, by_itself=False))
            return
        except InferenceCenterError as error:
            self._send(LoadFailed(error.code.value, error.message, error.hint or ""))
            self._report(HostedEngineEnded(detail=error.message, by_itself=False))
            return
        except (OSError, EngineLockError) as error:
            self._report(HostedEngineEnded(detail=f"the engine cannot be started: {error}"))
            return
        self._engine = engine
        self._send(HostedEngineStarted(engine.pid))
        ended = await engine.gone()
        self._engine = None
        self._report(
            HostedEngineEnded(
                detail=ended.detail,
                suspects=ended.suspects,
                by_itself=ended.by_itself,
                from_outside=ended.from_outside,
            )
        )

    def _report(self, ended: HostedEngineEnded) -> None:
        """Tell the front that the engine has ended, and end."""
        self._send(ended)
        self._tasks.spawn(self._leave(), name="leave")

    async def _leave(self) -> None:
        """End when the front has closed the connection, or after the time in which it would miss a heartbeat."""
        if self._link is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ticket.lost_after_s):
                    await self._link.channel.lost()
        self.stop()

    # Messages of the engine.

    def _on_engine_message(self, message: FromEngine) -> None:
        if isinstance(message, Suspended) and self._engine is not None:
            self._engine.suspended(message)
        self._send(message)
        if self._link is not None and not self._link.channel.has_room and self._engine is not None:
            self._engine.channel.pause_reading()

    def _send(self, message: FromHost) -> None:
        if self._link is not None and self._link.welcome is not None:
            self._link.channel.send(message)

    def _resume_engine(self) -> None:
        if self._engine is not None:
            self._engine.channel.resume_reading()

    def _resume_front(self) -> None:
        if self._link is not None:
            self._link.channel.resume_reading()


def _is_same(order: StartEngine, running: StartEngine) -> bool:
    """Return whether the engine of one order serves for the other: all but what KV it adopts at its start is equal."""

    def options(each: StartEngine) -> EngineOptions:
        return EngineOptions.model_validate_json(each.options_json).replace(kv_adopt="none")

    return options(order) == options(running) and (order.engine_json, order.files) == (
        running.engine_json,
        running.files,
    )


async def _run(ticket: LinkTicket) -> None:
    host = EngineHost(ticket, Node.of_environment())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, host.stop)
    await host.run()


def main() -> int:
    return run_host(_run)


if __name__ == "__main__":
    sys.exit(main())
