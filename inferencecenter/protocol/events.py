"""Every op the daemon sends."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inferencecenter.protocol.base import DAGGER, Event, SessionEvent, TurnEvent
from inferencecenter.protocol.values import (
    ChatMessage,
    ClientLimits,
    EngineReadings,
    FinishReason,
    GpuReadings,
    InferenceReadings,
    ServerLimits,
    SessionStateName,
    SessionSummary,
    StatusType,
    TokenLogprobs,
    TranscriptTurn,
    TurnStats,
    Usage,
)


class Hello(Event):
    """Who answers, and whether it is ready."""

    dagger: ClassVar[bool] = True
    op: Literal["hello"] = "hello"
    status: Annotated[Literal["ready", "loading", "degraded"], DAGGER]
    message: Annotated[str, DAGGER] = Field(description="The same in words, with loading progress.")
    uptime_seconds: Annotated[int, DAGGER]
    requires_auth: Annotated[bool, DAGGER]
    protocol: int
    server: str
    version: str
    model: str | None
    limits: ServerLimits


class AuthSuccess(Event):
    """The socket is authenticated."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_success"] = "auth_success"
    client_id: Annotated[str, DAGGER]
    max_sessions: Annotated[int, DAGGER]
    scopes: tuple[str, ...]
    priority: str
    limits: ClientLimits


class AuthFailed(Event):
    """The credential was not accepted; the socket may try again until its deadline."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_failed"] = "auth_failed"
    reason: Annotated[str, DAGGER]
    retry_after_ms: int | None = None


class SessionCreated(Event):
    """A session is open."""

    dagger: ClassVar[bool] = True
    op: Literal["session_created"] = "session_created"
    session_id: Annotated[str, DAGGER]
    epoch: str
    model: str
    n_ctx: int = Field(description="Tokens the session's context holds.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    warnings: tuple[str, ...] = Field(description="Legal settings of which one has no effect.")


class SessionError(Event):
    """A session could not be created (first protocol; v1 sockets get `error`)."""

    dagger: ClassVar[bool] = True
    op: Literal["session_error"] = "session_error"
    error: Annotated[str, DAGGER]


class Queued(TurnEvent):
    """The acknowledgement of `infer`; again when the position changes."""

    op: Literal["queued"] = "queued"
    position: int = Field(ge=0, description="0 runs at once.")
    eta_ms: float | None = Field(default=None, description="Expected wait, where it can be told.")


class Progress(TurnEvent):
    """A long prompt is being read."""

    op: Literal["progress"] = "progress"
    done: int = Field(description="Prompt tokens read.")
    total: int = Field(description="Prompt tokens.")


class Token(TurnEvent):
    """New text of the answer; whole UTF-8, never part of a stop string."""

    dagger: ClassVar[bool] = True
    op: Literal["token"] = "token"
    content: Annotated[str, DAGGER]
    logprobs: tuple[TokenLogprobs, ...] | None = Field(default=None, description="When `n_probs` was asked for.")


class End(TurnEvent):
    """The turn is over."""

    dagger: ClassVar[bool] = True
    op: Literal["end"] = "end"
    finish_reason: FinishReason
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...]
    usage: Usage
    stats: Annotated[TurnStats, DAGGER]


class AbortStatus(Event):
    """The answer to `abort` on sockets of the first protocol."""

    dagger: ClassVar[bool] = True
    op: Literal["abort"] = "abort"
    session_id: Annotated[str, DAGGER]
    status: Annotated[Literal["aborted", "not_found"], DAGGER]


class SessionClosed(Event):
    """The session is gone."""

    dagger: ClassVar[bool] = True
    op: Literal["session_closed"] = "session_closed"
    session_id: Annotated[str, DAGGER]


class SessionExpired(SessionEvent):
    """The session was idle for longer than its `ttl_s`."""

    op: Literal["session_expired"] = "session_expired"


class Appended(SessionEvent):
    """The messages are part of the history."""

    op: Literal["appended"] = "appended"
    messages: int = Field(description="Messages the session holds now.")


class Session(Event):
    """Everything about one session."""

    op: Literal["session"] = "session"
    session_id: str
    epoch: str
    seq: int = Field(ge=0, description="Number of the last event.")
    state: SessionStateName
    model: str
    n_ctx: int
    n_tokens: int = Field(description="Tokens of history.")
    params: dict[str, Any]
    metadata: dict[str, str]
    transcript: tuple[ChatMessage, ...]
    turns: tuple[TranscriptTurn, ...]
    usage: Usage


class Sessions(Event):
    """A page of the client's own sessions."""

    op: Literal["sessions"] = "sessions"
    sessions: tuple[SessionSummary, ...]
    next: str | None = Field(default=None, description="Pass it as `after` for the next page.")


class Metrics(Event):
    """Readings of the GPU, the engine and the work."""

    dagger: ClassVar[bool] = True
    keeps_null: ClassVar[bool] = True
    op: Literal["metrics"] = "metrics"
    timestamp: Annotated[float, DAGGER] = Field(description="Unix seconds.")
    gpu: Annotated[GpuReadings, DAGGER]
    inference: Annotated[InferenceReadings, DAGGER]
    engine: EngineReadings


class MetricsSubscribed(Event):
    """Metrics frames will come."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_subscribed"] = "metrics_subscribed"
    interval_ms: int


class MetricsUnsubscribed(Event):
    """No more metrics frames will come."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_unsubscribed"] = "metrics_unsubscribed"


class Status(Event):
    """One side of the daemon, as numbers by name."""

    op: Literal["status"] = "status"
    type: StatusType
    values: dict[str, float | int | str | None]


class Pong(Event):
    """The answer to `ping`."""

    op: Literal["pong"] = "pong"


class EngineChanged(Event):
    """The engine's state changed."""

    op: Literal["engine"] = "engine"
    state: Literal["starting", "ready", "restarting", "asleep", "failed"]
    detail: str = ""


class GoingAway(Event):
    """The daemon is about to stop."""

    op: Literal["going_away"] = "going_away"
    deadline_ms: int
    resume: bool


class Error(Event):
    """Something could not be done; the connection and the session go on."""

    dagger: ClassVar[bool] = True
    op: Literal["error"] = "error"
    code: str
    message: str
    error: Annotated[str, DAGGER] = Field(description="Equal to `message`.")
    hint: str | None = None
    field: str | None = None
    session_id: Annotated[str | None, DAGGER] = None
    seq: int | None = Field(default=None, description="Set when the error is the end of a turn.")
    turn_id: str | None = None
    retryable: bool
    retry_after_ms: int | None = None


AnyEvent = (
    Hello
    | AuthSuccess
    | AuthFailed
    | SessionCreated
    | SessionError
    | Queued
    | Progress
    | Token
    | End
    | AbortStatus
    | SessionClosed
    | SessionExpired
    | Appended
    | Session
    | Sessions
    | Metrics
    | MetricsSubscribed
    | MetricsUnsubscribed
    | Status
    | Pong
    | EngineChanged
    | GoingAway
    | Error
)
