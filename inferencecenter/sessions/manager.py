"""All sessions of all clients: creation, restore, lookup, use and closing.

The manager runs on the event loop; every method changes memory at once and never waits for the disk. Durability comes
from ordering: a session is recorded in its client's journal when it opens, each change is recorded before its event is
delivered, and replies that depend on a record that is not committed yet are held back by ``journal_for``. At start
``restore`` builds a session from each stored one and resubmits pending turns in the order of their submission. If the
last shutdown lost published events, each session gets a new epoch, and clients with a position of the old one receive
the state instead of a replay. Sessions with ``on_disconnect`` ``close`` end with the daemon, since their socket did.
Invariant: after a restart a client finds every stored session, with every turn that was acknowledged.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import dropwhile, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import merge, parse_params
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.archive import SessionArchive
from inferencecenter.sessions.context import (
    AccountLimits,
    SessionConfig,
    SessionServices,
    bound_max_tokens,
    check_model,
    unlimited_quota,
)
from inferencecenter.sessions.event_log import SessionNotifier
from inferencecenter.sessions.history import History, TurnLog
from inferencecenter.sessions.images.library import ImageLibrary, ImageOwner
from inferencecenter.sessions.journal import EpochChanged, NullJournal, ResumeLimiter, SessionDeleted, check_writable
from inferencecenter.sessions.mcp_calls import pending_calls
from inferencecenter.sessions.model_router import ModelRouter
from inferencecenter.sessions.observability import ActiveTurnCount, NullTracer, TextQuota, TurnMetrics
from inferencecenter.sessions.output_parsing.output_spec import SchemaCache
from inferencecenter.sessions.prefix_match import begins_like, find_longest_prefix
from inferencecenter.sessions.presets import PresetLibrary
from inferencecenter.sessions.prompt_lookup import render_query
from inferencecenter.sessions.session import LiveSession
from inferencecenter.sessions.shares import SessionShares
from inferencecenter.sessions.states import SessionState
from inferencecenter.sessions.table import MAX_BATCH, SessionTable, ttl_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inferencecenter.config.settings import SessionSettings
    from inferencecenter.ipc.port import EngineStatus, ModelsPort
    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import CreateSession
    from inferencecenter.protocol.values import Mode, OnFull, ToolCall
    from inferencecenter.sessions.context import EventSink, Principal, Quota, ReplaySink, ScheduledCall
    from inferencecenter.sessions.event_log import SessionEventHandler
    from inferencecenter.sessions.history import HistoryLimits
    from inferencecenter.sessions.journal import Journal, StorageFault, StoredSession, UsageRecorded
    from inferencecenter.sessions.mcp_calls import ToolCallRunner
    from inferencecenter.sessions.observability import Totals, Tracer, TurnObserver
    from inferencecenter.sessions.prefix_match import PrefixMatch
    from inferencecenter.sessions.prompt.renderer import PromptRenderers
    from inferencecenter.sessions.prompt_lookup import PromptQuery, PromptText
    from inferencecenter.sessions.session import SessionSnapshot, TurnSnapshot
    from inferencecenter.sessions.shares import SessionReader


DEFAULT_MAX_TRANSCRIPT_CHARS: Final = 16 * 1024 * 1024
DEFAULT_STATELESS_TTL_S: Final = 900.0
MAX_NOTE_CHARS: Final = 256 * 1024
"""Maximum length of the requester's private note on a turn."""
_NO_LIMITS: Final[Mapping[str, AccountLimits]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


def _call_later(delay_s: float, callback: Callable[[], None]) -> ScheduledCall:
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _local_time() -> datetime:
    return datetime.now().astimezone()


class SessionManager:
    """All open sessions. All methods are called on the event loop and none blocks.

    A session of another client and one that does not exist give the same answer.

    Args:
        engines: The models and their engines.
        renderers: Render conversations with the models' chat templates.
        config_params: The parameters of the configuration level.
        settings: Limits, expiry and buffers of sessions.
        stateless_ttl_s: Idle seconds after which a stateless session without its own ``ttl_s`` expires.
        max_transcript_chars: Maximum of characters in a session's history.
        journal: Where sessions are recorded; ``None`` if they end with the daemon.
        archive: Where archived sessions and shares are read; ``None`` if there are none.
        observer: Notified of each turn that ended.
        tracer: Traces turns; ``None`` for no traces.
        images: The images of messages; ``None`` holds them in memory.
        admit: Raises while no new turn may start; running turns continue.
        quota_of: Returns the rate limits and quotas by client and token.
        clock: Unix seconds.
        monotonic: Monotonic seconds.
        local_time: Local time for chat templates.
        random_bytes: Random bytes for ids and seeds.
        call_later: Schedules a call after some seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; everything from the clock on has a default
        self,
        *,
        engines: ModelsPort,
        renderers: PromptRenderers,
        config_params: Params,
        settings: SessionSettings,
        stateless_ttl_s: float = DEFAULT_STATELESS_TTL_S,
        max_transcript_chars: int = DEFAULT_MAX_TRANSCRIPT_CHARS,
        journal: Journal | None = None,
        archive: SessionReader | None = None,
        observer: TurnObserver | None = None,
        tracer: Tracer | None = None,
        images: ImageLibrary | None = None,
        admit: Callable[[], None] = lambda: None,
        quota_of: Callable[[str, str], Quota] = unlimited_quota,
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
        self._active_turns = ActiveTurnCount()
        self._text_quota = TextQuota(settings.max_client_mib * 1024 * 1024)
        self._notifier = SessionNotifier()
        self._resume_limiter = ResumeLimiter()
        self._table = SessionTable(
            settings,
            monotonic=monotonic,
            call_later=call_later,
            expire=self._expire,
            archives=archive is not None,
        )
        self.images = images or ImageLibrary(None, max_bytes=settings.images_mib * 1024 * 1024, clock=clock)
        self._services = SessionServices(
            models=ModelRouter(engines, config_params=config_params, renderers=renderers),
            journal=self._journal,
            clock=clock,
            monotonic=monotonic,
            local_time=local_time,
            call_later=call_later,
            admit=admit,
            quota_of=quota_of,
            new_id=self._new_id,
            new_seed=lambda: int.from_bytes(random_bytes(4), "little") >> 1,
            metrics=self._metrics,
            tracer=tracer or NullTracer(),
            active_turns=self._active_turns,
            text_quota=self._text_quota,
            make_text_room=self._make_text_room,
            sink_changed=self._table.on_sink_changed,
            settings=settings,
            stateless_ttl_s=stateless_ttl_s,
            max_transcript_chars=max_transcript_chars,
            schemas=SchemaCache(),
            images=self.images,
        )
        self._accounts: frozenset[str] = frozenset()
        self.archive = SessionArchive(
            archive,
            journal=self._journal,
            services=self._services,
            table=self._table,
            notifier=self._notifier,
            make_room=self._make_room,
        )
        self.presets = PresetLibrary(self._journal, self._notifier, stored=self.durable)
        self.shares = SessionShares(
            archive, journal=self._journal, services=self._services, table=self._table, archive=self.archive
        )

    @property
    def fault(self) -> StorageFault | None:
        """Why sessions cannot be stored at the moment; ``None`` if they can."""
        return self._journal.fault

    @property
    def n_skipped(self) -> int:
        """Records that were skipped because an internal error prevented writing them."""
        return self._journal.n_skipped

    def admit(self) -> None:
        """Refuse new work while memory is short.

        Raises:
            InferenceCenterError: ``overloaded``.
        """
        self._services.admit()

    def record_usage(self, usage: UsageRecorded) -> None:
        """Record the usage of a request without a session; while the store cannot write, it is only counted."""
        journal = self._journal.of_client(usage.client_id)
        if journal.fault is None:
            journal.write(usage, flush=False)

    def journal_for(self, request: Request, client_id: str) -> Journal:
        """Return the journal that has to release the reply to a client's ``request``.

        Called before the request is handled and for any session id; it reveals nothing about the session.
        """
        match request:
            case requests.CreateSession(store=store):
                return self._journal.of_client(client_id) if store else NullJournal()
            case requests.ListSessions() | requests.ListPresets() | requests.SavePreset() | requests.DeletePreset():
                return self._journal.of_client(client_id)
            case requests.CreateShare() | requests.ListShares() | requests.RevokeShare():
                return self._journal.of_client(client_id)
            case (
                requests.GetSession()
                | requests.ForkSession()
                | requests.SetMetadata()
                | requests.SetModel()
                | requests.CloseSession()
            ):
                session = self._table.get(request.session_id)
                return session.journal if session else NullJournal()
            case _:
                return NullJournal()

    def restore(
        self,
        stored: Iterable[StoredSession],
        *,
        clean: bool,
        limits: Mapping[str, AccountLimits] = _NO_LIMITS,
    ) -> None:
        """Restore the sessions of an earlier daemon, and resubmit their pending turns.

        Args:
            stored: The stored sessions.
            clean: Whether all published events were stored. If not, the positions of clients are invalid.
            limits: The limits of the accounts.
        """
        self.set_account_limits(limits)
        sessions = restore_sessions(stored, clean=clean, services=self._services)
        for session in sessions:
            self._table.add(session)
        self.archive.open()
        if sessions or self.archive.n_sessions:
            _log.info(
                "sessions_restored",
                sessions=len(sessions),
                pending_turn=self.totals().active_generations,
                archived=self.archive.n_sessions,
            )

    def set_account_limits(self, limits: Mapping[str, AccountLimits]) -> None:
        """Set the limits of the sessions of all accounts, by client id; deleted ones get the daemon's.

        Clients of an external service are no accounts here, and keep the limits that it gave them.
        """
        for client_id in self._accounts - limits.keys():
            self._set_limits(client_id, retention_days=None, archive_mib=None)
        self._accounts = frozenset(limits)
        for client_id, each in limits.items():
            self._set_limits(client_id, retention_days=each.retention_days, archive_mib=each.archive_mib)

    def _set_limits(self, client_id: str, *, retention_days: float | None, archive_mib: int | None) -> None:
        self._table.set_retention(client_id, retention_days)
        self.archive.set_limit(client_id, archive_mib)

    def engine_changed(self, name: str, status: EngineStatus) -> None:
        """Prepare for turns of a model when its engine is ready."""
        self._services.models.prepare_template(name, status)

    def subscribe(self, handler: SessionEventHandler) -> None:
        """Call ``handler`` when a session's metadata changes or a session ends, for other sockets of its client."""
        self._notifier.subscribe(handler)

    def session_ids(self) -> tuple[str, ...]:
        """Return the live sessions."""
        return self._table.session_ids

    def kv_owners(self) -> tuple[str, ...]:
        """Return the sessions whose KV is kept: the live ones and the archived ones used last."""
        return (*self._table.session_ids, *self.archive.kv_owners)

    def live_sessions(self, client_id: str | None, *, after: str | None, limit: int) -> tuple[list[LiveSession], bool]:
        """Return up to ``limit`` live sessions of a client, or of all, after ``after``, and whether there are more.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` is not live.
        """
        if after is not None and self._table.get(after) is None:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, field="after", hint="Read the list anew.")
        all_of = iter(self._table) if client_id is None else iter(self._table.all_of(client_id))
        if after is not None:
            all_of = dropwhile(lambda each: each.config.session_id != after, all_of)
            next(all_of, None)
        found = list(islice(all_of, limit + 1))
        return found[:limit], len(found) > limit

    def purge(self, kind: Literal["session", "client"], name: str) -> int:
        """End a live session, or up to ``MAX_BATCH`` sessions of a client, as if the client had closed them.

        Returns:
            Their number; call it in the next iteration of the event loop again until it is 0.
        """
        if kind == "client":
            sessions = self._table.all_of(name, at_most=MAX_BATCH)
            self.presets.forget(name)
        else:
            sessions = [session for session in (self._table.get(name),) if session is not None]
        for session in sessions:
            self._close(session)
        return len(sessions)

    def owner_of(self, session_id: str) -> str | None:
        """Return the client of a live session."""
        session = self._table.get(session_id)
        return None if session is None else session.config.client_id

    def create(
        self, client: Principal, request: requests.CreateSession, sink: EventSink, *, stateless: bool = False
    ) -> events.SessionCreated:
        """Open a session.

        A ``stateless`` session serves clients that send the whole conversation with each request: it is never stored,
        not listed, and does not count as one of the client's sessions. It is closed when idle or to make room for
        another.

        Raises:
            InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
                ``forbidden``, ``internal``, ``session_limit``, ``quota_exceeded``, ``storage_unavailable`` or
                ``context_full``.
        """
        services = self._services
        if request.store and not stateless:
            check_writable(self._journal.of_client(client.client_id))
        config = new_session_config(client, request, durable=self.durable, stateless=stateless, services=services)
        history = initial_history(request, limits=services.history_limits())
        return self._open(
            client, LiveSession(config, services=services, history=history, turn_log=TurnLog(), sink=sink)
        )

    def fork(self, client: Principal, request: requests.ForkSession, sink: EventSink) -> events.SessionCreated:
        """Open a session as a copy of another.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_limit``, ``quota_exceeded``, and see
                ``LiveSession.fork``.
        """
        parent = self._table.get_owned(client, request.session_id)
        config = fork_session_config(client, parent.config, self._services)
        session = parent.fork(config, turn=request.turn, sink=sink)
        return self._open(client, session, parent=parent)

    def rewind(self, client: Principal, request: requests.RewindSession, sink: EventSink) -> None:
        """Rewind a session to the end of a turn, and reply to ``sink``.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.rewind``.
        """
        self._table.get_owned(client, request.session_id).rewind(request, sink)

    def set_metadata(
        self, client: Principal, request: requests.SetMetadata, sink: EventSink | None = None
    ) -> events.MetadataSet:
        """Replace a session's metadata; ``sink`` is the requester.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.set_metadata``.
        """
        session = self._table.get_owned(client, request.session_id)
        reply = session.set_metadata(request.metadata)
        self._notifier.notify_metadata(session, by=sink)
        return reply

    def set_model(
        self, client: Principal, request: requests.SetModel, sink: EventSink | None = None
    ) -> events.ModelSet:
        """Change a session's model; ``sink`` is the requester.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.set_model``.
        """
        session = self._table.get_owned(client, request.session_id)
        limits = self._services.quota_of(client.client_id, client.token_id).limits
        reply = session.set_model(request.model, limits)
        self._notifier.notify_model(session, reply, by=sink)
        return reply

    def resume(self, client: Principal, request: requests.ResumeSession, sink: ReplaySink) -> None:
        """Make ``sink`` the subscriber of a session and replay the events it has missed.

        Raises:
            InferenceCenterError: ``session_not_found``; ``storage_unavailable`` or ``overloaded`` while too many
                resumes of the client wait for the store.
        """
        session = self._table.get_owned(client, request.session_id)
        self._resume_limiter.check(session.journal, client.client_id)
        session.resume(request, sink)
        self._resume_limiter.add(session.journal, client.client_id)

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
        """Return the client's idle session whose history is the longest prefix of ``messages``.

        Among equals the one used last is returned. Reasoning is ignored, since clients do not send it back.

        Args:
            client: The owner of the session.
            messages: The whole conversation; at least one message must be new.
            stateless: Whether to search the stateless sessions or the others.
            model: The model that the client chose, or ``None``.
            mode: The mode of the session.
            on_full: The session's policy for a full context.
        """
        if len(messages) == 1:
            return None
        own = self._table.stateless_of(client.client_id) if stateless else self._table.of_client(client.client_id)
        kind = model, mode, on_full
        idle = [
            session
            for session in own
            if session.state is SessionState.IDLE
            and not session.runs_mcp_calls
            and begins_like(session.history, messages)
            and (session.config.chosen_model, session.config.mode, session.config.on_full) == kind
        ]
        idle.sort(key=lambda session: session.idle_s)
        return find_longest_prefix(((session.config.session_id, session.history) for session in idle), messages)

    def tagged(self, client: Principal, name: str) -> dict[str, str]:
        """Return the entry ``name`` of the metadata of the client's own sessions that have it, by session id."""
        return {
            session.config.session_id: session.config.metadata[name]
            for session in self._table.of_client(client.client_id)
            if name in session.config.metadata
        }

    def render_prompt(self, client: Principal, query: PromptQuery) -> asyncio.Future[PromptText]:
        """Request the prompt that a turn with this conversation would have, without a session; see ``render_query``."""
        return render_query(client, query, self._services)

    def infer(self, client: Principal, request: requests.Infer, sink: EventSink, *, note: str = "") -> None:
        """Start a turn; its events, ``queued`` first, go to ``sink``.

        ``note`` is private text kept with the turn; only ``get_turn`` returns it.

        Raises:
            InferenceCenterError: ``session_not_found``, ``invalid_request``, and see ``LiveSession.infer``.
        """
        session = self._table.get_owned(client, request.session_id)
        if len(note) > MAX_NOTE_CHARS:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"the note of the turn has {len(note)} characters; {MAX_NOTE_CHARS} are allowed",
            )
        session.infer(request, client, sink, note=note)
        self._table.touch(session)

    def image_owner(self, client: Principal, session_id: str) -> ImageOwner:
        """Return the owner of images for a session.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        config = self._table.get_owned(client, session_id).config
        return ImageOwner(client.client_id, session_id, stored=config.store)

    def default_params(self, model: str | None) -> Params:
        """Return the default parameters of a model's sessions.

        Raises:
            InferenceCenterError: ``model_not_found``, and see ``ServedModel.loaded``.
        """
        return self._services.models.base_params(self._services.models.resolve(model))

    def abort(self, client: Principal, request: requests.Abort) -> None:
        """Request the end of a session's running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``session_not_found``, ``nothing_to_abort`` or ``turn_not_found``.
        """
        self._table.get_owned(client, request.session_id).abort(request)

    def append(self, client: Principal, request: requests.Append, sink: EventSink) -> None:
        """Add messages to a session's history without generating, and reply to ``sink``.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.append``.
        """
        self._table.get_owned(client, request.session_id).append(request, sink)

    def call_mcp_tool(
        self, client: Principal, request: requests.CallMcpTool, sink: EventSink, run: ToolCallRunner
    ) -> None:
        """Run a pending tool call of a session; its events go to ``sink``.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.call_mcp_tool``.
        """
        try:
            self._table.get_owned(client, request.session_id).call_mcp_tool(request, sink, run)
        except BaseException:
            run.release()
            raise

    def pending_call(self, client: Principal, session_id: str, call_id: str) -> ToolCall | None:
        """Return a tool call of a session's last answer that has no result yet.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return pending_calls(self._table.get_owned(client, session_id).history.messages).get(call_id)

    def get(self, client: Principal, request: requests.GetSession) -> events.Session:
        """Return the full description of a session.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        session = self._table.get_owned(client, request.session_id)
        return session.snapshot.describe(self._services.models.current_params(session.config))

    def hide_messages(self, client: Principal, session_id: str, n_messages: int) -> None:
        """Leave the first messages of a session out of the model's context, but for the system prompt.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``LiveSession.hide_messages``.
        """
        self._table.get_owned(client, session_id).hide_messages(n_messages)

    def snapshot(self, client: Principal, session_id: str) -> SessionSnapshot:
        """Return a session as it is now, without a copy of its messages: the cost does not depend on its length.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return self._table.get_owned(client, session_id).snapshot

    def get_turn(self, client: Principal, session_id: str, turn_id: str) -> TurnSnapshot:
        """Return a turn, running or ended.

        Raises:
            InferenceCenterError: ``session_not_found`` or ``turn_not_found``.
        """
        return self._table.get_owned(client, session_id).turn_snapshot(turn_id)

    def list(self, client: Principal, request: requests.ListSessions) -> events.Sessions:
        """Return a page of the client's own live sessions, oldest first; ``archive.list`` has the others too.

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
        """Close a session; a running turn ends as aborted. ``sink`` is the requester.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return self._close(self._table.get_owned(client, request.session_id), by=sink)

    def detach(self, sink: EventSink) -> None:
        """Handle a closed socket: detach its sessions, or close those with ``on_disconnect`` ``close``."""
        for session in self._table.attached_to(sink):
            session.detach()
            if session.config.on_disconnect == "close":
                self._close(session)
        self.archive.detach(sink)

    def session_counts(self, client_id: str) -> tuple[int, int]:
        """Return the number of a client's open sessions, and how many of them run a turn."""
        return self._table.count_of(client_id), self._active_turns.of(client_id)

    def holds_any(self, client_id: str) -> bool:
        """Return whether a client has sessions, live or archived."""
        return bool(self._table.all_of(client_id, at_most=1) or self.archive.size_of(client_id).n_sessions)

    def runs_turns(self, *, besides: str = "") -> bool:
        """Return whether turns run, other than those of the sessions of the client ``besides``."""
        return self._active_turns.total > self._active_turns.of(besides)

    def session_chars(self, client: Principal, session_id: str) -> int:
        """Return the characters held by a client's session; 0 if the client has no such session."""
        session = self._table.get(session_id)
        return session.n_chars if session is not None and session.config.client_id == client.client_id else 0

    def totals(self) -> Totals:
        return self._metrics.totals(
            sessions=len(self._table),
            archived=self.archive.n_sessions,
            active=self._active_turns.total,
            now=self._services.monotonic(),
        )

    def _open(
        self, client: Principal, session: LiveSession, *, parent: LiveSession | None = None
    ) -> events.SessionCreated:
        config = session.config
        self._set_limits(client.client_id, retention_days=client.retention_days, archive_mib=client.archive_mib)
        nearly = self.archive.check_new(client.client_id) if config.store else ()
        created = events.SessionCreated(
            session_id=config.session_id,
            parent=parent.config.session_id if parent else None,
            epoch=config.epoch,
            model=config.model,
            n_ctx=config.n_ctx,
            params=config.params.model_dump(mode="json"),
            warnings=(*config.warnings(config.params, chosen=config.chosen), *ttl_warnings(config.ttl_s), *nearly),
        )
        n_chars = 0 if config.stateless else session.n_chars
        self._make_room(client, n_chars, stateless=config.stateless, excluded=parent)
        session.open(parent=created.parent)
        self._table.add(session)
        if config.metadata:
            self._notifier.notify_metadata(session, by=session.sink)
        return created

    def _make_room(
        self, client: Principal, n_chars: int, *, stateless: bool = False, excluded: LiveSession | None = None
    ) -> None:
        """Archive, or close, what has to give way to another session with so many characters.

        Raises:
            InferenceCenterError: ``session_limit`` or ``quota_exceeded``.
        """
        table = self._table
        self._archive_idle(client.client_id, n_chars, excluded=excluded)
        while (victim := table.select_victim(client, stateless=stateless, excluded=excluded)) is not None:
            if not (table.archives and victim.is_archivable):
                self._close(victim)
                break
            self._archive_session(victim)

    def _make_text_room(self, session_id: str, n_chars: int) -> None:
        """Archive idle sessions that leave no room for so many more characters of another one of their client.

        Raises:
            InferenceCenterError: ``quota_exceeded``.
        """
        session = self._table.get(session_id)
        assert session is not None, "it is open"
        self._archive_idle(session.config.client_id, n_chars, excluded=session)

    def _archive_idle(self, client_id: str, n_chars: int, *, excluded: LiveSession | None) -> None:
        """Archive the client's idle sessions until so many more characters fit into memory.

        Raises:
            InferenceCenterError: ``quota_exceeded``.
        """
        while not self._text_quota.fits(n_chars, client_id=client_id) and (
            spare := self._table.least_used(client_id, excluded=excluded)
        ):
            self._archive_session(spare)
        self._text_quota.check(n_chars, client_id=client_id)

    def _archive_session(self, session: LiveSession) -> None:
        sink = session.sink
        self._table.remove(session)
        self.archive.add(session.config.client_id, session.archive(), sink)

    def _close(self, session: LiveSession, *, by: EventSink | None = None) -> events.SessionClosed:
        sink = session.sink
        self._table.remove(session)
        closed = session.close()
        if sink is not None and sink is not by:
            session.journal.release(partial(sink.send, closed))
        self._notifier.notify_closed(session, exclude=(sink, by))
        return closed

    def _expire(self, session: LiveSession) -> None:
        session.expire()
        self._notifier.notify_closed(session, exclude=(session.sink,))

    def _new_id(self, prefix: str) -> str:
        return prefix + base64.urlsafe_b64encode(self._random_bytes(16)).rstrip(b"=").decode()


def new_session_config(
    client: Principal, request: CreateSession, *, durable: bool, stateless: bool, services: SessionServices
) -> SessionConfig:
    """Return the configuration of a new session.

    It is stored only if ``durable``, and never if ``stateless``.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
            ``forbidden``, or ``internal`` when the model's template does not compile.
    """
    serving = services.models.resolve(request.model)
    overlay = parse_params(request.params or {})
    limits = services.quota_of(client.client_id, client.token_id).limits
    check_model(serving.name, limits)
    bound_max_tokens(overlay, limits, session=overlay, chosen=())
    priority = client.allow_priority(request.priority, otherwise=client.priority)
    # Only after the access check: a client without access must not cause a load.
    loaded = serving.loaded(client.client_id)
    loaded.renderer(request.mode)
    return SessionConfig(
        session_id=services.new_id("s_"),
        epoch=services.new_id("e_"),
        client_id=client.client_id,
        mode=request.mode,
        chosen_model=request.model,
        model=serving.name,
        n_ctx=loaded.info.n_ctx,
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
    """Return the configuration of a new fork of ``parent``.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found`` or ``forbidden``.
    """
    serving = services.models.resolve(parent.chosen_model)
    check_model(serving.name, services.quota_of(client.client_id, client.token_id).limits)
    n_ctx = serving.loaded(client.client_id).info.n_ctx
    return replace(
        parent,
        session_id=services.new_id("s_"),
        epoch=services.new_id("e_"),
        model=serving.name,
        n_ctx=n_ctx,
        params=services.models.params(parent, serving.name),
        created_at=services.clock(),
        forked_from=parent.session_id,
    )


def initial_history(request: CreateSession, *, limits: HistoryLimits) -> History:
    """Return the initial history: the system prompt, if there is one.

    Raises:
        InferenceCenterError: ``context_full``.
    """
    if request.system is None:
        return History()
    return History().appended((ChatMessage(role="system", content=request.system),), limits=limits)


def restore_sessions(stored: Iterable[StoredSession], *, clean: bool, services: SessionServices) -> list[LiveSession]:
    """Return the sessions restored from the store, oldest first, and resubmit their pending turns.

    Sessions that end with their socket ended with the earlier daemon. A session that cannot be built is logged and
    skipped; it stays unchanged in the file.

    Args:
        stored: The stored sessions.
        clean: Whether all published events were stored; if not, every session gets a new epoch.
        services: The services of the daemon.
    """
    pending: list[tuple[float, LiveSession]] = []
    sessions: list[LiveSession] = []
    for each in sorted(stored, key=lambda each: each.config.created_at):
        config, journal = each.config, services.journal.of_client(each.config.client_id)
        if config.on_disconnect == "close":
            journal.write(SessionDeleted(session_id=config.session_id, n_chars=each.history.size.n_chars), flush=True)
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
            pending.append((each.pending_turn.spec.submitted_at, sessions[-1]))
    for _, session in sorted(pending, key=lambda pair: pair[0]):
        session.recover()
    return sessions
