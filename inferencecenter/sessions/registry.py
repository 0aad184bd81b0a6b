"""All sessions of all clients: who may open one, who owns which, and when they end."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.params import Params, merge, parse_params
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.facts import SessionFacts, Surroundings
from inferencecenter.sessions.history import History
from inferencecenter.sessions.ledger import Ledger
from inferencecenter.sessions.models import Renderers, loaded_model, recommended_params
from inferencecenter.sessions.session import Session
from inferencecenter.sessions.states import SessionState
from inferencecenter.sessions.submission import turn_params
from inferencecenter.sessions.totals import TokenMeter, Totals, TurnObserver, TurnRecord, WaitEstimate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferencecenter.ipc.port import EnginePort
    from inferencecenter.protocol import requests
    from inferencecenter.sessions.client import Client, EventSink

DEFAULT_MAX_TRANSCRIPT_CHARS: Final = 16 * 1024 * 1024

_turn_log = structlog.get_logger("turn")


class Timer(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from happening."""


def _call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


def _local_time() -> datetime:
    return datetime.now().astimezone()


class Sessions:
    """Every open session. All methods are called on the event loop and none blocks.

    A session of another client and one that does not exist give the same answer.

    Args:
        engine: What answers.
        config_params: The configuration's level of parameters.
        max_sessions: Open sessions of all clients together.
        default_ttl_s: Idle seconds after which a session expires that sets no own.
        max_transcript_chars: Characters of history that one session may hold.
        shared_prompts: System prompts whose KV sessions of different clients may share.
        observer: Hears of each turn that ended.
        clock: Unix seconds.
        monotonic: Seconds that only rise.
        local_time: Time of day that chat templates may ask for.
        random_bytes: Unpredictable bytes, for names and seeds.
        call_later: Arranges for a call after some seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; everything from the clock on has a default
        self,
        *,
        engine: EnginePort,
        config_params: Params,
        # Limits
        max_sessions: int,
        default_ttl_s: float | None,
        max_transcript_chars: int = DEFAULT_MAX_TRANSCRIPT_CHARS,
        shared_prompts: Collection[str] = (),
        # Surroundings
        observer: TurnObserver | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        local_time: Callable[[], datetime] = _local_time,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        self._engine = engine
        self._config_params = config_params
        self._max_sessions = max_sessions
        self._default_ttl_s = default_ttl_s
        self._observer = observer
        self._random_bytes = random_bytes
        self._call_later = call_later
        self._meter = TokenMeter()
        self._waits = WaitEstimate()
        self._last: TurnRecord | None = None
        self._around = Surroundings(
            engine=engine,
            clock=clock,
            monotonic=monotonic,
            local_time=local_time,
            new_id=self._new_id,
            new_seed=lambda: int.from_bytes(random_bytes(4), "little") >> 1,
            meter=self._meter,
            eta_ms=self._eta_ms,
            turn_ended=self._turn_ended,
            max_transcript_chars=max_transcript_chars,
            shared_prompts=frozenset(shared_prompts),
        )
        self._sessions: dict[str, Session] = {}
        self._of_client: defaultdict[str, dict[str, Session]] = defaultdict(dict)
        self._expiries: dict[str, Timer] = {}
        self._renderers = Renderers()

    def create(self, client: Client, request: requests.CreateSession, sink: EventSink) -> events.SessionCreated:
        """Open a session.

        Raises:
            InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
                ``forbidden``, ``session_limit`` or ``context_full``.
        """
        model = loaded_model(self._engine.status, request.model)
        overlay = parse_params(request.params or {})
        priority = client.allow_priority(request.priority, otherwise=client.priority)
        renderer = self._renderers.of(model, request.mode)
        facts = SessionFacts(
            session_id=self._new_id("s_"),
            epoch=self._new_id("e_"),
            client_id=client.client_id,
            mode=request.mode,
            model=model.name,
            n_ctx=model.n_ctx,
            params=merge(Params(), recommended_params(model), self._config_params, overlay),
            chosen=frozenset(overlay.model_fields_set),
            priority=priority,
            on_full=request.on_full or ("shift" if request.mode == "chat" else "stop"),
            on_disconnect=request.on_disconnect,
            store=request.store,
            ttl_s=request.ttl_s if request.ttl_s is not None else self._default_ttl_s,
            metadata=dict(request.metadata or {}),
            created_at=self._around.clock(),
        )
        history = History()
        if request.system is not None:
            system = ChatMessage(role="system", content=request.system)
            history = history.appended((system,), max_chars=self._around.max_transcript_chars)
        session = Session(facts, renderer=renderer, around=self._around, sink=sink, history=history, ledger=Ledger())
        return self._open(client, session)

    def fork(self, client: Client, request: requests.ForkSession, sink: EventSink) -> events.SessionCreated:
        """Open a session that begins as another one does.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_busy``, ``turn_not_found`` or ``session_limit``.
        """
        parent = self._own(client, request.session_id)
        facts = replace(
            parent.facts,
            session_id=self._new_id("s_"),
            epoch=self._new_id("e_"),
            created_at=self._around.clock(),
        )
        session = parent.fork(facts, turn=request.turn, sink=sink)
        return self._open(client, session, parent=parent)

    def rewind(self, client: Client, request: requests.RewindSession) -> events.SessionRewound:
        """Take a session back to the end of a turn.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_busy`` or ``turn_not_found``.
        """
        return self._own(client, request.session_id).rewind(request.turn)

    def infer(self, client: Client, request: requests.Infer, sink: EventSink) -> None:
        """Start a turn; its events, ``queued`` first, go to ``sink``.

        Raises:
            InferenceCenterError: ``session_not_found``, ``invalid_request``, ``forbidden``, and see ``Session.infer``.
        """
        session = self._own(client, request.session_id)
        overlay = turn_params(request)
        priority = client.allow_priority(request.priority, otherwise=session.facts.priority)
        session.infer(request, overlay=overlay, priority=priority, sink=sink)

    def abort(self, client: Client, request: requests.Abort) -> None:
        """Ask for the end of a session's running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``session_not_found``, ``nothing_to_abort`` or ``turn_not_found``.
        """
        self._own(client, request.session_id).abort(request)

    def append(self, client: Client, request: requests.Append) -> events.Appended:
        """Add to a session's history without generating.

        Raises:
            InferenceCenterError: ``session_not_found``, ``session_busy`` or ``context_full``.
        """
        return self._own(client, request.session_id).append(request)

    def get(self, client: Client, request: requests.GetSession) -> events.Session:
        """Return everything about a session.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        return self._own(client, request.session_id).standing.describe()

    def list(self, client: Client, request: requests.ListSessions) -> events.Sessions:
        """Return a page of the client's own sessions, oldest first.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` names none of them.
        """
        own = list(self._of_client.get(client.client_id, {}).values())
        start = own.index(self._own(client, request.after)) + 1 if request.after is not None else 0
        page = own[start : start + request.limit]
        more = len(own) > start + len(page)
        return events.Sessions(
            sessions=tuple(session.standing.summary() for session in page),
            next=page[-1].facts.session_id if more else None,
        )

    def close(self, client: Client, request: requests.CloseSession) -> events.SessionClosed:
        """End a session; a running turn ends as aborted.

        Raises:
            InferenceCenterError: ``session_not_found``.
        """
        session = self._own(client, request.session_id)
        self._forget(session)
        return session.close()

    def detach(self, sink: EventSink) -> None:
        """Take note that a socket is gone: its sessions close, or go on without it if they were opened so."""
        for session in [session for session in self._sessions.values() if session.sink is sink]:
            session.detach()
            if session.facts.on_disconnect == "close":
                self._forget(session)
                session.close()

    def totals(self) -> Totals:
        """Return readings over all sessions."""
        return Totals(
            active_generations=sum(session.state is SessionState.BUSY for session in self._sessions.values()),
            total_sessions=len(self._sessions),
            last_tps=self._last.tps if self._last else 0.0,
            last_ttft_ms=self._last.ttft_ms if self._last else 0.0,
            total_tokens_generated=self._meter.total,
            tokens_per_s=self._meter.per_s(now=self._around.monotonic()),
        )

    def _own(self, client: Client, session_id: str) -> Session:
        session = self._of_client.get(client.client_id, {}).get(session_id)
        if session is None:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        return session

    def _open(self, client: Client, session: Session, *, parent: Session | None = None) -> events.SessionCreated:
        facts = session.facts
        created = events.SessionCreated(
            session_id=facts.session_id,
            parent=parent.facts.session_id if parent else None,
            epoch=facts.epoch,
            model=facts.model,
            n_ctx=facts.n_ctx,
            params=facts.params.model_dump(mode="json"),
            warnings=facts.warnings(facts.params, chosen=facts.chosen),
        )
        self._make_room(client, keeping=parent)
        self._sessions[facts.session_id] = session
        self._of_client[facts.client_id][facts.session_id] = session
        if facts.ttl_s is not None:
            self._arm(session, facts.ttl_s)
        return created

    def _make_room(self, client: Client, *, keeping: Session | None) -> None:
        own = self._of_client.get(client.client_id, {})
        if len(own) < client.max_sessions and len(self._sessions) < self._max_sessions:
            return
        for session in own.values():
            if session.sink is None and session.state is SessionState.IDLE and session is not keeping:
                self._forget(session)
                session.close()
                return
        everybodys = len(own) < client.max_sessions
        raise InferenceCenterError(
            ErrorCode.SESSION_LIMIT,
            f"all {self._max_sessions} sessions of this daemon are in use"
            if everybodys
            else f"this client has {len(own)} sessions of {client.max_sessions}",
            hint="Try again later." if everybodys else "Close one of them: list_sessions shows them.",
        )

    def _forget(self, session: Session) -> None:
        facts = session.facts
        del self._sessions[facts.session_id]
        own = self._of_client[facts.client_id]
        del own[facts.session_id]
        if not own:
            del self._of_client[facts.client_id]
        if (expiry := self._expiries.pop(facts.session_id, None)) is not None:
            expiry.cancel()

    def _arm(self, session: Session, delay_s: float) -> None:
        self._expiries[session.facts.session_id] = self._call_later(delay_s, lambda: self._maybe_expire(session))

    def _maybe_expire(self, session: Session) -> None:
        """Expire the session, or look again when it may be time: use does not move the timer, this does."""
        assert session.facts.ttl_s is not None, "only sessions with a time to live are armed"
        left_s = session.facts.ttl_s - session.idle_s
        if left_s > 0:
            self._arm(session, left_s)
        else:
            self._forget(session)
            session.expire()

    def _turn_ended(self, record: TurnRecord) -> None:
        self._last = record
        self._waits.observe(record)
        _turn_log.info(
            "turn",
            client=record.client_id,
            session=record.session_id,
            turn=record.turn_id,
            queue_ms=record.queue_ms,
            ttft_ms=record.ttft_ms,
            tokens=record.tokens,
            tps=record.tps,
            cached=record.cached_tokens,
            preempted=record.preempted,
            finish=record.finish,
        )
        if self._observer is not None:
            self._observer.turn_ended(record)

    def _eta_ms(self, position: int) -> float | None:
        model = self._engine.status.model
        return self._waits.eta_ms(position, slots=model.slots) if model is not None else None

    def _new_id(self, prefix: str) -> str:
        return prefix + base64.urlsafe_b64encode(self._random_bytes(16)).rstrip(b"=").decode()
