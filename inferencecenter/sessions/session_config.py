"""The configuration of a session, and the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import cross_check, parse_params
from inferencecenter.sessions.history import HistoryLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import datetime

    from inferencecenter.config.settings import SessionSettings, Settings
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import Mode, OnDisconnect, OnFull, Priority
    from inferencecenter.sessions.client import EventSink, Quota
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.model_router import ModelRouter, ServedModel
    from inferencecenter.sessions.observability import ActiveTurnCount, TextQuota, TokenMeter, Tracer, TurnRecord


class ScheduledCall(Protocol):
    """A call that happens unless it is cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""


@dataclass(frozen=True, slots=True)
class SessionServices:
    """The services of the daemon that a session uses. ``clock`` is Unix seconds, ``monotonic`` monotonic seconds.

    ``call_later`` schedules a call after some seconds; ``admit`` raises while no new turn may start. ``quota_of``
    returns the limits of a client and token. A stateless session expires after ``stateless_ttl_s``. ``sink_changed`` is
    called with a session's id, its old and its new subscriber.
    """

    models: ModelRouter
    journal: Journal
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    local_time: Callable[[], datetime]
    call_later: Callable[[float, Callable[[], None]], ScheduledCall]
    admit: Callable[[], None]
    quota_of: Callable[[str, str], Quota]
    new_id: Callable[[str], str]
    new_seed: Callable[[], int]
    meter: TokenMeter
    eta_ms: Callable[[ServedModel, int], float | None]
    turn_ended: Callable[[TurnRecord], None]
    tracer: Tracer
    active_turns: ActiveTurnCount
    text_quota: TextQuota
    sink_changed: Callable[[str, EventSink | None, EventSink | None], None]
    settings: SessionSettings
    stateless_ttl_s: float
    max_transcript_chars: int

    def history_limits(self, *, note_chars: int = 0) -> HistoryLimits:
        """Return the limits of a session's history; notes of ``note_chars`` characters are subtracted."""
        return HistoryLimits(self.max_transcript_chars - note_chars, self.settings.max_messages)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The properties of a session that are fixed when it is opened; only ``metadata`` may be replaced.

    ``model`` and ``n_ctx`` are those at the start; without a ``chosen_model`` the session follows the default model
    when it changes. ``params`` are effective for that first model, all levels merged. ``chosen`` names the parameters
    set by the client. Without ``store`` nothing of the session is written to disk. A ``stateless`` session caches the
    KV of a client that sends the whole conversation with each request, and is not one of the client's sessions
    otherwise.
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
        """Return a warning for each of the ``chosen`` parameters without effect.

        Raises:
            InferenceCenterError: ``invalid_request`` for two parameters that exclude each other.
        """
        warnings = cross_check(params, given=chosen)
        if self.on_full == "stop" and "n_keep" in chosen:
            warnings = (*warnings, "n_keep has no effect: on_full is stop.")
        return warnings


def parse_config_params(settings: Settings) -> Params:
    """Validate all parameters of the configuration and return those that apply to all models.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    try:
        for name, entry in settings.models.items():
            parse_params(entry.params, path=f"models.{name}.params")
        return parse_params(settings.params)
    except InferenceCenterError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, error.message, hint=error.hint, field=error.field
        ) from error
