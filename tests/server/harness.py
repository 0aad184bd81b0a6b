"""A complete server on a loopback port, with real accounts and sessions and a stub engine."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from websockets.asyncio import client
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from inferencecenter.api.app import create_app
from inferencecenter.api.operations import api_routes
from inferencecenter.auth.account import Account, NewToken, StaticClient
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.clients_file import load_clients
from inferencecenter.auth.quotas import AccessQuotas
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.config.sections import AuthSettings, EngineSettings
from inferencecenter.config.settings import ServerSettings, SessionSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.nvml import NO_GPU, Gpu
from inferencecenter.ipc.messages import ContextFull, Finished, ModelInfo, Started, Submit, TokenDelta, pack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.library import ModelLibrary
from inferencecenter.models.registry import ModelSpec
from inferencecenter.protocol.params import Params
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import ModelSummary
from inferencecenter.server.context import ServerContext, UsagePageReader, UsageReader, no_usage, no_usage_page
from inferencecenter.server.listener import BACKLOG, Listener, bind
from inferencecenter.server.unix_socket import unix_socket
from inferencecenter.sessions.manager import SessionManager
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.ipc.lookups import CharacterTokens
from tests.sessions.conftest import InlineTemplates

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping

    from inferencecenter.auth.audit import AuditEntry
    from inferencecenter.auth.authentication import ExternalAuthProvider
    from inferencecenter.config.sections import ModelKind
    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.ipc.port import EngineTurn
    from inferencecenter.protocol.events import Swap
    from inferencecenter.protocol.values import EnginePlan
    from inferencecenter.sessions.journal import Journal, Record, StorageFault
    from inferencecenter.supervisor.nodes import NodeStatus

MODEL = ModelInfo(
    name="stub",
    path="/models/stub.gguf",
    description="stub",
    architecture="stub",
    backend="stub",
    n_params=1,
    size_bytes=1,
    n_vocab=256,
    n_layers=1,
    n_gpu_layers=0,
    n_ctx_train=4096,
    n_ctx=4096,
    slots=4,
    n_threads=1,
    chat_template="",
    bos_token="",
    eos_token="",
    add_bos=False,
    special_tokens=(),
    sampling_defaults_json=b"{}",
    library="stub",
)
CLIENTS_TOML = """
[[client]]
client_id = "kitchen"
api_key = "kitchen-key"
max_sessions = 3

[[client]]
client_id = "desk"
api_key = "desk-key"
scopes = ["user", "operator"]
"""


class StubEngine(CharacterTokens):
    """The only model, whose turns advance when a test calls ``say`` or ``finish``."""

    default = MODEL.name

    def __init__(self) -> None:
        self.status = EngineStatus(state=EngineState.READY, model=MODEL)
        self.plan: EnginePlan | None = None
        self.kind: ModelKind = "chat"
        self.aliases: dict[str, str] = {}
        self.turns: dict[str, EngineTurn] = {}
        self.nodes: tuple[NodeStatus, ...] = ()
        self.drained_nodes: list[str] = []
        self.submitted = asyncio.Event()
        self.swaps: list[tuple[str, Callable[[Swap], None]]] = []
        self.unloaded: list[str] = []
        self._watchers: list[Callable[[EngineStatus], None]] = []
        self._model_watchers: list[Callable[[str, EngineStatus], None]] = []
        self._swap_watchers: list[Callable[[ModelInfo], None]] = []

    @property
    def statuses(self) -> Mapping[str, EngineStatus]:
        """The one status."""
        return {self.default: self.status}

    def engine(self, name: str) -> StubEngine:
        """Return itself."""
        if name != self.default:
            raise InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, field="model")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.default,)

    def drain_node(self, name: str) -> None:
        """Record the machine."""
        self.drained_nodes.append(name)

    def undrain_node(self, name: str) -> None:
        """Forget the machine."""
        self.drained_nodes.remove(name)

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Do nothing: it is loaded."""

    def params_of(self, name: str) -> Mapping[str, Any]:
        """Return no parameters."""
        return {}

    def spec_of(self, name: str) -> ModelSpec:
        """Return the one model."""
        _refuse_missing(name)
        return ModelSpec(name=name, path=Path(), engine=EngineSettings(), kind=self.kind)

    def sees(self, name: str) -> bool:
        """Return whether the loaded model takes images."""
        model = self.engine(name).model
        return model is not None and model.sees

    def kind_of(self, name: str) -> str:
        """Return the kind that a test set."""
        return self.spec_of(name).kind

    def rescan(self) -> None:
        """Do nothing: there is no directory of models."""

    def forget_removed(self) -> None:
        """Do nothing: there is no directory of models."""

    def describe(self) -> tuple[ModelSummary, ...]:
        """Return the one model."""
        return (ModelSummary(name=self.default, default=True, state="loaded"),)

    def swap(self, name: str, tell: Callable[[Swap], None]) -> None:
        """Record the request; the test completes it."""
        _refuse_missing(name)
        self.swaps.append((name, tell))

    def swapped(self, name: str) -> None:
        """Make another model the default."""
        self.default = name
        for watcher in self._swap_watchers:
            watcher(msgspec.structs.replace(MODEL, name=name))

    def unload(self, name: str) -> None:
        """Record the request."""
        _refuse_missing(name)
        self.unloaded.append(name)

    def subscribe_models(self, listener: Callable[[str, EngineStatus], None]) -> None:
        """Notify ``listener`` of every change."""
        self._model_watchers.append(listener)

    def subscribe_swaps(self, listener: Callable[[ModelInfo], None]) -> None:
        """Notify ``listener`` of every new default."""
        self._swap_watchers.append(listener)

    @property
    def model(self) -> ModelInfo | None:
        """The model in the status."""
        return self.status.model

    def submit(self, turn: EngineTurn) -> int:
        """Queue a turn until the test generates its tokens."""
        turn.submission(lambda: None)
        self.turns[turn.turn_id] = turn
        self.submitted.set()
        return 0

    def submission(self, turn_id: str) -> Submit:
        """Return what a turn submits to the engine."""
        submission = self.turns[turn_id].submission(lambda: None)
        assert isinstance(submission, Submit)
        return submission

    def abort(self, turn_id: str) -> None:
        """End a turn asynchronously."""
        asyncio.get_running_loop().call_soon(self._abort, turn_id)

    def _abort(self, turn_id: str) -> None:
        if turn_id in self.turns:
            self.finish(turn_id, reason="aborted")

    def release(self, session_id: str) -> None:
        """Do nothing."""

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Notify ``listener`` of every change."""
        self._watchers.append(listener)

    def become(self, status: EngineStatus) -> None:
        """Change the state."""
        self.status = status
        for watcher in self._watchers:
            watcher(status)
        for model_watcher in self._model_watchers:
            model_watcher(self.default, status)

    def begin(self, turn_id: str) -> None:
        """Give a turn its slot."""
        self.turns[turn_id].on_engine_event(Started(turn_id=turn_id, tokens=pack_tokens([1]), cached_tokens=0))

    def say(self, turn_id: str, text: str) -> None:
        """Generate a token whose text is ``text``."""
        self.turns[turn_id].on_engine_event(TokenDelta(turn_id=turn_id, tokens=pack_tokens([2]), text=text))

    def overflow(self, turn_id: str, *, n_tokens: int) -> None:
        """Report that a turn's prompt does not fit; it may be resubmitted shorter."""
        self.turns.pop(turn_id).on_engine_event(ContextFull(turn_id=turn_id, n_tokens=n_tokens))

    def finish(self, turn_id: str, *, reason: str = "stop") -> None:
        """End a turn."""
        self.turns.pop(turn_id).on_engine_event(
            Finished(
                turn_id=turn_id,
                reason=reason,
                stop=None,
                kept_tokens=0,
                kept_chars=0,
                end_text="",
                prompt_tokens=1,
                cached_tokens=0,
                generated_tokens=1,
                queue_ms=1.0,
                ttft_ms=2.0,
                total_ms=3.0,
                tokens_per_s=4.0,
            )
        )


def _refuse_missing(name: str) -> None:
    if name == "missing":
        raise InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, field="model")


class StubGpu(Gpu):
    """A GPU with readings set by a test; by default there is none."""

    def __init__(self) -> None:
        self.reading = NO_GPU
        self.reads = 0

    def read(self) -> GpuReading:
        """Return the reading, and count the call."""
        self.reads += 1
        return self.reading


@dataclass
class StubJournal:
    """A journal that stores nothing, and delays callbacks when a test says so."""

    fault: StorageFault | None = None
    n_pending: int = 0
    n_skipped: int = 0
    holding: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)

    def is_incomplete(self, session_id: str) -> bool:
        """Nothing is left out."""
        return False

    def of_client(self, client_id: str) -> Journal:
        """Return the one store of all clients."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Drop the record."""

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at once, or queue it."""
        if self.holding:
            self.held.append(tell)
        else:
            tell()

    def run_callbacks(self) -> None:
        """Run all queued callbacks."""
        self.holding = False
        held, self.held = self.held, []
        for tell in held:
            tell()


@dataclass
class Running:
    """A server that is up."""

    context: ServerContext
    engine: StubEngine
    gpu: StubGpu
    accounts: Accounts
    listener: Listener
    port: int
    token: str
    token_id: str
    serving: asyncio.Task[None] = field(repr=False)

    def connect(self, path: str = "/", **options: Any) -> client.connect:
        """Open a socket to a path."""
        return client.connect(
            f"ws://127.0.0.1:{self.port}{path}", compression=None, **{"close_timeout": 0.1, **options}
        )

    def v1(self, **options: Any) -> client.connect:
        """Open an authenticated v1 socket."""
        return self.connect(
            additional_headers={"Authorization": f"Bearer {self.token}"},
            subprotocols=["inferencecenter.v1"],
            **options,
        )

    async def http(self, path: str, headers: str = "", *, method: str = "GET") -> tuple[int, str, bytes]:
        """Send a plain request, by default a GET; return status, head and body."""
        host = "" if headers.startswith("Host:") else f"Host: 127.0.0.1:{self.port}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}\r\n".encode())
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), head.decode(), body


async def ask(socket: ClientConnection, **frame: Any) -> dict[str, Any]:
    """Send a frame and return the next one received."""
    await socket.send(json.dumps(frame))
    return await receive(socket)


async def receive(socket: ClientConnection, op: str | None = None) -> dict[str, Any]:
    """Return the next frame, or the next one with ``op``."""
    while True:
        frame: dict[str, Any] = json.loads(await socket.recv())
        if op in (None, frame["op"]):
            return frame


async def close_code(socket: ClientConnection) -> int | None:
    """Receive to the end; return the close code, ``None`` without one."""
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


@cache
def _accounts_with_ada() -> tuple[bytes, NewToken]:
    """Return a file of accounts with the client ada, and its token; a server starts with a copy, which is cheaper."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "accounts.sqlite3"
        accounts = Accounts.open(file, clock=time.time)
        accounts.ensure_client("ada", max_sessions=8, priority="normal")
        new = accounts.create_token("ada", name="test")
        accounts.close()
        return file.read_bytes(), new


@asynccontextmanager
async def running_server(
    tmp_path: Path,
    *,
    tls: ssl.SSLContext | None = None,
    journal: Journal | None = None,
    limits: AccessLimits = NO_LIMITS,
    external: ExternalAuthProvider | None = None,
    read_usage: UsageReader = no_usage,
    read_usage_page: UsagePageReader = no_usage_page,
    unix_accounts: Mapping[int, str] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[Running]:
    """Run a server with some settings changed and short deadlines; without ``journal`` it stores no sessions."""
    clients = tmp_path / "clients.toml"
    clients.write_text(CLIENTS_TOML)
    static: dict[str, StaticClient] = load_clients(AuthSettings(clients_file=clients))
    file = tmp_path / "accounts.sqlite3"
    if is_first := not file.exists():
        file.write_bytes(_accounts_with_ada()[0])
    accounts = Accounts.open(file, clock=time.time, static=static)
    new = _accounts_with_ada()[1] if is_first else accounts.create_token("ada", name="test")
    engine, gpu, metrics = StubEngine(), StubGpu(), DaemonMetrics()
    quotas = AccessQuotas(accounts, defaults=limits, clock=time.time, monotonic=time.monotonic)

    def stop() -> None:
        listener.stop()

    chosen = ServerSettings(**{"port": 0, "shutdown_timeout_s": 0, "metrics_access": "either", **settings})
    context = ServerContext.create(
        chosen,
        models=engine,
        library=ModelLibrary(directory=tmp_path / "models", configured=dict, environment={}),
        sessions=SessionManager(
            engines=engine,
            renderers=InlineTemplates(),
            config_params=Params(),
            settings=SessionSettings(max_sessions=100),
            journal=journal,
            observer=metrics,
            quota_of=quotas.of,
        ),
        accounts=accounts,
        quotas=quotas,
        gpu=gpu,
        metrics=metrics,
        stop=stop,
        read_usage=read_usage,
        read_usage_page=read_usage_page,
        external=external,
        unix_accounts=unix_accounts,
    )
    app = create_app(context, *api_routes(context))
    listener = Listener(app, chosen, drain=context.drain, tls=tls, refusal=context.upgrade_limiter.refusal)
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    held = ExitStack()
    if chosen.unix_socket is not None:
        mode = int(chosen.unix_socket_mode, 8)
        sockets.append(held.enter_context(unix_socket(chosen.unix_socket, mode=mode, backlog=BACKLOG)))
    tasks = TaskGroup("server")
    serving = tasks.spawn(listener.serve(sockets), name="serve")
    try:
        yield Running(
            context=context,
            engine=engine,
            gpu=gpu,
            accounts=accounts,
            listener=listener,
            port=port,
            token=new.token,
            token_id=new.token_id,
            serving=serving,
        )
    finally:
        listener.stop()
        await serving
        await context.close()
        accounts.close()
        held.close()


def ready(**changes: Any) -> EngineStatus:
    """Return the stub's status with changes."""
    return replace(EngineStatus(state=EngineState.READY, model=MODEL), **changes)


class StubWire:
    """A socket that a test makes writable or not."""

    def __init__(self) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.takes_frames = True
        self.written: list[bytes] = []
        self.pieces: list[bytes] = []
        self.finished: list[int] = []

    def write_text(self, frame: bytes) -> None:
        """Record the frame."""
        self.written.append(frame)

    def write_piece(self, piece: bytes, *, first: bool, last: bool) -> None:
        """Reassemble the message; it is recorded with its last piece."""
        assert first == (not self.pieces)
        self.pieces.append(piece)
        if last:
            self.written.append(b"".join(self.pieces))
            self.pieces.clear()

    def finish(self, code: int, reason: str, *, linger_s: float) -> None:
        """Record the code."""
        self.finished.append(code)

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The recorded frames, decoded."""
        return [json.loads(frame) for frame in self.written]


KITCHEN = Account(client_id="kitchen", max_sessions=3, priority="normal", scopes=frozenset({Scope.USER}))


class StubAccounts:
    """Accounts of one client, with a key and no file."""

    def verify_token(self, token: str) -> Account | None:
        """Refuse every token."""

    def verify_key(self, client_id: str, api_key: str) -> Account | None:
        """Return the one client for its key."""
        return KITCHEN if (client_id, api_key) == ("kitchen", "key") else None

    def buffer_audit(self, line: AuditEntry) -> None:
        """Drop the audit record."""

    def flush_audit(self) -> None:
        """Do nothing."""


def stub_context() -> ServerContext:
    """Return a context with real sessions, and nothing outside this process."""
    engine, accounts = StubEngine(), cast("Accounts", StubAccounts())
    return ServerContext.create(
        ServerSettings(outbox_bytes=2**14),
        models=engine,
        library=ModelLibrary(directory=Path("/nonexistent"), configured=dict, environment={}),
        sessions=SessionManager(
            engines=engine,
            renderers=InlineTemplates(),
            config_params=Params(),
            settings=SessionSettings(max_sessions=10),
        ),
        accounts=accounts,
        quotas=AccessQuotas(accounts, clock=time.time, monotonic=time.monotonic),
        gpu=StubGpu(),
        metrics=DaemonMetrics(),
        stop=lambda: None,
    )
