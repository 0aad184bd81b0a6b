"""All sessions of all clients: who may open one, who owns which, and when they end."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import structlog

from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol import events, requests
from inferencecenter.sessions.agreement import longest
from inferencecenter.sessions.allowance import unlimited
from inferencecenter.sessions.facts import Surroundings
from inferencecenter.sessions.journal import Resuming, Unwritten, check_writable
from inferencecenter.sessions.ledger import Ledger
from inferencecenter.sessions.models import Engines
from inferencecenter.sessions.news import News
from inferencecenter.sessions.opening import first_history, fork_facts, new_facts, restored
from inferencecenter.sessions.roster import Roster, ttl_warnings
from inferencecenter.sessions.session import Session
from inferencecenter.sessions.states import SessionState
from inferencecenter.sessions.submission import terms_of
from inferencecenter.sessions.totals import BusyCount, HeldText, Tally
from inferencecenter.sessions.tracing import Untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from inferencecenter.ipc.port import ModelsPort
    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import ChatMessage, Mode, OnFull
    from inferencecenter.sessions.agreement import Found
    from inferencecenter.sessions.allowance import Allowance
    from inferencecenter.sessions.client import Client, EventSink, ReplaySink
    from inferencecenter.sessions.description import TurnFacts
    from inferencecenter.sessions.facts import Timer
    from inferencecenter.sessions.journal import Journal, StorageFault
    from inferencecenter.sessions.models import Serving
    from inferencecenter.sessions.news import Reader
    from inferencecenter.sessions.records import Kept
    from inferencecenter.sessions.rendering import PromptRenderers
    from inferencecenter.sessions.totals import Totals, TurnObserver
    from inferencecenter.sessions.tracing import Tracer

DEFAULT_MAX_TRANSCRIPT_CHARS: Final = 16 * 1024 * 1024
DEFAULT_MAX_MESSAGES: Final = 10_000
DEFAULT_MAX_CLIENT_MIB: Final = 256
DEFAULT_REPLAY_KIB: Final = 256
DEFAULT_DETACHED_TURN_S: Final = 900.0
DEFAULT_STATELESS_TTL_S: Final = 900.0
_NO_RETENTION: Final[Mapping[str, float | None]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


def _call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _local_time() -> datetime:
    return datetime.now().astimezone()


def _admit() -> None:
    pass


class Sessions:
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
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        self.durable = journal is not None
        self._journal: Journal = journal or Unwritten()
        self._random_bytes = random_bytes
        self._tally = Tally(observer)
        self._busy = BusyCount()
        self._held = HeldText(max_client_mib * 1024 * 1024)
        self._news = News()
        self._resuming = Resuming()
        self._roster = Roster(
            max_sessions=max_sessions,
            default_ttl_s=default_ttl_s,
            retention_days=retention_days,
            evicts_stored=evicts_stored,
            monotonic=monotonic,
            call_later=call_later,
            expire=self._expire,
        )
        self._around = Surroundings(
            engines=Engines(engines, config_params=config_params, renderers=renderers),
            journal=self._journal,
            clock=clock,
            monotonic=monotonic,
            local_time=local_time,
            call_later=call_later,
            admit=admit,
            allowance_of=allowance_of,
            new_id=self._new_id,
            new_seed=lambda: int.from_bytes(random_bytes(4), "little") >> 1,
            meter=self._tally.meter,
            eta_ms=self._eta_ms,
            turn_ended=self._tally.turn_ended,
            tracer=tracer or Untraced(),
            busy=self._busy,
            held=self._held,
            moved=self._roster.moved,
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
                return self._journal.of_client(client_id) if store else Unwritten()
            case requests.ListSessions():
                return self._journal.of_client(client_id)
            case requests.GetSession() | requests.ForkSession() | requests.SetMetadata() | requests.CloseSession():
                session = self._roster.get(request.session_id)
                return session.journal if session else Unwritten()
            case _:
                return Unwritten()

    def restore(
        self, kept: Iterable[Kept], *, clean: bool, retention_days: Mapping[str, float | None] = _NO_RETENTION
    ) -> None:
        """Take over what an earlier daemon wrote down, and have its unfinished turns continued.

        Args:
            kept: The sessions.
            clean: Whether all that was told was written down. If not, clients' positions mean nothing any more.
            retention_days: What clients have chosen for themselves.
        """
        self._roster.learn_retention(retention_days)
        sessions = restored(kept, clean=clean, around=self._around)
        for session in sessions:
            self._roster.add(session)
        if sessions:
            _log.info("sessions_restored", sessions=len(sessions), unfinished=self.totals().active_generations)

    def subscribe(self, reader: Reader) -> None:
        """Call ``reader`` whenever a session has other metadata, or ends: its client may be elsewhere, too."""
        self._news.subscribe(reader)

    def live_sessions(self) -> tuple[str, ...]:
        """Return the names of all sessions."""
        return self._roster.names

    def purge(self, kind: Literal["session", "client"], name: str) -> int:
        """End a session, or all sessions of a client, as if it had closed them; return how many there were."""
        if kind == "client":
            doomed = self._roster.all_of(name)
        else:
            doomed = [session for session in (self._roster.get(name),) if session is not None]
        for session in doomed:
            self._close(session)
        return len(doomed)

    def create(
        self, client: Client, request: requests.CreateSession, sink: EventSink, *, stateless: bool = False
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
        around = self._around
        if request.store and not stateless:
            check_writable(self._journal.of_client(client.client_id))
        facts = new_facts(client, request, durable=self.durable, stateless=stateless, around=around)
        history = first_history(request, room=around.room())
        return self._open(client, Session(facts, around=around, history=history, ledger=Ledger(), sink=sink))

    def fork(self, client: Client, request: requests.ForkSession, sink: EventSink) -> events.SessionCreated:
        """Open a session that begins as another one does.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_limit``, ``quota_exceeded``, and see
                ``Session.fork``.
        """
        parent = self._roster.own(client, request.session_id)
        facts = fork_facts(client, parent.facts, self._around)
        session = parent.fork(facts, turn=request.turn, sink=sink)
        return self._open(client, session, parent=parent)

    def rewind(self, client: Client, request: requests.RewindSession, sink: EventSink) -> None:
        """Take a session back to the end of a turn; ``sink`` hears of it.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.rewind``.
        """
        self._roster.own(client, request.session_id).rewind(request, sink)

    def set_metadata(
        self, client: Client, request: requests.SetMetadata, sink: EventSink | None = None
    ) -> events.MetadataSet:
        """Give a session other metadata; ``sink`` is who asks.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.describe``.
        """
        session = self._roster.own(client, request.session_id)
        told = session.describe(request.metadata)
        self._news.described(session, by=sink)
        return told

    def resume(self, client: Client, request: requests.ResumeSession, sink: ReplaySink) -> None:
        """Send a session's events to ``sink`` from now on, those that it has missed first.

        Raises:
            InferenceCenterError: ``session_not_found``; ``storage_unavailable`` or ``overloaded`` while too many of the
                client wait for the store.
        """
        session = self._roster.own(client, request.session_id)
        self._resuming.check(session.journal, client.client_id)
        session.resume(request, sink)
        self._resuming.begun(session.journal, client.client_id)

    def find(  # noqa: PLR0913 - keyword-only
        self,
        client: Client,
        messages: Sequence[ChatMessage],
        *,
        stateless: bool,
        model: str | None,
        mode: Mode,
        on_full: OnFull,
    ) -> Found | None:
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
        own = self._roster.stateless_of(client.client_id) if stateless else self._roster.of(client.client_id)
        kind = model, mode, on_full
        idle = [
            session
            for session in own
            if session.state is SessionState.IDLE
            and (session.facts.chosen_model, session.facts.mode, session.facts.on_full) == kind
        ]
        idle.sort(key=lambda session: session.idle_s)
        return longest(((session.facts.session_id, session.history) for session in idle), messages)

    def infer(self, client: Client, request: requests.Infer, sink: EventSink, *, note: str = "") -> None:
        """Start a turn; its events, ``queued`` first, go to ``sink``.

        ``note`` is kept with it for ``turn_of``, and told to nobody else.

        Raises:
            InferenceCenterError: ``session_not_found``, ``invalid_request``, ``forbidden``, and see ``Session.infer``.
        """
        session = self._roster.own(client, request.session_id)
        session.infer(request, terms_of(request, client, session.facts, note=note), sink)
        self._roster.used(session)

    def abort(self, client: Client, request: requests.Abort) -> None:
        """Ask for the end of a session's running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``session_not_found``, ``nothing_to_abort`` or ``turn_not_found``.
        """
        self._roster.own(client, request.session_id).abort(request)

    def append(self, client: Client, request: requests.Append, sink: EventSink) -> None:
        """Add to a session's history without generating; ``sink`` hears of it.

        Raises:
            InferenceCenterError: ``session_not_found``, and see ``Session.append``.
        """
        self._roster.own(client, request.session_id).append(request, sink)

    def get(self, client: Client, request: requests.GetSession) -> events.Session:
        """Return everything about a session.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        session = self._roster.own(client, request.session_id)
        return session.standing.describe(self._around.engines.params_now(session.facts))

    def turn_of(self, client: Client, session_id: str, turn_id: str) -> TurnFacts:
        """Return what is known of a turn, whether it has ended or not.

        Raises:
            InferenceCenterError: ``session_not_found`` or ``turn_not_found``.
        """
        return self._roster.own(client, session_id).turn_facts(turn_id)

    def list(self, client: Client, request: requests.ListSessions) -> events.Sessions:
        """Return a page of the client's own sessions, oldest first.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` names none of them.
        """
        page, more = self._roster.page(client.client_id, after=request.after, limit=request.limit)
        return events.Sessions(
            sessions=tuple(session.standing.summary() for session in page),
            next=page[-1].facts.session_id if more else None,
        )

    def close(
        self, client: Client, request: requests.CloseSession, sink: EventSink | None = None
    ) -> events.SessionClosed:
        """End a session; a running turn ends as aborted. ``sink`` is who asks.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return self._close(self._roster.own(client, request.session_id), by=sink)

    def detach(self, sink: EventSink) -> None:
        """Take note that a socket is gone: its sessions close, or go on without it if they were opened so."""
        for session in self._roster.attached_to(sink):
            session.detach()
            if session.facts.on_disconnect == "close":
                self._close(session)

    def count_of(self, client_id: str) -> tuple[int, int]:
        """Return how many sessions a client has open, and how many of them answer."""
        return self._roster.n_of(client_id), self._busy.of(client_id)

    def size_of(self, client: Client, session_id: str) -> int:
        """Return how many characters a client's session holds; 0 if it has no such session."""
        session = self._roster.get(session_id)
        return session.n_chars if session is not None and session.facts.client_id == client.client_id else 0

    def totals(self) -> Totals:
        """Return readings over all sessions."""
        return self._tally.totals(sessions=len(self._roster), active=self._busy.total, now=self._around.monotonic())

    def _open(self, client: Client, session: Session, *, parent: Session | None = None) -> events.SessionCreated:
        facts = session.facts
        created = events.SessionCreated(
            session_id=facts.session_id,
            parent=parent.facts.session_id if parent else None,
            epoch=facts.epoch,
            model=facts.model,
            n_ctx=facts.n_ctx,
            params=facts.params.model_dump(mode="json"),
            warnings=(*facts.warnings(facts.params, chosen=facts.chosen), *ttl_warnings(facts.ttl_s)),
        )
        if not facts.stateless:
            self._held.check(session.n_chars, client_id=client.client_id)
        if (closing := self._roster.make_room(client, stateless=facts.stateless, keeping=parent)) is not None:
            self._close(closing)
        self._roster.learn_retention({client.client_id: client.retention_days})
        session.open(parent=created.parent)
        self._roster.add(session)
        if facts.metadata:
            self._news.described(session, by=session.sink)
        return created

    def _close(self, session: Session, *, by: EventSink | None = None) -> events.SessionClosed:
        sink = session.sink
        self._roster.remove(session)
        closed = session.close()
        if sink is not None and sink is not by:
            session.journal.release(partial(sink.send, closed))
        self._news.gone(session, but=(sink, by))
        return closed

    def _expire(self, session: Session) -> None:
        session.expire()
        self._news.gone(session, but=(session.sink,))

    def _eta_ms(self, serving: Serving, position: int) -> float | None:
        engine = serving.engine.status
        if engine.model is None or engine.state is not EngineState.READY:
            return None  # how long an engine takes to start is not known
        return self._tally.eta_ms(serving.name, position, slots=engine.model.slots)

    def _new_id(self, prefix: str) -> str:
        return prefix + base64.urlsafe_b64encode(self._random_bytes(16)).rstrip(b"=").decode()
