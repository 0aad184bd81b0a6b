"""All events that the daemon sends."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field

from inferencecenter.protocol.base import DAGGER, Event, SessionEvent, TurnEvent, messages_in
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
    SessionUsage,
    StatusType,
    TokenLogprobs,
    TranscriptTurn,
    TurnStats,
    Usage,
    UsageDay,
    UsageLeft,
)
from inferencecenter.protocol.values import ToolCall as AskedTool

Logprobs: TypeAlias = Annotated[
    tuple[TokenLogprobs, ...] | None, Field(description="Present when `n_probs` was requested.")
]


class Hello(Event):
    """Identity, version and readiness of the daemon."""

    dagger: ClassVar[bool] = True
    op: Literal["hello"] = "hello"
    status: Annotated[Literal["ready", "loading", "degraded"], DAGGER] = Field(description="Whether turns can run.")
    message: Annotated[str, DAGGER] = Field(description="Readiness as text, with loading progress.")
    uptime_seconds: Annotated[int, DAGGER] = Field(description="Seconds since the daemon started.")
    requires_auth: Annotated[bool, DAGGER] = Field(description="Always true.")
    protocol: int = Field(description="Version of this protocol.")
    server: str = Field(description="`inferencecenter`.")
    version: str = Field(description="Version of the daemon.")
    model: str | None = Field(default=None, description="The loaded model; absent until one is loaded.")
    limits: ServerLimits = Field(description="Limits that apply to every client.")


class AuthSuccess(Event):
    """The socket is authenticated."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_success"] = "auth_success"
    client_id: Annotated[str, DAGGER] = Field(description="The account.")
    max_sessions: Annotated[int, DAGGER] = Field(description="Maximum number of open sessions.")
    scopes: tuple[str, ...] = Field(description="Its rights.")
    priority: str = Field(description="Priority class of its turns.")
    limits: ClientLimits = Field(description="Limits of this client.")


class AuthFailed(Event):
    """The credential was not accepted; the socket may try again until its deadline."""

    dagger: ClassVar[bool] = True
    op: Literal["auth_failed"] = "auth_failed"
    reason: Annotated[str, DAGGER] = Field(description="The reason as text.")
    retry_after_ms: int | None = Field(default=None, description="Earliest useful retry.")


class SessionCreated(Event):
    """A session is open."""

    dagger: ClassVar[bool] = True
    op: Literal["session_created"] = "session_created"
    session_id: Annotated[str, DAGGER] = Field(description="Id of the session.")
    parent: str | None = Field(default=None, description="The session from which it was forked.")
    epoch: str = Field(description="Incarnation of its event history.")
    model: str = Field(description="The model that answers.")
    n_ctx: int = Field(description="Context size of the session in tokens.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    warnings: tuple[str, ...] = Field(description="Valid settings that have no effect.")


class SessionError(Event):
    """A session could not be created (first protocol; v1 sockets get `error`)."""

    dagger: ClassVar[bool] = True
    op: Literal["session_error"] = "session_error"
    error: Annotated[str, DAGGER] = Field(description="The reason as text.")


class Queued(TurnEvent):
    """Acknowledges `infer`; sent again when the position changes."""

    op: Literal["queued"] = "queued"
    position: int = Field(ge=0, description="Position in the queue; 0 starts immediately.")
    eta_ms: float | None = Field(default=None, description="Expected wait in milliseconds, if it can be estimated.")


class Progress(TurnEvent):
    """Progress of the prefill of a long prompt."""

    op: Literal["progress"] = "progress"
    done: int = Field(description="Prompt tokens processed.")
    total: int = Field(description="Prompt tokens.")


class ContextShifted(TurnEvent):
    """The context was full: the oldest turns left the context but not the transcript, and the turn continues.

    The turn's `end` counts the tokens of every prompt that was processed for it.
    """

    op: Literal["context_shifted"] = "context_shifted"
    dropped_turns: int = Field(ge=0, description="Turns removed from the context.")
    tokens: int = Field(ge=0, description="Approximate number of their tokens.")


class Token(TurnEvent):
    """New text of the answer: complete UTF-8 characters, never part of a stop string."""

    dagger: ClassVar[bool] = True
    op: Literal["token"] = "token"
    content: Annotated[str, DAGGER] = Field(description="Text to append.")
    logprobs: Logprobs = None


class Reasoning(TurnEvent):
    """New text of the reasoning that precedes the answer: complete UTF-8 characters. It is not part of the answer."""

    op: Literal["reasoning"] = "reasoning"
    content: str = Field(description="Text to append.")
    logprobs: Logprobs = None


class ToolCall(TurnEvent):
    """The model calls a tool: the first event of a call carries its name, every event appends to its arguments.

    The turn then ends with `tool_calls`; send the results as `messages` of role `tool` in the next `infer`.
    """

    op: Literal["tool_call"] = "tool_call"
    index: int = Field(ge=0, description="Index of the call within the turn, from 0.")
    call_id: str = Field(description="Id of the call.")
    name: str | None = Field(default=None, description="Name of the tool, in the first event of the call.")
    arguments: str = Field(description="Text to append to the arguments, which are JSON once complete.")
    logprobs: Logprobs = None


class End(TurnEvent):
    """The turn has ended."""

    dagger: ClassVar[bool] = True
    op: Literal["end"] = "end"
    finish_reason: FinishReason = Field(description="Why it ended.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(description="Valid parameters that had no effect.")
    usage: Usage = Field(description="Tokens of the turn.")
    stats: Annotated[TurnStats, DAGGER] = Field(description="Timings and rates of the turn.")


class AbortStatus(Event):
    """Reply to `abort` on sockets of the first protocol."""

    dagger: ClassVar[bool] = True
    op: Literal["abort"] = "abort"
    session_id: Annotated[str, DAGGER] = Field(description="The session.")
    status: Annotated[Literal["aborted", "not_found"], DAGGER] = Field(description="Whether a turn was running.")


class SessionClosed(Event):
    """The session was closed, by any connection of its client; sent to all sockets of the client.

    Also sent when a session without a socket expires.
    """

    dagger: ClassVar[bool] = True
    op: Literal["session_closed"] = "session_closed"
    session_id: Annotated[str, DAGGER] = Field(description="The session.")


class SessionExpired(SessionEvent):
    """The session was idle for longer than its `ttl_s`."""

    op: Literal["session_expired"] = "session_expired"


class SessionResumed(Event):
    """The session's events are sent to this socket from now on.

    With `resumed` the events after `last_seq` are replayed, coalescing those of adjacent tokens. Otherwise some events
    are no longer available: the transcript replaces all events up to `seq`, and `content` the text of a running turn.
    """

    op: Literal["session_resumed"] = "session_resumed"
    session_id: str = Field(description="The session.")
    resumed: bool = Field(description="Whether the missing events are replayed.")
    reason: Literal["no_position", "other_epoch", "unknown_position", "too_old"] | None = Field(
        default=None, description="Why they are not replayed."
    )
    state: SessionStateName = Field(description="State of the session.")
    epoch: str = Field(description="Incarnation of its event history.")
    seq: int = Field(ge=0, description="Number of its last event.")
    turn_id: str | None = Field(default=None, description="Id of the running turn.")
    content: str | None = Field(default=None, description="Text of that turn up to `seq`, when not resumed.")
    reasoning: str | None = Field(default=None, description="Reasoning of that turn up to `seq`, when not resumed.")
    tool_calls: tuple[AskedTool, ...] | None = Field(
        default=None,
        description="Tool calls of that turn up to `seq`, when not resumed; the arguments of the last may be "
        "incomplete.",
    )
    transcript: tuple[ChatMessage, ...] | None = Field(
        default=None, description="All messages, including those of the running turn, when not resumed."
    )
    turns: tuple[TranscriptTurn, ...] | None = Field(
        default=None, description="The most recent ended turns, when not resumed."
    )
    n_ctx: int | None = Field(default=None, description="Context size in tokens, when not resumed.")
    n_tokens: int | None = Field(default=None, description="Tokens of the history, when not resumed.")
    dropped_messages: int | None = Field(
        default=None, description="Messages of the transcript that are no longer in the context, when not resumed."
    )


class SessionDetached(Event):
    """The session's events are no longer sent to this socket, which stays open for its other sessions."""

    op: Literal["session_detached"] = "session_detached"
    session_id: str = Field(description="The session.")
    reason: Literal["resumed_elsewhere"] = Field(description="Why.")


class Appended(SessionEvent):
    """The messages were appended to the history."""

    op: Literal["appended"] = "appended"
    messages: int = Field(description="Number of messages now in the session.")


class SessionRewound(SessionEvent):
    """Everything after the turn was discarded."""

    op: Literal["session_rewound"] = "session_rewound"
    turn: str = Field(description="The turn that is now the last one, or `start`.")
    messages: int = Field(description="Number of messages now in the session.")


class MetadataSet(Event):
    """The metadata of a session was set or replaced; sent to all sockets of its client."""

    op: Literal["metadata_set"] = "metadata_set"
    session_id: str = Field(description="The session.")
    metadata: dict[str, str] = Field(description="The complete metadata.")


class Session(Event):
    """The full record of one session."""

    op: Literal["session"] = "session"
    session_id: str = Field(description="The session.")
    epoch: str = Field(description="Incarnation of its event history.")
    seq: int = Field(ge=0, description="Sequence number of the last event.")
    state: SessionStateName = Field(description="State of the session.")
    model: str = Field(description="The model that answers.")
    n_ctx: int = Field(description="Context size in tokens.")
    n_tokens: int = Field(description="Tokens of the history.")
    on_full: OnFull = Field(description="Behaviour when the context is full.")
    dropped_messages: int = Field(description="Messages of the transcript that are no longer in the context.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    metadata: dict[str, str] = Field(description="Metadata given at creation or by the latest `set_metadata`.")
    transcript: tuple[ChatMessage, ...] = Field(description="All messages; a running turn is not part of it yet.")
    turns: tuple[TranscriptTurn, ...] = Field(description="The most recent ended turns.")
    usage: Usage = Field(description="Tokens of all its turns.")


class Sessions(Event):
    """A page of the client's own sessions."""

    op: Literal["sessions"] = "sessions"
    sessions: tuple[SessionSummary, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")
    session_usage: SessionUsage | None = Field(default=None, description="How much of its limits the client uses.")


class Metrics(Event):
    """Readings of the GPU, the engine and the load."""

    dagger: ClassVar[bool] = True
    keeps_null: ClassVar[bool] = True
    op: Literal["metrics"] = "metrics"
    timestamp: Annotated[float, DAGGER] = Field(description="Unix seconds.")
    gpu: Annotated[GpuReadings, DAGGER] = Field(description="The first GPU.")
    inference: Annotated[InferenceReadings, DAGGER] = Field(description="The work.")
    engine: EngineReadings = Field(description="The engine process.")


class MetricsSubscribed(Event):
    """Metrics frames will follow."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_subscribed"] = "metrics_subscribed"
    interval_ms: int = Field(description="Milliseconds between frames.")


class MetricsUnsubscribed(Event):
    """No more metrics frames follow."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics_unsubscribed"] = "metrics_unsubscribed"


class Status(Event):
    """Readings of one part of the daemon, by name."""

    op: Literal["status"] = "status"
    type: StatusType = Field(description="Which side.")
    values: dict[str, float | int | str | None] = Field(description="Readings by name.")
    plan: EnginePlan | None = Field(
        default=None,
        description="For operators, with scope `model`: placement of the model; absent if none was planned.",
    )


class UsageReport(Event):
    """Usage of a client by day; days without a turn are omitted."""

    op: Literal["usage"] = "usage"
    client_id: str = Field(description="The account.")
    days: tuple[UsageDay, ...] = Field(description="Usage by day, the latest last.")
    left: UsageLeft | None = Field(default=None, description="Remaining quota; only in a client's own report.")


class Clients(Event):
    """The connected clients."""

    op: Literal["clients"] = "clients"
    clients: tuple[ConnectedClient, ...] = Field(description="The clients, sorted by name.")


class Kicked(Event):
    """The sockets of a client were closed."""

    op: Literal["kicked"] = "kicked"
    client_id: str = Field(description="The account.")
    connections: int = Field(description="Number of sockets closed.")


class Draining(Event):
    """The daemon is about to stop; `going_away` follows on every socket."""

    op: Literal["draining"] = "draining"
    deadline_ms: int = Field(description="Milliseconds until running turns are cut off.")


class Pong(Event):
    """Reply to `ping`."""

    op: Literal["pong"] = "pong"


class EngineChanged(Event):
    """The engine's state changed."""

    op: Literal["engine"] = "engine"
    state: Literal["starting", "ready", "restarting", "asleep", "failed"] = Field(description="Its new state.")
    detail: str = Field(default="", description="The last failure as text.")
    model: str | None = Field(default=None, description="The model, when it is not the default model.")


class Embeddings(Event):
    """The vectors of the texts of `embed`, in their order."""

    op: Literal["embeddings"] = "embeddings"
    model: str = Field(description="The model.")
    dimensions: int = Field(description="Length of each vector.")
    vectors: tuple[str, ...] = Field(
        description="The vectors, each of length 1, as base64 of little-endian 32-bit floats."
    )
    prompt_tokens: int = Field(description="Tokens of the texts.")


class Models(Event):
    """The available models, sorted by name."""

    op: Literal["models"] = "models"
    models: tuple[ModelSummary, ...] = Field(description="All models available to this client.")


class Swap(Event):
    """Progress of `load_model`; `done` or `failed` is the last. A failed load changes nothing."""

    op: Literal["swap"] = "swap"
    model: str = Field(description="The model to load.")
    phase: Literal["draining", "loading", "done", "failed"] = Field(
        description="`draining` waits for the turns of a model whose memory is needed."
    )
    done: float = Field(default=0.0, ge=0, le=1, description="Fraction that is loaded.")
    detail: str = Field(default="", description="Why it failed, as text.")


class ModelChanged(Event):
    """The default model changed: sessions that named no model use it, and their history is prefilled again."""

    op: Literal["model_changed"] = "model_changed"
    model: str = Field(description="The model that answers from now on.")
    n_ctx: int = Field(description="Context size of these sessions in tokens.")


class ModelUnloaded(Event):
    """The model's memory is free, or will be once its turns have ended."""

    op: Literal["model_unloaded"] = "model_unloaded"
    model: str = Field(description="The model.")


class Thermal(Event):
    """The thermal state of the GPUs changed, and the daemon adapts its load."""

    op: Literal["thermal"] = "thermal"
    state: Literal["cool", "warm", "hot"] = Field(description="The thermal state.")
    temp: float | None = Field(default=None, description="Temperature of the hottest GPU in °C, if available.")
    action: str = Field(description="The daemon's reaction, as text.")


class StorageChanged(Event):
    """Sessions can no longer be written to storage, or can be again.

    While storage is unavailable, events of stored sessions are withheld, including the text of running turns, and new
    turns of such sessions are refused with `storage_unavailable`; sessions with `store` false are unaffected.
    """

    op: Literal["storage"] = "storage"
    state: Literal["ok", "unavailable"] = Field(description="Whether storage accepts writes.")
    detail: str = Field(default="", description="Why it does not, as text.")
    retry_after_ms: int | None = Field(
        default=None, description="Earliest useful retry of a refused request, in milliseconds."
    )


class GoingAway(Event):
    """The daemon is about to stop."""

    op: Literal["going_away"] = "going_away"
    deadline_ms: int = Field(description="Milliseconds until running turns are cut off.")
    resume: bool = Field(description="Whether sessions can be resumed afterwards.")


class Error(Event):
    """A request or turn failed; the connection and the session stay usable."""

    dagger: ClassVar[bool] = True
    op: Literal["error"] = "error"
    code: str = Field(description="Code from the error table.")
    message: str = Field(description="Description of the error.")
    error: Annotated[str, DAGGER] = Field(description="Equal to `message`.")
    hint: str | None = Field(default=None, description="How to resolve it.")
    field: str | None = Field(default=None, description="Path of the offending field.")
    session_id: Annotated[str | None, DAGGER] = Field(default=None, description="The session concerned.")
    seq: int | None = Field(default=None, description="Sequence number; set when the error ends a turn.")
    turn_id: str | None = Field(default=None, description="The turn that the error ends.")
    retryable: bool = Field(description="Whether the same request may succeed later.")
    retry_after_ms: int | None = Field(default=None, description="Earliest useful retry.")


AnyEvent: Any = reduce(or_, messages_in(vars(), Event))


Text: TypeAlias = Token | Reasoning | ToolCall
"""Events that carry text."""

MAX_JOINED_BYTES: Final = 64 * 1024
"""Text in one coalesced event: below the default limit of WebSocket clients (1 MiB), with room for JSON around it."""


def text_of(event: Text) -> str:
    return event.arguments if isinstance(event, ToolCall) else event.content


def continues_text(first: Text, event: Event) -> bool:
    """Return whether an event continues the text of ``first``, so that both may be coalesced.

    The first event of a tool call, which carries the name, never continues another.
    """
    if type(event) is not type(first) or event.turn_id != first.turn_id:
        return False
    if isinstance(event, ToolCall) and isinstance(first, ToolCall):
        return event.name is None and first.name is None and event.index == first.index
    return True


def with_text(event: Text, text: str, *, seq: int, logprobs: tuple[TokenLogprobs, ...] | None) -> Text:
    """Return a copy of the event with this text in place of its own."""
    field = "arguments" if isinstance(event, ToolCall) else "content"
    return event.model_copy(update={field: text, "seq": seq, "logprobs": logprobs})
