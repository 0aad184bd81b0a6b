"""What a session works with: its owner, subscriber and quota, its configuration, and the services of the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from inferencecenter.config.limits import NO_LIMITS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import Params, cross_check, merge, parse_params
from inferencecenter.protocol.scopes import Scope
from inferencecenter.sessions.history import HistoryLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.config.settings import SessionSettings, Settings
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import Mode, OnDisconnect, OnFull, Priority
    from inferencecenter.sessions.images.library import ImageLibrary
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.model_router import ModelRouter
    from inferencecenter.sessions.observability import ActiveTurnCount, TextQuota, Tracer, TurnMetrics
    from inferencecenter.sessions.output_parsing.output_spec import SchemaCache


PRIORITY_RANK: Final[Mapping[str, int]] = MappingProxyType({"interactive": 0, "normal": 1, "batch": 2})
"""Lower ranks run first in the engine."""


class AccountLimits(NamedTuple):
    """Limits of the sessions of an account; ``None`` selects the daemon's setting."""

    max_sessions: int
    retention_days: float | None
    archive_mib: int | None


@dataclass(frozen=True, slots=True)
class Principal:
    """An account as seen by the sessions; any number of sockets may act for it.

    ``retention_days`` are the days after the last use at which its sessions are deleted, and ``archive_mib`` the Mi
    characters that it may store, ``None`` for the daemon's default. ``token_id`` is the access token of the socket,
    empty for a key.
    """

    client_id: str
    max_sessions: int
    priority: Priority
    scopes: frozenset[str]
    retention_days: float | None = None
    archive_mib: int | None = None
    token_id: str = ""

    def allow_priority(self, wanted: Priority | None, *, otherwise: Priority) -> Priority:
        """Return the priority to use.

        Args:
            wanted: The priority in the request.
            otherwise: The priority if the request has none.

        Raises:
            InferenceCenterError: ``forbidden`` for a priority above the client's own without the scope.
        """
        if wanted is None:
            return otherwise
        if PRIORITY_RANK[wanted] < PRIORITY_RANK[self.priority] and Scope.PRIORITY not in self.scopes:
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                f"priority is {wanted}, above this client's {self.priority}",
                field="priority",
                hint=f"Omit it, or use a token with the scope {Scope.PRIORITY}.",
            )
        return wanted


class EventSink(Protocol):
    """A socket as seen by a session."""

    def send(self, event: Event) -> None:
        """Queue an event for the client; never blocks, never raises."""


class ReplaySink(EventSink, Protocol):
    """A socket that can receive a replay."""

    def replay(self, missed: Sequence[Event]) -> None:
        """Send events, possibly many and large, at the speed of the client; never blocks, never raises."""


class Quota(Protocol):
    """Rate limits and quota of one access token, or of a client with a key. Called on the event loop."""

    @property
    def limits(self) -> AccessLimits:
        """The current limits."""

    def check_turn(self) -> None:
        """Refuse a turn that exceeds the limits.

        Raises:
            InferenceCenterError: ``rate_limited`` or ``quota_exceeded``, with the delay before a retry.
        """

    def begin_turn(self) -> None:
        """Count a turn as running until ``end_turn``."""

    def resume_turn(self, n_tokens: int) -> None:
        """Count a turn restored from an earlier daemon, where it generated ``n_tokens``."""

    def use(self, n_tokens: int) -> bool:
        """Count used tokens; return ``False`` once the daily quota is used up."""

    def end_turn(self) -> None:
        """Count a turn as ended."""


class UnlimitedQuota:
    """The quota without limits."""

    limits = NO_LIMITS

    def check_turn(self) -> None:
        """Do nothing."""

    def begin_turn(self) -> None:
        """Do nothing."""

    def resume_turn(self, n_tokens: int) -> None:
        """Do nothing."""

    def use(self, n_tokens: int) -> bool:
        """Return ``True``."""
        return True

    def end_turn(self) -> None:
        """Do nothing."""


UNLIMITED: Final = UnlimitedQuota()


def unlimited_quota(_client_id: str, _token_id: str) -> Quota:
    """Return the quota of any client where no limits are set."""
    return UNLIMITED


def check_model(name: str, limits: AccessLimits) -> None:
    """Refuse a model that the limits do not allow.

    Raises:
        InferenceCenterError: ``forbidden``.
    """
    if not limits.allows_model(name):
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN,
            f"model is {name}, which this token may not use",
            field="model",
            hint=f"One of: {', '.join(limits.models or ())}.",
        )


def bound_max_tokens(own: Params, limits: AccessLimits, *, session: Params, chosen: Collection[str]) -> Params:
    """Return a turn's own parameters with ``max_tokens`` bounded by the limits.

    Args:
        own: The parameters set by the turn.
        limits: The limits of the requester.
        session: The parameters of the session.
        chosen: The session parameters that the client set itself.

    Raises:
        InferenceCenterError: ``invalid_request`` if the client itself asked for more tokens than allowed.
    """
    most = limits.max_tokens
    if most is None:
        return own
    is_own = "max_tokens" in own.model_fields_set
    wanted = own.max_tokens if is_own else session.max_tokens
    if wanted is not None and wanted <= most:
        return own
    if wanted is not None and (is_own or "max_tokens" in chosen):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"max_tokens is {wanted}; answers for this token have at most {most}",
            field="params.max_tokens",
            hint="Request fewer tokens, or omit the field.",
        )
    return merge(own, Params(max_tokens=most))


class ScheduledCall(Protocol):
    """A call that happens unless it is cancelled."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionServices:
    """The services of the daemon that a session uses. ``clock`` is Unix seconds, ``monotonic`` monotonic seconds.

    ``call_later`` schedules a call after some seconds; ``admit`` raises while no new turn may start. ``quota_of``
    returns the limits of a client and token. A stateless session expires after ``stateless_ttl_s``. ``sink_changed`` is
    called with a session's id, its old and its new subscriber. ``make_text_room`` makes room for more characters of the
    session with an id, or raises ``quota_exceeded``.
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
    metrics: TurnMetrics
    tracer: Tracer
    active_turns: ActiveTurnCount
    text_quota: TextQuota
    make_text_room: Callable[[str, int], None]
    sink_changed: Callable[[str, EventSink | None, EventSink | None], None]
    settings: SessionSettings
    stateless_ttl_s: float
    max_transcript_chars: int
    schemas: SchemaCache
    images: ImageLibrary

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
    otherwise. ``forked_from`` is the session whose KV a fork shares; it is not stored.
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
    forked_from: str | None = None

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
