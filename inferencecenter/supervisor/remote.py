"""Engines on other machines: the listener to which their hosts connect, and the engine behind such a connection.

Something starts a host on another machine and hands it a ``LinkTicket``; the host connects here, and is told which
engine to run (``ipc/link.py``). The connection may be lost while the engine lives: then the host drops the engine's
turns, keeps its model and KV, and connects again, to this daemon or to the next one. To the supervisor every lost
connection is a lost engine; its next ``launch`` finds the host again and continues with it, without loading the model.

Mechanism of the fence: a ticket has an epoch, which rises with every ticket for the same engine. Only a host of the
latest epoch is accepted, and only over the connection that it made last. So frames of an engine that was given up are
never read, and its host ends when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import structlog

from inferencecenter import __version__
from inferencecenter.core.json_file import JsonFile
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.gguf import SHARD
from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.framing import MAX_FRAME_BYTES
from inferencecenter.ipc.keepalive import Keepalive
from inferencecenter.ipc.link import (
    MAX_HELLO_BYTES,
    EndEngine,
    FromHost,
    FrontBeat,
    HostBeat,
    HostedEngineEnded,
    HostedEngineStarted,
    HostHello,
    HostRefused,
    HostWelcome,
    LinkTicket,
    ModelFile,
    NodeResources,
    StartEngine,
    ToHost,
    file_digest,
    from_host_decoder,
)
from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, StepOutput
from inferencecenter.supervisor.nodes import HostLink, LinkTraffic
from inferencecenter.supervisor.process import Engine, EngineExit, NodeUnreachableError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from inferencecenter.config.sections import EngineSettings
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import FromEngine, TurnEvent

HELLO_TIMEOUT_S: Final = 10.0
"""How long a connection may take to say which host it is."""
MAX_STRANGERS: Final = 64
"""Connections that have not said that yet; further ones are closed."""
START_TIMEOUT_S: Final = 120.0
"""How long a new host may take to connect."""
_CHECKS_PER_BEAT: Final = 2
_KEY_BYTES: Final = 32
_CLOCK_BEATS: Final = 60
_log = structlog.get_logger(__name__)


class HostStarter(Protocol):
    """Starts hosts on other machines."""

    async def start(self, ticket: LinkTicket) -> None:
        """Start a host, in place of an earlier one of the same engine.

        Raises:
            NodeUnreachableError: It cannot be started.
        """


class FileSource(Protocol):
    """Sends files to hosts that lack them."""

    def offer(self, engine: str, files: tuple[ModelFile, ...]) -> int:
        """Let the host of an engine copy these files and no others; return the port for that."""


class Certificates(Protocol):
    """Issues the certificates of the link between the front and its hosts."""

    @property
    def authority(self) -> str:
        """PEM of the certificate that signs all others."""

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the listener, which demands a certificate of its clients."""

    def issue(self, name: str) -> tuple[str, str]:
        """Return PEM of a new client certificate and of its private key."""


class _Registration(msgspec.Struct):
    """The host that may connect for an engine; keys are SHA-256 digests in hex, empty when they are not valid."""

    epoch: int = 0
    key: str = ""
    resume_key: str = ""


class HostRegistry:
    """The latest epoch of each engine and the keys of its host, also for the next daemon.

    Args:
        path: The file; one that cannot be read or written only costs loading engines again.
    """

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, _Registration], name="hosts")
        self._engines = self._file.read() or {}

    def issue(self, engine: str) -> tuple[int, str]:
        """Return a new epoch and its key; hosts of earlier epochs are refused from now on."""
        key = secrets.token_hex(_KEY_BYTES)
        # The time keeps epochs rising where the file is lost.
        epoch = max(self._of(engine).epoch + 1, time.time_ns() // 1_000)
        self._engines[engine] = _Registration(epoch=epoch, key=_digest(key))
        self._file.write(self._engines)
        return epoch, key

    def admit(self, hello: HostHello) -> str | None:
        """Return the key for the host's later connections, or ``None`` for a host that is not the latest.

        A ticket's key is used up by this.
        """
        known = self._of(hello.engine)
        digest = _digest(hello.key)
        if hello.epoch != known.epoch:
            return None
        if hmac.compare_digest(digest, known.resume_key):
            return hello.key
        if not hmac.compare_digest(digest, known.key):
            return None
        resume_key = secrets.token_hex(_KEY_BYTES)
        self._engines[hello.engine] = _Registration(epoch=known.epoch, resume_key=_digest(resume_key))
        self._file.write(self._engines)
        return resume_key

    def is_connected(self, engine: str, epoch: int, key: str) -> bool:
        """Return whether this is the key of the latest host's connections."""
        known = self._of(engine)
        return epoch == known.epoch and hmac.compare_digest(_digest(key), known.resume_key)

    def may_return(self, engine: str) -> bool:
        """Return whether a host that was connected before may connect again."""
        return bool(self._of(engine).resume_key)

    def end(self, engine: str) -> None:
        """Accept no host for an engine until the next ticket."""
        self._engines[engine] = _Registration(epoch=self._of(engine).epoch)
        self._file.write(self._engines)

    def _of(self, engine: str) -> _Registration:
        return self._engines.get(engine, _Registration())


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class ClockTranslation:
    """Translates times of another machine's monotonic clock, in which an engine there measures stages, to this one's.

    A heartbeat arrives later than it was sent, so the difference of the clocks is at most what it shows. The least of
    the last ``_CLOCK_BEATS`` is taken: clocks drift apart by up to milliseconds a minute.
    """

    def __init__(self) -> None:
        self._differences_s: deque[float] = deque(maxlen=_CLOCK_BEATS)

    def update(self, *, here_s: float, there_s: float) -> None:
        """Take the time of a heartbeat that has just arrived."""
        self._differences_s.append(here_s - there_s)

    def translate(self, step: StepOutput) -> StepOutput:
        """Return a step whose stages have times of this machine's clock; most steps have no stages."""
        if not any(getattr(event, "stages", ()) or getattr(event, "end", None) for event in step.events):
            return step
        return msgspec.structs.replace(step, events=tuple(map(self._translate, step.events)))

    def _translate(self, event: TurnEvent) -> TurnEvent:
        if isinstance(event, ContextFull) and event.end is not None:
            return msgspec.structs.replace(event, end=self._translate(event.end))
        if isinstance(event, Started | Finished | Failed) and event.stages:
            shift_s = min(self._differences_s, default=0.0)
            stages = tuple(
                msgspec.structs.replace(each, began_s=each.began_s + shift_s, ended_s=each.ended_s + shift_s)
                for each in event.stages
            )
            return msgspec.structs.replace(event, stages=stages)
        return event


class RemoteEngine(Engine):
    """An engine behind the connection of its host.

    Args:
        admit: Returns the answer to the host's first message.
        lost_after_s: The connection is dropped after this time without a message of the host.
    """

    def __init__(self, *, admit: Callable[[RemoteEngine, HostHello], ToHost], lost_after_s: float) -> None:
        super().__init__()
        self._admit = admit
        self._lost_after_s = lost_after_s
        self._decoder = from_host_decoder(max_frame_bytes=MAX_HELLO_BYTES)
        self._channel: Channel[ToHost, FromHost] = Channel(
            self._decoder, self._on_message, on_drain=self._on_channel_drain
        )
        self._keepalive = Keepalive(
            self._channel, beat=self._beat, lost_after_s=self._silence_s, checks_per_beat=_CHECKS_PER_BEAT
        )
        self._hello: HostHello | None = None
        self._ticks = 0
        self._beat_s = 0.0
        self._clock = ClockTranslation()
        self._resources: NodeResources | None = None
        self._on_engine_message: Callable[[FromEngine], None] | None = None
        self._on_drain: Callable[[], None] = lambda: None
        self._ended: HostedEngineEnded | None = None
        self._killed_because = ""

    @property
    def channel(self) -> Channel[ToHost, FromHost]:
        return self._channel

    @property
    def pid(self) -> None:
        """Nothing: its process is on another machine."""

    @property
    def ticks(self) -> int:
        return self._ticks

    @property
    def hello(self) -> HostHello | None:
        """The accepted host."""
        return self._hello

    @property
    def link(self) -> HostLink | None:
        """The connection's figures, once the host is accepted."""
        if self._hello is None:
            return None
        return HostLink(time.monotonic() - self._beat_s, self._hello.version, self._resources)

    @property
    def traffic(self) -> LinkTraffic:
        """What the connection has carried."""
        return LinkTraffic(self._channel.sent_bytes, self._channel.received_bytes)

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended or was to end, so that no later engine continues with it."""
        return self._ended is not None or bool(self._killed_because)

    def start(
        self, order: StartEngine, *, on_message: Callable[[FromEngine], None], on_drain: Callable[[], None]
    ) -> None:
        """Have the host start the engine, or continue with the one that it has."""
        self._on_engine_message, self._on_drain = on_message, on_drain
        self._channel.send(order)

    def close(self) -> None:
        self._channel.send(EndEngine())

    def kill(self, *, because: str = "") -> None:
        self._killed_because = because or self._killed_because or "it was killed"
        self._channel.send(EndEngine(kill=True))

    def disconnect(self, reason: str) -> None:
        """Drop the connection; the host keeps the engine for a while."""
        self._channel.give_up(reason)

    async def leave(self, *, suspend_deadline_s: float | None, deadline_s: float) -> None:
        """Leave the engine to the next daemon."""
        del suspend_deadline_s, deadline_s
        self._channel.close()
        await self.gone()

    async def gone(self) -> EngineExit:
        fault = await self._channel.lost()
        self._quiet.set()
        node = self._hello.node if self._hello else "another machine"
        if self._killed_because:
            suspects = self._ended.suspects if self._ended else ()
            return EngineExit(self._killed_because, suspects, by_itself=False)
        if (ended := self._ended) is None:
            detail = f"the connection to the engine on {node} was lost"
            return EngineExit(
                f"{detail}: {fault}" if fault else detail, by_itself=False, from_outside=True, unreachable=True
            )
        return EngineExit(
            f"on {node}: {ended.detail}", ended.suspects, by_itself=ended.by_itself, from_outside=ended.from_outside
        )

    async def run(self) -> None:
        """Exchange heartbeats until the connection is lost."""
        await self._keepalive.run()

    def _silence_s(self) -> float:
        return HELLO_TIMEOUT_S if self._hello is None else self._lost_after_s

    def _beat(self) -> None:
        if self._hello is not None:
            self._channel.send(FrontBeat())

    def _on_channel_drain(self) -> None:
        self._on_drain()

    def _on_message(self, message: FromHost) -> None:
        self._keepalive.received()
        if self._hello is None:
            self._on_hello(message)
            return
        match message:
            case HostBeat(ticks=ticks, monotonic_s=there_s):
                self._ticks, self._beat_s = ticks, time.monotonic()
                self._clock.update(here_s=self._beat_s, there_s=there_s)
            case NodeResources():
                self._resources = message
            case HostedEngineStarted(pid=pid):
                _log.info("engine_on_host", engine=self._hello.engine, node=self._hello.node, remote_pid=pid)
            case HostedEngineEnded():
                self._ended = message
                self._channel.close()
            case HostHello():
                self.disconnect("a second hello")
            case _ if self._on_engine_message is not None:
                self._on_engine_message(self._clock.translate(message) if type(message) is StepOutput else message)

    def _on_hello(self, message: FromHost) -> None:
        if not isinstance(message, HostHello):
            self.disconnect("the first message is no hello")
            return
        answer = self._admit(self, message)
        self._channel.send(answer)
        if isinstance(answer, HostRefused):
            _log.warning("host_refused", engine=message.engine, node=message.node, reason=answer.reason)
            self._channel.close()
            return
        self._hello, self._beat_s = message, time.monotonic()
        self._decoder.max_frame_bytes = MAX_FRAME_BYTES


class HostListener:
    """Accepts the connections of hosts.

    Args:
        certificates: Those of this daemon and its hosts.
        registry: Which hosts are accepted.
        lost_after_s: A connection is dropped after this time without a message.
        orphan_s: A host ends its engine after this time without a connection.
    """

    def __init__(
        self, certificates: Certificates, registry: HostRegistry, *, lost_after_s: float, orphan_s: float
    ) -> None:
        self._certificates = certificates
        self._registry = registry
        self.lost_after_s = lost_after_s
        self._orphan_s = orphan_s
        self._server: asyncio.Server | None = None
        self._address = ("", 0)
        self._connections: set[RemoteEngine] = set()
        self._latest: dict[str, RemoteEngine] = {}
        self._unclaimed: set[RemoteEngine] = set()
        self._traffic: defaultdict[str, LinkTraffic] = defaultdict(LinkTraffic)
        self._known: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks = TaskGroup("host-listener")

    async def open(self, host: str, port: int, *, advertised: str = "") -> None:
        """Listen; hosts connect to the address ``advertised``, or to ``host``.

        Raises:
            OSError: The address is in use or not one of this machine.
        """
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, host, port, ssl=self._certificates.server_context(), ssl_handshake_timeout=HELLO_TIMEOUT_S
        )
        self._address = (advertised or host, self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> tuple[str, int]:
        """The address to which hosts connect."""
        return self._address

    async def close(self) -> None:
        """Drop all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.disconnect("the daemon ends")
        await self._tasks.cancel()

    def ticket(self, engine: str) -> LinkTicket:
        """Return a ticket for a new host; every earlier host of this engine is refused from now on."""
        epoch, key = self._registry.issue(engine)
        if (last := self._latest.pop(engine, None)) is not None:
            last.disconnect("another host takes its place")
        certificate, certificate_key = self._certificates.issue(f"{engine}/{epoch}")
        return LinkTicket(
            engine=engine,
            epoch=epoch,
            key=key,
            address=self._address,
            authority=self._certificates.authority,
            certificate=certificate,
            certificate_key=certificate_key,
            lost_after_s=self.lost_after_s,
            orphan_s=self._orphan_s,
        )

    def may_return(self, engine: str) -> bool:
        """Return whether a host that was connected before may connect again."""
        return self._registry.may_return(engine)

    def link(self, engine: str) -> HostLink | None:
        """Return the connection of an engine's host, if there is one."""
        connection = self._latest.get(engine)
        return None if connection is None else connection.link

    def traffic(self, engine: str) -> LinkTraffic:
        """Return what the connections to an engine's hosts have carried."""
        open_now = (each.traffic for each in self._connections if each.hello and each.hello.engine == engine)
        return sum(open_now, self._traffic[engine])

    async def connected(self, engine: str, *, within_s: float) -> RemoteEngine | None:
        """Wait for the host of an engine, and return its connection once; ``None`` if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (connection := self._latest.get(engine)) not in self._unclaimed:
                    await self._changed.wait()
                assert connection is not None, "it is unclaimed"
                self._unclaimed.discard(connection)
                return connection
        return None

    def _accept(self) -> Channel[ToHost, FromHost]:
        connection = RemoteEngine(admit=self._admit, lost_after_s=self.lost_after_s)
        self._connections.add(connection)
        self._tasks.spawn(self._serve(connection), name="host")
        return connection.channel

    async def _serve(self, connection: RemoteEngine) -> None:
        if sum(each.hello is None for each in self._connections) > MAX_STRANGERS:
            connection.disconnect("too many connections")
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._unclaimed.discard(connection)
            if (hello := connection.hello) is not None:
                self._traffic[hello.engine] += connection.traffic
                if self._latest.get(hello.engine) is connection:
                    del self._latest[hello.engine]
                    if connection.is_over:
                        self._registry.end(hello.engine)

    def _admit(self, connection: RemoteEngine, hello: HostHello) -> HostWelcome | HostRefused:
        if hello.version != __version__:
            return HostRefused(f"the front has version {__version__}, the host {hello.version}")
        resume_key = self._registry.admit(hello)
        if resume_key is None:
            return HostRefused("another host has taken its place, or its ticket was used")
        if (last := self._latest.get(hello.engine)) is not None:
            last.disconnect("its host has connected again")
        if hello.engine in self._known:
            self._traffic[hello.engine] += LinkTraffic(reconnects=1)
        self._known.add(hello.engine)
        self._latest[hello.engine] = connection
        self._unclaimed.add(connection)
        self._changed.set()
        self._changed.clear()
        return HostWelcome(resume_key)


class RemoteLauncher:
    """Starts the engines of a model on other machines, or continues with one; implements ``EngineLauncher``.

    Args:
        name: The engine's name among all of this daemon.
        engine: The settings of the model's engines, by which hosts plan.
        listener: Where its hosts connect.
        starter: Starts them.
        files: Sends them the files that they lack; ``None`` sends none.
    """

    def __init__(
        self,
        name: str,
        engine: EngineSettings,
        *,
        listener: HostListener,
        starter: HostStarter,
        files: FileSource | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._listener = listener
        self._starter = starter
        self._files = files

    @property
    def link(self) -> HostLink | None:
        """The connection to the engine's host, if there is one."""
        return self._listener.link(self._name)

    @property
    def traffic(self) -> LinkTraffic:
        """What the connections to the engine's hosts have carried."""
        return self._listener.traffic(self._name)

    async def launch(
        self,
        options: EngineOptions,
        *,
        is_first: bool,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None],
    ) -> RemoteEngine:
        """Start an engine; see ``EngineLauncher``."""
        files = await asyncio.to_thread(_model_files, options)
        engine = None
        if self._listener.may_return(self._name):
            engine = await self._listener.connected(self._name, within_s=self._listener.lost_after_s)
        if engine is None:
            await self._starter.start(self._listener.ticket(self._name))
            engine = await self._listener.connected(self._name, within_s=START_TIMEOUT_S)
        if engine is None:
            raise NodeUnreachableError(f"its host has not connected within {START_TIMEOUT_S:g} s")
        options = options.replace(kv_adopt="durable" if is_first else "all")
        order = StartEngine(
            options_json=options.model_dump_json().encode(),
            engine_json=self._engine.model_dump_json().encode(),
            files=files,
            files_port=0 if self._files is None else self._files.offer(self._name, files),
        )
        engine.start(order, on_message=on_message, on_drain=on_drain)
        return engine


def _model_files(options: EngineOptions) -> tuple[ModelFile, ...]:
    """Return the files that an engine with these options reads; blocks.

    Raises:
        OSError: One cannot be read.
    """
    if options.backend != "llama":
        return ()
    paths = [options.model_path, options.draft_path, options.mmproj_path, *(str(each.path) for each in options.lora)]
    return tuple(_model_file(part, path) for path in paths if path for part in _parts(Path(path)))


def _model_file(path: Path, first: str) -> ModelFile:
    status = path.stat()
    return ModelFile(str(path), status.st_size, file_digest(path), status.st_mtime_ns, first)


def _parts(path: Path) -> list[Path]:
    """Return a file, or all parts of the split one whose first part it is."""
    if (named := SHARD.match(path.stem)) is None or int(named["number"]) != 1:
        return [path]
    count = named["count"]
    return [path.with_name(f"{named['stem']}-{part:05}-of-{count}.gguf") for part in range(1, int(count) + 1)]
