"""All sessions of all clients: created, restored, found, used and closed."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import structlog

from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import merge, parse_params
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.client import check_model, limited, unlimited
from inferencecenter.sessions.event_log import SessionNotifier
from inferencecenter.sessions.history import History, TurnLog
from inferencecenter.sessions.journal import EpochChanged, NullJournal, Resuming, SessionDeleted, check_writable
from inferencecenter.sessions.model_router import ModelRouter
from inferencecenter.sessions.observability import ActiveTurnCount, NullTracer, TextQuota, TurnMetrics
from inferencecenter.sessions.prefix_match import find_longest_prefix
from inferencecenter.sessions.session import LiveSession
from inferencecenter.sessions.session_config import SessionConfig, SessionServices
from inferencecenter.sessions.states import SessionState
from inferencecenter.sessions.table import SessionTable, ttl_warnings
from inferencecenter.sessions.turn_spec import turn_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from inferencecenter.ipc.port import ModelsPort
    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import CreateSession
    from inferencecenter.protocol.values import Mode, OnFull
    from inferencecenter.sessions.client import Allowance, EventSink, Principal, ReplaySink
    from inferencecenter.sessions.event_log import SessionEventHandler
    from inferencecenter.sessions.history import HistoryLimits
    from inferencecenter.sessions.journal import Journal, StorageFault, StoredSession
    from inferencecenter.sessions.model_router import ServedModel
    from inferencecenter.sessions.observability import Totals, Tracer, TurnObserver
    from inferencecenter.sessions.prefix_match import PrefixMatch
    from inferencecenter.sessions.prompt.renderer import PromptRenderers
    from inferencecenter.sessions.session import TurnSnapshot
    from inferencecenter.sessions.session_config import ScheduledCall


DEFAULT_MAX_TRANSCRIPT_CHARS: Final = 16 * 1024 * 1024
DEFAULT_MAX_MESSAGES: Final = 10_000
DEFAULT_MAX_CLIENT_MIB: Final = 256
DEFAULT_REPLAY_KIB: Final = 256
DEFAULT_DETACHED_TURN_S: Final = 900.0
DEFAULT_STATELESS_TTL_S: Final = 900.0
_NO_RETENTION: Final[Mapping[str, float | None]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


def _call_later(delay_s: float, callback: Callable[[], None]) -> ScheduledCall:
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _local_time() -> datetime:
    return datetime.now().astimezone()


def _admit() -> None:
    pass


class SessionManager:
    """Every open session. All methods are called on the event loop and none blocks.

    A session of another client and one that does not exist give the same answer.

    Args:
        engines: What answers.
        renderers: What renders conversations with the models' chat templates.
        config_params: The configuration's level of parameters.
        max_sessions: Open sessions of all clients together.
        default_ttl_s: Idle seconds after which a session expires that sets no own.
        stateless_ttl_s: The same of a stateless one.
        retention_days: Days after its last use at which a session is deleted, whatever it sets; ``None`` for never.
        evicts_stored: Whether a client's oldest stored session is closed where it may have no more; if not, another is
            refused.
        replay_kib: KiB of events that a session keeps for those who come back.
        detached_turn_s: Seconds that a turn keeps its events while nobody listens.
        max_transcript_chars: Characters of history that one session may hold.
        max_messages: Messages and calls of tools that it may hold.
        max_client_mib: Mi characters that all sessions of a client may hold, but for stateless ones.
        shared_prompts: System prompts whose KV sessions of different clients may share.
        journal: Where sessions are written down; none if they end with the daemon.
        observer: Hears of each turn that ended.
        tracer: Traces turns; none to trace nothing.
        admit: Raises while no turn may begin; those that have begun go on.
        allowance_of: What there may be of turns and tokens, by client and token.
        clock: Unix seconds.
        monotonic: Seconds that only rise.
        local_time: Time of day that chat templates may ask for.
        random_bytes: Unpredictable bytes, for names and seeds.
        call_later: Arranges for a call after some seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; everything from the clock on has a default
        self,
        *,
        engines: ModelsPort,
        renderers: PromptRenderers,
        config_params: Params,
        # Limits
        max_sessions: int,
        default_ttl_s: float | None,
        stateless_ttl_s: float = DEFAULT_STATELESS_TTL_S,
        retention_days: float | None = None,
        evicts_stored: bool = False,
        replay_kib: int = DEFAULT_REPLAY_KIB,
        detached_turn_s: float = DEFAULT_DETACHED_TURN_S,
        max_transcript_chars: int = DEFAULT_MAX_TRANSCRIPT_CHARS,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_client_mib: int = DEFAULT_MAX_CLIENT_MIB,
        shared_prompts: Collection[str] = (),
        # Surroundings
        journal: Journal | None = None,
        observer: TurnObserver | None = None,
        tracer: Tracer | None = None,
        admit: Callable[[], None] = _admit,
        allowance_of: Callable[[str, str], Allowance] = unlimited,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        local_time: Callable[[], datetime] = _local_time,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        call_later: Callable[[float, Callable[[], None]], ScheduledCall] = _call_later,
    ) -> None:
        self.durable = journal is not None
        self._journal: Journal = journal or NullJournal()
        self._random_bytes = random_bytes
        self._metrics = TurnMetrics(observer)
        self._busy = ActiveTurnCount()
        self._held = TextQuota(max_client_mib * 1024 * 1024)
        self._notifier = SessionNotifier()
        self._resuming = Resuming()
        self._table = SessionTable(
            max_sessions=max_sessions,
            default_ttl_s=default_ttl_s,
            retention_days=retention_days,
            evicts_stored=evicts_stored,
            monotonic=monotonic,
            call_later=call_later,
            expire=self._expire,
        )
        self._services = SessionServices(
            models=ModelRouter(engines, config_params=config_params, renderers=renderers),
            journal=self._journal,
            clock=clock,
            monotonic=monotonic,
            local_time=local_time,
            call_later=call_later,
            admit=admit,
            allowance_of=allowance_of,
            new_id=self._new_id,
            new_seed=lambda: int.from_bytes(random_bytes(4), "little") >> 1,
            meter=self._metrics.meter,
            eta_ms=self._eta_ms,
            turn_ended=self._metrics.turn_ended,
            tracer=tracer or NullTracer(),
            active_turns=self._busy,
            text_quota=self._held,
            sink_changed=self._table.on_sink_changed,
            max_transcript_chars=max_transcript_chars,
            max_messages=max_messages,
            shared_prompts=frozenset(shared_prompts),
            replay_bytes=replay_kib * 1024,
            detached_turn_s=detached_turn_s,
            stateless_ttl_s=stateless_ttl_s,
        )

    @property
    def fault(self) -> StorageFault | None:
        """Why sessions cannot be written down at the moment; ``None`` when all is well."""
        return self._journal.fault

    @property
    def n_set_aside(self) -> int:
        """Records that could not be written because of a defect, and were left out."""
        return self._journal.n_set_aside

    def journal_of(self, request: Request, client_id: str) -> Journal:
        """Return what holds back the answer to a client's ``request``, if it tells of what may not be safe yet.

        Asked before the request is done, and of any session: it tells nothing.
        """
        match request:
            case requests.CreateSession(store=store):
                return self._journal.of_client(client_id) if store else NullJournal()
            case requests.ListSessions():
                return self._journal.of_client(client_id)
            case requests.GetSession() | requests.ForkSession() | requests.SetMetadata() | requests.CloseSession():
                session = self._table.get(request.session_id)
                return session.journal if session else NullJournal()
            case _:
                return NullJournal()

    def restore(
        self, kept: Iterable[StoredSession], *, clean: bool, retention_days: Mapping[str, float | None] = _NO_RETENTION
    ) -> None:
        """Take over what an earlier daemon wrote down, and have its unfinished turns continued.

        Args:
            kept: The sessions.
            clean: Whether all that was told was written down. If not, clients' positions mean nothing any more.
            retention_days: What clients have chosen for themselves.
        """
        self._table.set_retention(retention_days)
        sessions = restored(kept, clean=clean, services=self._services)
        for session in sessions:
            self._table.add(session)
        if sessions:
            _log.info("sessions_restored", sessions=len(sessions), pending_turn=self.totals().active_generations)

    def subscribe(self, reader: SessionEventHandler) -> None:
        """Call ``reader`` whenever a session has other metadata, or ends: its client may be elsewhere, too."""
        self._notifier.subscribe(reader)

    def live_sessions(self) -> tuple[str, ...]:
        """Return the names of all sessions."""
        return self._table.names

    def purge(self, kind: Literal["session", "client"], name: str) -> int:
        """End a session, or all sessions of a client, as if it had closed them; return how many there were."""
        if kind == "client":
            doomed = self._table.all_of(name)
        else:
            doomed = [session for session in (self._table.get(name),) if session is not None]
        for session in doomed:
            self._close(session)
        return len(doomed)

    def create(
        self, client: Principal, request: requests.CreateSession, sink: EventSink, *, stateless: bool = False
    ) -> events.SessionCreated:
        """Open a session.

        A ``stateless`` one is for whoever sends the whole conversation with each question: it is never written down, is
        not listed, and does not count among the client's sessions. It is closed when it was not used for a while, or
        when there is no room for another.

        Raises:
            InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
                ``forbidden``, ``internal``, ``session_limit``, ``quota_exceeded``, ``storage_unavailable`` or
                ``context_full``.
        """
        services = self._services
        if request.store and not stateless:
            check_writable(self._journal.of_client(client.client_id))
        config = new_session_config(client, request, durable=self.durable, stateless=stateless, services=services)
        history = first_history(request, room=services.room())
        return self._open(
            client, LiveSession(config, services=services, history=history, turn_log=TurnLog(), sink=sink)
        )

    def fork(self, client: Principal, request: requests.ForkSession, sink: EventSink) -> events.SessionCreated:
        """Open a session that begins as another one does.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_limit``, ``quota_exceeded``, and see
                ``Session.fork``.
        """
        parent = self._table.get_owned(client, request.session_id)
        config = fork_session_config(client, parent.config, self._services)
        session = parent.fork(config, turn=request.turn, sink=sink)
        return self._open(client, session, parent=parent)

    def rewind(self, client: Principal, request: requests.RewindSession, sink: EventSink) -> None:
        """Take a session back to the end of a turn; ``sink`` hears of it.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.rewind``.
        """
        self._table.get_owned(client, request.session_id).rewind(request, sink)

    def set_metadata(
        self, client: Principal, request: requests.SetMetadata, sink: EventSink | None = None
    ) -> events.MetadataSet:
        """Give a session other metadata; ``sink`` is who asks.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.describe``.
        """
        session = self._table.get_owned(client, request.session_id)
        told = session.set_metadata(request.metadata)
        self._notifier.notify_metadata(session, by=sink)
        return told

    def resume(self, client: Principal, request: requests.ResumeSession, sink: ReplaySink) -> None:
        """Send a session's events to ``sink`` from now on, those that it has missed first.

        Raises:
            InferenceCenterError: ``session_not_found``; ``storage_unavailable`` or ``overloaded`` while too many of the
                client wait for the store.
        """
        session = self._table.get_owned(client, request.session_id)
        self._resuming.check(session.journal, client.client_id)
        session.resume(request, sink)
        self._resuming.begun(session.journal, client.client_id)

    def find(  # noqa: PLR0913 - keyword-only
        self,
        client: Principal,
        messages: Sequence[ChatMessage],
        *,
        stateless: bool,
        model: str | None,
        mode: Mode,
        on_full: OnFull,
    ) -> PrefixMatch | None:
        """Return the client's own idle session that goes on to ``messages``, that which says most of them.

        Of several the one that was used last. What an assistant thought does not matter: it is not sent back.

        Args:
            client: Whose session.
            messages: The whole conversation; one of them at least is left to be said.
            stateless: Whether a stateless one is looked for, or another.
            model: What its client chose for it.
            mode: As it was created.
            on_full: What happens when its context is full.
        """
        own = self._table.stateless_of(client.client_id) if stateless else self._table.of(client.client_id)
        kind = model, mode, on_full
        idle = [
            session
            for session in own
            if session.state is SessionState.IDLE
            and (session.config.chosen_model, session.config.mode, session.config.on_full) == kind
        ]
        idle.sort(key=lambda session: session.idle_s)
        return find_longest_prefix(((session.config.session_id, session.history) for session in idle), messages)

    def infer(self, client: Principal, request: requests.Infer, sink: EventSink, *, note: str = "") -> None:
        """Start a turn; its events, ``queued`` first, go to ``sink``.

        ``note`` is kept with it for ``turn_of``, and told to nobody else.

        Raises:
            InferenceCenterError: ``session_not_found``, ``invalid_request``, ``forbidden``, and see ``Session.infer``.
        """
        session = self._table.get_owned(client, request.session_id)
        session.infer(request, turn_options(request, client, session.config, note=note), sink)
        self._table.touch(session)

    def abort(self, client: Principal, request: requests.Abort) -> None:
        """Ask for the end of a session's running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``session_not_found``, ``nothing_to_abort`` or ``turn_not_found``.
        """
        self._table.get_owned(client, request.session_id).abort(request)

    def append(self, client: Principal, request: requests.Append, sink: EventSink) -> None:
        """Add to a session's history without generating; ``sink`` hears of it.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.append``.
        """
        self._table.get_owned(client, request.session_id).append(request, sink)

    def get(self, client: Principal, request: requests.GetSession) -> events.Session:
        """Return everything about a session.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        session = self._table.get_owned(client, request.session_id)
        return session.snapshot.describe(self._services.models.current_params(session.config))

    def turn_of(self, client: Principal, session_id: str, turn_id: str) -> TurnSnapshot:
        """Return what is known of a turn, whether it has ended or not.

        Raises:
            InferenceCenterError: ``session_not_found`` or ``turn_not_found``.
        """
        return self._table.get_owned(client, session_id).turn_snapshot(turn_id)

    def list(self, client: Principal, request: requests.ListSessions) -> events.Sessions:
        """Return a page of the client's own sessions, oldest first.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` names none of them.
        """
        page, more = self._table.page(client.client_id, after=request.after, limit=request.limit)
        return events.Sessions(
            sessions=tuple(session.snapshot.summary() for session in page),
            next=page[-1].config.session_id if more else None,
        )

    def close(
        self, client: Principal, request: requests.CloseSession, sink: EventSink | None = None
    ) -> events.SessionClosed:
        """End a session; a running turn ends as aborted. ``sink`` is who asks.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return self._close(self._table.get_owned(client, request.session_id), by=sink)

    def detach(self, sink: EventSink) -> None:
        """Take note that a socket is gone: its sessions close, or go on without it if they were opened so."""
        for session in self._table.attached_to(sink):
            session.detach()
            if session.config.on_disconnect == "close":
                self._close(session)

    def count_of(self, client_id: str) -> tuple[int, int]:
        """Return how many sessions a client has open, and how many of them answer."""
        return self._table.n_of(client_id), self._busy.of(client_id)

    def size_of(self, client: Principal, session_id: str) -> int:
        """Return how many characters a client's session holds; 0 if it has no such session."""
        session = self._table.get(session_id)
        return session.n_chars if session is not None and session.config.client_id == client.client_id else 0

    def totals(self) -> Totals:
        """Return readings over all sessions."""
        return self._metrics.totals(sessions=len(self._table), active=self._busy.total, now=self._services.monotonic())

    def _open(
        self, client: Principal, session: LiveSession, *, parent: LiveSession | None = None
    ) -> events.SessionCreated:
        config = session.config
        created = events.SessionCreated(
            session_id=config.session_id,
            parent=parent.config.session_id if parent else None,
            epoch=config.epoch,
            model=config.model,
            n_ctx=config.n_ctx,
            params=config.params.model_dump(mode="json"),
            warnings=(*config.warnings(config.params, chosen=config.chosen), *ttl_warnings(config.ttl_s)),
        )
        if not config.stateless:
            self._held.check(session.n_chars, client_id=client.client_id)
        if (closing := self._table.select_victim(client, stateless=config.stateless, excluded=parent)) is not None:
            self._close(closing)
        self._table.set_retention({client.client_id: client.retention_days})
        session.open(parent=created.parent)
        self._table.add(session)
        if config.metadata:
            self._notifier.notify_metadata(session, by=session.sink)
        return created

    def _close(self, session: LiveSession, *, by: EventSink | None = None) -> events.SessionClosed:
        sink = session.sink
        self._table.remove(session)
        closed = session.close()
        if sink is not None and sink is not by:
            session.journal.release(partial(sink.send, closed))
        self._notifier.notify_closed(session, but=(sink, by))
        return closed

    def _expire(self, session: LiveSession) -> None:
        session.expire()
        self._notifier.notify_closed(session, but=(session.sink,))

    def _eta_ms(self, serving: ServedModel, position: int) -> float | None:
        engine = serving.engine.status
        if engine.model is None or engine.state is not EngineState.READY:
            return None  # how long an engine takes to start is not known
        return self._metrics.eta_ms(serving.name, position, slots=engine.model.slots)

    def _new_id(self, prefix: str) -> str:
        return prefix + base64.urlsafe_b64encode(self._random_bytes(16)).rstrip(b"=").decode()


def new_session_config(
    client: Principal, request: CreateSession, *, durable: bool, stateless: bool, services: SessionServices
) -> SessionConfig:
    """Return what holds for a session that is opened now.

    It may be written to a disk only if it is ``durable``, and never if it is ``stateless``.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
            ``forbidden``, or ``internal`` when the model's template does not compile.
    """
    serving = services.models.resolve(request.model)
    overlay = parse_params(request.params or {})
    limits = services.allowance_of(client.client_id, client.token_id).limits
    check_model(serving.name, limits)
    limited(overlay, limits, session=overlay, chosen=())
    priority = client.allow_priority(request.priority, otherwise=client.priority)
    # Whoever may not use a model has nobody load it.
    model = serving.model(client.client_id)
    serving.renderer(request.mode)
    return SessionConfig(
        session_id=services.new_id("s_"),
        epoch=services.new_id("e_"),
        client_id=client.client_id,
        mode=request.mode,
        chosen_model=request.model,
        model=serving.name,
        n_ctx=model.n_ctx,
        params=merge(services.models.base_params(serving), overlay),
        chosen=frozenset(overlay.model_fields_set),
        priority=priority,
        on_full=request.on_full or ("shift" if request.mode == "chat" else "stop"),
        on_disconnect=request.on_disconnect or "detach",
        store=request.store and durable and not stateless,
        ttl_s=services.stateless_ttl_s if stateless and request.ttl_s is None else request.ttl_s,
        metadata=dict(request.metadata or {}),
        created_at=services.clock(),
        stateless=stateless,
    )


def fork_session_config(client: Principal, parent: SessionConfig, services: SessionServices) -> SessionConfig:
    """Return what holds for a session that begins now as ``parent`` did.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found`` or ``forbidden``.
    """
    serving = services.models.resolve(parent.chosen_model)
    check_model(serving.name, services.allowance_of(client.client_id, client.token_id).limits)
    n_ctx = serving.model(client.client_id).n_ctx
    return replace(
        parent,
        session_id=services.new_id("s_"),
        epoch=services.new_id("e_"),
        model=serving.name,
        n_ctx=n_ctx,
        params=services.models.params(parent, serving.name),
        created_at=services.clock(),
    )


def first_history(request: CreateSession, *, room: HistoryLimits) -> History:
    """Return what a new session holds: its system prompt, if it has one.

    Raises:
        InferenceCenterError: ``context_full``.
    """
    if request.system is None:
        return History()
    return History().appended((ChatMessage(role="system", content=request.system),), room=room)


def restored(kept: Iterable[StoredSession], *, clean: bool, services: SessionServices) -> list[LiveSession]:
    """Return the sessions that an earlier daemon wrote down, the oldest first, and have their turns continued.

    Those that were to end with their socket have ended with that daemon. One that cannot be built is logged and left
    out: it stays in the file as it is.

    Args:
        kept: What was written down.
        clean: Whether it was all that was told; if not, every session's events have another history from now on.
        services: The rest of the daemon.
    """
    going_on: list[tuple[float, LiveSession]] = []
    sessions: list[LiveSession] = []
    for each in sorted(kept, key=lambda each: each.config.created_at):
        config, journal = each.config, services.journal.of_client(each.config.client_id)
        if config.on_disconnect == "close":
            journal.write(SessionDeleted(session_id=config.session_id, n_chars=each.history.extent.n_chars), flush=True)
            continue
        if not clean:
            config = replace(config, epoch=services.new_id("e_"))
        try:
            sessions.append(LiveSession.restored(each, config, services=services))
        except Exception:  # noqa: BLE001 - the border between the sessions: one that cannot be built stays in the file
            _log.exception("session_set_aside", session=config.session_id)
            continue
        if not clean:
            journal.write(EpochChanged(session_id=config.session_id, epoch=config.epoch), flush=True)
        if each.pending_turn is not None:
            going_on.append((each.pending_turn.spec.submitted_at, sessions[-1]))
    for _, session in sorted(going_on, key=lambda pair: pair[0]):
        session.recover()
    return sessions
