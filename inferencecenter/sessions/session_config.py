"""The configuration of a session, and the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inferencecenter.protocol.params import cross_check
from inferencecenter.sessions.history import HistoryLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import datetime

    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import Mode, OnDisconnect, OnFull, Priority
    from inferencecenter.sessions.client import Allowance, EventSink
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.model_router import ModelRouter, ServedModel
    from inferencecenter.sessions.observability import ActiveTurnCount, TextQuota, TokenMeter, Tracer, TurnRecord


class ScheduledCall(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from happening."""


@dataclass(frozen=True, slots=True)
class SessionServices:
    """What a session needs of the world. ``clock`` is Unix seconds, ``monotonic`` seconds that only rise.

    ``call_later`` arranges for a call after some seconds, ``admit`` raises while no turn may begin. ``allowance_of``
    tells by client and token what there may be of turns and tokens. Of its events a session keeps ``replay_bytes``,
    while it answers with nobody listening for ``detached_turn_s``. A stateless one is kept for ``stateless_ttl_s``.
    ``busy`` counts sessions that answer, ``held`` the text that sessions hold. ``moved`` hears of each session, by
    name, whose events go to another socket, with that of before and that of now.
    """

    models: ModelRouter
    journal: Journal
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    local_time: Callable[[], datetime]
    call_later: Callable[[float, Callable[[], None]], ScheduledCall]
    admit: Callable[[], None]
    allowance_of: Callable[[str, str], Allowance]
    new_id: Callable[[str], str]
    new_seed: Callable[[], int]
    meter: TokenMeter
    eta_ms: Callable[[ServedModel, int], float | None]
    turn_ended: Callable[[TurnRecord], None]
    tracer: Tracer
    active_turns: ActiveTurnCount
    text_quota: TextQuota
    sink_changed: Callable[[str, EventSink | None, EventSink | None], None]
    max_transcript_chars: int
    max_messages: int
    shared_prompts: frozenset[str]
    replay_bytes: int
    detached_turn_s: float
    stateless_ttl_s: float

    def room(self, *, noted_chars: int = 0) -> HistoryLimits:
        """Return what there may be of a session's history beside notes of so many characters."""
        return HistoryLimits(self.max_transcript_chars - noted_chars, self.max_messages)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What is settled about a session when it begins; of it only ``metadata`` may be replaced later.

    ``model`` and ``n_ctx`` are those of its beginning; without a ``chosen_model`` it goes with the default, also when
    that changes. ``params`` are effective with that first model: no level is left to merge below them. ``chosen`` are
    those that the client set itself. Without ``store`` nothing of the session may be written to a disk. A ``stateless``
    one is kept for whoever sends the whole conversation each time: it saves reading it again, and is none of the
    client's sessions otherwise.
    """

    session_id: str
    epoch: str
    client_id: str
    mode: Mode
    chosen_model: str | None
    model: str
    n_ctx: int
    params: Params
    chosen: frozenset[str]
    priority: Priority
    on_full: OnFull
    on_disconnect: OnDisconnect
    store: bool
    ttl_s: float | None
    metadata: dict[str, str]
    created_at: float
    stateless: bool = False

    def warnings(self, params: Params, *, chosen: Collection[str]) -> tuple[str, ...]:
        """Return a sentence for each of the ``chosen`` that has no effect.

        Raises:
            InferenceCenterError: ``invalid_request`` for two parameters that exclude each other.
        """
        warnings = cross_check(params, given=chosen)
        if self.on_full == "stop" and "n_keep" in chosen:
            warnings = (*warnings, "n_keep has no effect: on_full is stop.")
        return warnings
