"""Every op the daemon sends."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from inferencecenter.protocol.base import DAGGER, Event, SessionEvent, TurnEvent
from inferencecenter.protocol.values import (
    ChatMessage,
    ClientLimits,
    ConnectedClient,
    EnginePlan,
    EngineReadings,
    FinishReason,
    GpuReadings,
    InferenceReadings,
    ModelSummary,
    OnFull,
    ServerLimits,
    SessionStateName,
    SessionSummary,
    StatusType,
    TokenLogprobs,
    TranscriptTurn,
    TurnStats,
    Usage,
    UsageDay,
    UsageLeft,
)
from inferencecenter.protocol.values import ToolCall as AskedTool


class Hello(Event):
    """Who answers, and whether it is ready."""

    dagger: ClassVar[bool] = True
    op: Literal["hello"] = "hello"
    status: Annotated[Literal["ready", "loading", "degraded"], DAGGER] = Field(description="Whether turns can run.")
    message: Annotated[str, DAGGER] = Field(description="The same in words, with loading progress.")
    uptime_seconds: Annotated[int, DAGGER] = Field(description="Since the daemon started.")
    requires_auth: Annotated[bool, DAGGER] = Field(description="Always true.")
    protocol: int = Field(description="The version of this protocol.")
    server: str = Field(description="`inferencecenter`.")
    version: str = Field(description="The daemon's version.")
    model: str | None = Field(default=None, description="The loaded model, once there is one.")
    limits: ServerLimits = Field(description="What is accepted from anyone.")


class AuthSuccess(Event):
    """The socket is authenticated."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_success"] = "auth_success"
    client_id: Annotated[str, DAGGER] = Field(description="The account.")
    max_sessions: Annotated[int, DAGGER] = Field(description="Sessions it may have open.")
    scopes: tuple[str, ...] = Field(description="Its rights.")
    priority: str = Field(description="Class of its turns.")
    limits: ClientLimits = Field(description="What it may have at once.")


class AuthFailed(Event):
    """The credential was not accepted; the socket may try again until its deadline."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_failed"] = "auth_failed"
    reason: Annotated[str, DAGGER] = Field(description="What is wrong, in words.")
    retry_after_ms: int | None = Field(default=None, description="Earliest useful retry.")


class SessionCreated(Event):
    """A session is open."""

    dagger: ClassVar[bool] = True
    op: Literal["session_created"] = "session_created"
    session_id: Annotated[str, DAGGER] = Field(description="Its name in all that follows.")
    parent: str | None = Field(default=None, description="The session that it is a fork of.")
    epoch: str = Field(description="Incarnation of its event history.")
    model: str = Field(description="The model that answers.")
    n_ctx: int = Field(description="Tokens the session's context holds.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    warnings: tuple[str, ...] = Field(description="Legal settings of which one has no effect.")


class SessionError(Event):
    """A session could not be created (first protocol; v1 sockets get `error`)."""

    dagger: ClassVar[bool] = True
    op: Literal["session_error"] = "session_error"
    error: Annotated[str, DAGGER] = Field(description="What is wrong, in words.")


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


class ContextShifted(TurnEvent):
    """The context was full: the oldest turns are no longer read, the transcript keeps them, and the turn goes on.

    Its `end` counts all prompts that were read for it.
    """

    op: Literal["context_shifted"] = "context_shifted"
    dropped_turns: int = Field(ge=0, description="Turns that are no longer read.")
    tokens: int = Field(ge=0, description="Tokens that these took, about.")


class Token(TurnEvent):
    """New text of the answer; whole UTF-8, never part of a stop string."""

    dagger: ClassVar[bool] = True
    op: Literal["token"] = "token"
    content: Annotated[str, DAGGER] = Field(description="Text to append.")
    logprobs: tuple[TokenLogprobs, ...] | None = Field(default=None, description="When `n_probs` was asked for.")


class Reasoning(TurnEvent):
    """New text of what the model thinks before it answers; whole UTF-8. It is no part of the answer."""

    op: Literal["reasoning"] = "reasoning"
    content: str = Field(description="Text to append.")
    logprobs: tuple[TokenLogprobs, ...] | None = Field(default=None, description="When `n_probs` was asked for.")


class ToolCall(TurnEvent):
    """The model asks for a tool: the first event of a call has its name, all append to its arguments.

    The turn then ends with `tool_calls`; the results are the `messages` of role `tool` of the next `infer`.
    """

    op: Literal["tool_call"] = "tool_call"
    index: int = Field(ge=0, description="Counts the calls of the turn.")
    call_id: str = Field(description="Names the call.")
    name: str | None = Field(default=None, description="The tool, with the first event of the call.")
    arguments: str = Field(description="Text to append to the arguments, which are JSON at the end.")
    logprobs: tuple[TokenLogprobs, ...] | None = Field(default=None, description="When `n_probs` was asked for.")


class End(TurnEvent):
    """The turn is over."""

    dagger: ClassVar[bool] = True
    op: Literal["end"] = "end"
    finish_reason: FinishReason = Field(description="Why it is over.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(description="Legal parameters of which one had no effect.")
    usage: Usage = Field(description="Tokens of the turn.")
    stats: Annotated[TurnStats, DAGGER] = Field(description="How it went.")


class AbortStatus(Event):
    """The answer to `abort` on sockets of the first protocol."""

    dagger: ClassVar[bool] = True
    op: Literal["abort"] = "abort"
    session_id: Annotated[str, DAGGER] = Field(description="The session.")
    status: Annotated[Literal["aborted", "not_found"], DAGGER] = Field(description="Whether a turn was running.")


class SessionClosed(Event):
    """The session is gone, whoever ended it; all sockets of its client hear of it.

    One that had no socket and expired is told of in this way, too.
    """

    dagger: ClassVar[bool] = True
    op: Literal["session_closed"] = "session_closed"
    session_id: Annotated[str, DAGGER] = Field(description="The session.")


class SessionExpired(SessionEvent):
    """The session was idle for longer than its `ttl_s`."""

    op: Literal["session_expired"] = "session_expired"


class SessionResumed(Event):
    """The session's events come to this socket from now on.

    With `resumed` the events after `last_seq` follow, those of neighbouring tokens as one. Without it events were lost
    for good: the transcript stands in for all up to `seq`, and `content` for what a running turn has said.
    """

    op: Literal["session_resumed"] = "session_resumed"
    session_id: str = Field(description="The session.")
    resumed: bool = Field(description="Whether the missing events follow.")
    reason: Literal["no_position", "other_epoch", "unknown_position", "too_old"] | None = Field(
        default=None, description="Why they do not."
    )
    state: SessionStateName = Field(description="Whether it is answering.")
    epoch: str = Field(description="Incarnation of its event history.")
    seq: int = Field(ge=0, description="Number of its last event.")
    turn_id: str | None = Field(default=None, description="The turn that is being answered.")
    content: str | None = Field(default=None, description="What that turn has said up to `seq`, when not resumed.")
    reasoning: str | None = Field(default=None, description="What it has thought up to `seq`, when not resumed.")
    tool_calls: tuple[AskedTool, ...] | None = Field(
        default=None,
        description="The tools that it has asked for up to `seq`, when not resumed; the arguments of the last may lack "
        "their end.",
    )
    transcript: tuple[ChatMessage, ...] | None = Field(
        default=None, description="All messages, when not resumed, those that are being answered included."
    )
    turns: tuple[TranscriptTurn, ...] | None = Field(
        default=None, description="The latest of its turns that have ended, when not resumed."
    )


class SessionDetached(Event):
    """The session's events come to this socket no more; the socket stays open for its other sessions."""

    op: Literal["session_detached"] = "session_detached"
    session_id: str = Field(description="The session.")
    reason: Literal["resumed_elsewhere"] = Field(description="Why.")


class Appended(SessionEvent):
    """The messages are part of the history."""

    op: Literal["appended"] = "appended"
    messages: int = Field(description="Messages the session holds now.")


class SessionRewound(SessionEvent):
    """What came after the turn is gone."""

    op: Literal["session_rewound"] = "session_rewound"
    turn: str = Field(description="The turn that is the last one now, or `start`.")
    messages: int = Field(description="Messages the session holds now.")


class MetadataSet(Event):
    """A session has other metadata, or was opened with some; all sockets of its client hear of it."""

    op: Literal["metadata_set"] = "metadata_set"
    session_id: str = Field(description="The session.")
    metadata: dict[str, str] = Field(description="All that it has now.")


class Session(Event):
    """Everything about one session."""

    op: Literal["session"] = "session"
    session_id: str = Field(description="The session.")
    epoch: str = Field(description="Incarnation of its event history.")
    seq: int = Field(ge=0, description="Number of the last event.")
    state: SessionStateName = Field(description="Whether it is answering.")
    model: str = Field(description="The model that answers.")
    n_ctx: int = Field(description="Tokens its context holds.")
    n_tokens: int = Field(description="Tokens of history.")
    on_full: OnFull = Field(description="What happens when the context is full.")
    dropped_messages: int = Field(description="Messages of the transcript that are no longer read.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    metadata: dict[str, str] = Field(description="What was given when it was created, or by `set_metadata` since.")
    transcript: tuple[ChatMessage, ...] = Field(description="All messages; a running turn is not part of it yet.")
    turns: tuple[TranscriptTurn, ...] = Field(description="The latest of its turns that have ended.")
    usage: Usage = Field(description="Tokens of all its turns.")


class Sessions(Event):
    """A page of the client's own sessions."""

    op: Literal["sessions"] = "sessions"
    sessions: tuple[SessionSummary, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Pass it as `after` for the next page.")


class Metrics(Event):
    """Readings of the GPU, the engine and the work."""

    dagger: ClassVar[bool] = True
    keeps_null: ClassVar[bool] = True
    op: Literal["metrics"] = "metrics"
    timestamp: Annotated[float, DAGGER] = Field(description="Unix seconds.")
    gpu: Annotated[GpuReadings, DAGGER] = Field(description="The first GPU.")
    inference: Annotated[InferenceReadings, DAGGER] = Field(description="The work.")
    engine: EngineReadings = Field(description="The engine process.")


class MetricsSubscribed(Event):
    """Metrics frames will come."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_subscribed"] = "metrics_subscribed"
    interval_ms: int = Field(description="Milliseconds between frames.")


class MetricsUnsubscribed(Event):
    """No more metrics frames will come."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_unsubscribed"] = "metrics_unsubscribed"


class Status(Event):
    """One side of the daemon, as numbers by name."""

    op: Literal["status"] = "status"
    type: StatusType = Field(description="Which side.")
    values: dict[str, float | int | str | None] = Field(description="Readings by name.")
    plan: EnginePlan | None = Field(
        default=None, description="For operators, of `model`: where its parts are, and why; absent where none was made."
    )


class UsageReport(Event):
    """What a client used; days without a turn are left out."""

    op: Literal["usage"] = "usage"
    client_id: str = Field(description="The account.")
    days: tuple[UsageDay, ...] = Field(description="By day, the latest last.")
    left: UsageLeft | None = Field(default=None, description="What may still be used, of one's own.")


class Clients(Event):
    """Which clients are connected."""

    op: Literal["clients"] = "clients"
    clients: tuple[ConnectedClient, ...] = Field(description="By their names.")


class Kicked(Event):
    """A client's sockets are closed."""

    op: Literal["kicked"] = "kicked"
    client_id: str = Field(description="The account.")
    connections: int = Field(description="Sockets that it had.")


class Draining(Event):
    """The daemon is about to stop; `going_away` follows on every socket."""

    op: Literal["draining"] = "draining"
    deadline_ms: int = Field(description="Milliseconds that running turns have to finish.")


class Pong(Event):
    """The answer to `ping`."""

    op: Literal["pong"] = "pong"


class EngineChanged(Event):
    """The engine's state changed."""

    op: Literal["engine"] = "engine"
    state: Literal["starting", "ready", "restarting", "asleep", "failed"] = Field(description="Its new state.")
    detail: str = Field(default="", description="The last failure, in words.")
    model: str | None = Field(default=None, description="The model, when it is not that of all sessions.")


class Models(Event):
    """The models there are, by name."""

    op: Literal["models"] = "models"
    models: tuple[ModelSummary, ...] = Field(description="All that this client may use.")


class Swap(Event):
    """How far `load_model` has come; `done` or `failed` is the last. A failed one leaves all as it was."""

    op: Literal["swap"] = "swap"
    model: str = Field(description="The model that is to be loaded.")
    phase: Literal["draining", "loading", "done", "failed"] = Field(
        description="`draining` waits for the turns of a model whose memory is needed."
    )
    done: float = Field(default=0.0, ge=0, le=1, description="Part of the loading that is done.")
    detail: str = Field(default="", description="Why it failed, in words.")


class ModelChanged(Event):
    """Sessions that named no model go on with another; their next turn is read anew."""

    op: Literal["model_changed"] = "model_changed"
    model: str = Field(description="The model that answers from now on.")
    n_ctx: int = Field(description="Tokens that their contexts hold.")


class ModelUnloaded(Event):
    """The model's memory is free, or will be when its turns have ended."""

    op: Literal["model_unloaded"] = "model_unloaded"
    model: str = Field(description="The model.")


class Thermal(Event):
    """The GPUs became warmer or cooler, and the daemon does less or more."""

    op: Literal["thermal"] = "thermal"
    state: Literal["cool", "warm", "hot"] = Field(description="How they are now.")
    temp: float | None = Field(default=None, description="The hottest one's temperature in °C, where it tells.")
    action: str = Field(description="What is done about it, in words.")


class StorageChanged(Event):
    """Sessions can no longer be written down, or can be again.

    While they cannot, all that would be told of stored sessions is held back, answers that are being generated too, and
    new turns of theirs are refused with `storage_unavailable`; sessions with `store` false go on.
    """

    op: Literal["storage"] = "storage"
    state: Literal["ok", "unavailable"] = Field(description="Whether they can be written down.")
    detail: str = Field(default="", description="Why they cannot, in words.")
    retry_after_ms: int | None = Field(default=None, description="Earliest useful retry of what is refused.")


class GoingAway(Event):
    """The daemon is about to stop."""

    op: Literal["going_away"] = "going_away"
    deadline_ms: int = Field(description="Milliseconds that running turns have to finish.")
    resume: bool = Field(description="Whether sessions can be resumed afterwards.")


class Error(Event):
    """Something could not be done; the connection and the session go on."""

    dagger: ClassVar[bool] = True
    op: Literal["error"] = "error"
    code: str = Field(description="A row of the error table.")
    message: str = Field(description="What is wrong, in words.")
    error: Annotated[str, DAGGER] = Field(description="Equal to `message`.")
    hint: str | None = Field(default=None, description="What to do about it.")
    field: str | None = Field(default=None, description="Path of the offending field.")
    session_id: Annotated[str | None, DAGGER] = Field(default=None, description="The session concerned.")
    seq: int | None = Field(default=None, description="Set when the error is the end of a turn.")
    turn_id: str | None = Field(default=None, description="The turn that this ends.")
    retryable: bool = Field(description="Whether the same request may succeed later.")
    retry_after_ms: int | None = Field(default=None, description="Earliest useful retry.")


AnyEvent = (
    Hello
    | AuthSuccess
    | AuthFailed
    | SessionCreated
    | SessionError
    | Queued
    | Progress
    | ContextShifted
    | Token
    | Reasoning
    | ToolCall
    | End
    | AbortStatus
    | SessionClosed
    | SessionExpired
    | SessionResumed
    | SessionDetached
    | Appended
    | SessionRewound
    | MetadataSet
    | Session
    | Sessions
    | Metrics
    | MetricsSubscribed
    | MetricsUnsubscribed
    | Status
    | UsageReport
    | Clients
    | Kicked
    | Draining
    | Pong
    | EngineChanged
    | Models
    | Swap
    | ModelChanged
    | ModelUnloaded
    | Thermal
    | StorageChanged
    | GoingAway
    | Error
)


Text: TypeAlias = Token | Reasoning | ToolCall


def text_of(event: Text) -> str:
    """Return the piece that an event brings."""
    return event.arguments if isinstance(event, ToolCall) else event.content


def goes_on(first: Text, event: Event) -> bool:
    """Tell whether an event brings more of the text of which ``first`` brings a piece.

    The event that names a tool stands by itself.
    """
    if type(event) is not type(first) or event.turn_id != first.turn_id:
        return False
    if isinstance(event, ToolCall) and isinstance(first, ToolCall):
        return event.name is None and first.name is None and event.index == first.index
    return True


def with_text(event: Text, text: str, *, seq: int, logprobs: tuple[TokenLogprobs, ...] | None) -> Text:
    """Return the event with another piece in place of its own."""
    field = "arguments" if isinstance(event, ToolCall) else "content"
    return event.model_copy(update={field: text, "seq": seq, "logprobs": logprobs})
