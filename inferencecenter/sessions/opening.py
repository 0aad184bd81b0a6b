"""Sessions at their beginning: what holds for a new one, and those that an earlier daemon left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from inferencecenter.protocol.params import merge, parse_params
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.allowance import check_model, limited
from inferencecenter.sessions.facts import SessionFacts
from inferencecenter.sessions.history import History
from inferencecenter.sessions.records import Gone, Renamed
from inferencecenter.sessions.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.protocol.requests import CreateSession
    from inferencecenter.sessions.client import Client
    from inferencecenter.sessions.facts import Surroundings
    from inferencecenter.sessions.history import Room
    from inferencecenter.sessions.records import Kept

_log = structlog.get_logger(__name__)


def new_facts(
    client: Client, request: CreateSession, *, durable: bool, stateless: bool, around: Surroundings
) -> SessionFacts:
    """Return what holds for a session that is opened now.

    It may be written to a disk only if it is ``durable``, and never if it is ``stateless``.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found``, ``invalid_request``,
            ``forbidden``, or ``internal`` when the model's template does not compile.
    """
    serving = around.engines.of(request.model)
    overlay = parse_params(request.params or {})
    limits = around.allowance_of(client.client_id, client.token_id).limits
    check_model(serving.name, limits)
    limited(overlay, limits, session=overlay, chosen=())
    priority = client.allow_priority(request.priority, otherwise=client.priority)
    # Whoever may not use a model has nobody load it.
    model = serving.model(client.client_id)
    serving.renderer(request.mode)
    return SessionFacts(
        session_id=around.new_id("s_"),
        epoch=around.new_id("e_"),
        client_id=client.client_id,
        mode=request.mode,
        chosen_model=request.model,
        model=serving.name,
        n_ctx=model.n_ctx,
        params=merge(around.engines.params_below(serving), overlay),
        chosen=frozenset(overlay.model_fields_set),
        priority=priority,
        on_full=request.on_full or ("shift" if request.mode == "chat" else "stop"),
        on_disconnect=request.on_disconnect or "detach",
        store=request.store and durable and not stateless,
        ttl_s=around.stateless_ttl_s if stateless and request.ttl_s is None else request.ttl_s,
        metadata=dict(request.metadata or {}),
        created_at=around.clock(),
        stateless=stateless,
    )


def fork_facts(client: Client, parent: SessionFacts, around: Surroundings) -> SessionFacts:
    """Return what holds for a session that begins now as ``parent`` did.

    Raises:
        InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``model_not_found`` or ``forbidden``.
    """
    serving = around.engines.of(parent.chosen_model)
    check_model(serving.name, around.allowance_of(client.client_id, client.token_id).limits)
    n_ctx = serving.model(client.client_id).n_ctx
    return replace(
        parent,
        session_id=around.new_id("s_"),
        epoch=around.new_id("e_"),
        model=serving.name,
        n_ctx=n_ctx,
        params=around.engines.params(parent, serving.name),
        created_at=around.clock(),
    )


def first_history(request: CreateSession, *, room: Room) -> History:
    """Return what a new session holds: its system prompt, if it has one.

    Raises:
        InferenceCenterError: ``context_full``.
    """
    if request.system is None:
        return History()
    return History().appended((ChatMessage(role="system", content=request.system),), room=room)


def restored(kept: Iterable[Kept], *, clean: bool, around: Surroundings) -> list[Session]:
    """Return the sessions that an earlier daemon wrote down, the oldest first, and have their turns continued.

    Those that were to end with their socket have ended with that daemon. One that cannot be built is logged and left
    out: it stays in the file as it is.

    Args:
        kept: What was written down.
        clean: Whether it was all that was told; if not, every session's events have another history from now on.
        around: The rest of the daemon.
    """
    going_on: list[tuple[float, Session]] = []
    sessions: list[Session] = []
    for each in sorted(kept, key=lambda each: each.facts.created_at):
        facts, journal = each.facts, around.journal.of_client(each.facts.client_id)
        if facts.on_disconnect == "close":
            journal.write(Gone(session_id=facts.session_id, n_chars=each.history.extent.n_chars), flush=True)
            continue
        if not clean:
            facts = replace(facts, epoch=around.new_id("e_"))
        try:
            sessions.append(Session.restored(each, facts, around=around))
        except Exception:  # noqa: BLE001 - the border between the sessions: one that cannot be built stays in the file
            _log.exception("session_set_aside", session=facts.session_id)
            continue
        if not clean:
            journal.write(Renamed(session_id=facts.session_id, epoch=facts.epoch), flush=True)
        if each.unfinished is not None:
            going_on.append((each.unfinished.order.submitted_at, sessions[-1]))
    for _, session in sorted(going_on, key=lambda pair: pair[0]):
        session.go_on()
    return sessions
