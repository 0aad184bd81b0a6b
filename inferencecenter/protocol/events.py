"""All events that the daemon sends."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field

from inferencecenter.protocol.base import FIRST_PROTOCOL, Event, SessionEvent, TurnEvent, messages_in
from inferencecenter.protocol.values import (
    AccessToken,
    AccountSession,
    AccountSummary,
    AccountUsage,
    AuditRecord,
    ChatMessage,
    ClientLimits,
    ClusterNode,
    ConnectedClient,
    DocumentScore,
    EnginePlan,
    EngineReadings,
    FinishReason,
    GpuReadings,
    HistorySeries,
    ImageType,
    InferenceReadings,
    LogRecord,
    McpCallStatus,
    McpServer,
    ModelSummary,
    OnFull,
    Preset,
    PresetType,
    PullSummary,
    ServerLimits,
    SessionResult,
    SessionStateName,
    SessionSummary,
    SessionUsage,
    Share,
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

    first_protocol: ClassVar[bool] = True
    op: Literal["hello"] = "hello"
    status: Annotated[Literal["ready", "loading", "degraded"], FIRST_PROTOCOL] = Field(
        description="Whether turns can run."
    )
    message: Annotated[str, FIRST_PROTOCOL] = Field(description="Readiness as text, with loading progress.")
    uptime_seconds: Annotated[int, FIRST_PROTOCOL] = Field(description="Seconds since the daemon started.")
    requires_auth: Annotated[bool, FIRST_PROTOCOL] = Field(description="Always true.")
    protocol: int = Field(description="Version of this protocol.")
    server: str = Field(description="`inferencecenter`.")
    version: str = Field(description="Version of the daemon.")
    model: str | None = Field(default=None, description="The loaded model; absent until one is loaded.")
    limits: ServerLimits = Field(description="Limits that apply to every client.")


class AuthSuccess(Event):
    """The socket is authenticated."""

    first_protocol: ClassVar[bool] = True
    op: Literal["auth_success"] = "auth_success"
    client_id: Annotated[str, FIRST_PROTOCOL] = Field(description="The account.")
    max_sessions: Annotated[int, FIRST_PROTOCOL] = Field(description="Maximum number of open sessions.")
    scopes: tuple[str, ...] = Field(description="Its rights.")
    priority: str = Field(description="Priority class of its turns.")
    limits: ClientLimits = Field(description="Limits of this client.")


class AuthFailed(Event):
    """The credential was not accepted; the socket may try again until its deadline."""

    first_protocol: ClassVar[bool] = True
    op: Literal["auth_failed"] = "auth_failed"
    reason: Annotated[str, FIRST_PROTOCOL] = Field(description="The reason as text.")
    retry_after_ms: int | None = Field(default=None, description="Minimum delay before a retry, in milliseconds.")


class SessionCreated(Event):
    """A session is open."""

    first_protocol: ClassVar[bool] = True
    op: Literal["session_created"] = "session_created"
    session_id: Annotated[str, FIRST_PROTOCOL] = Field(description="Id of the session.")
    parent: str | None = Field(default=None, description="The session from which it was forked.")
    epoch: str = Field(description="Incarnation of its event history.")
    model: str = Field(description="The model that answers.")
    n_ctx: int = Field(description="Context size of the session in tokens.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    warnings: tuple[str, ...] = Field(description="Valid settings that have no effect.")


class SessionError(Event):
    """A session could not be created (first protocol; v1 sockets get `error`)."""

    first_protocol: ClassVar[bool] = True
    op: Literal["session_error"] = "session_error"
    error: Annotated[str, FIRST_PROTOCOL] = Field(description="The reason as text.")


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

    first_protocol: ClassVar[bool] = True
    op: Literal["token"] = "token"
    content: Annotated[str, FIRST_PROTOCOL] = Field(description="Text to append.")
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

    first_protocol: ClassVar[bool] = True
    op: Literal["end"] = "end"
    finish_reason: FinishReason = Field(description="Why it ended.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(description="Valid parameters that had no effect.")
    usage: Usage = Field(description="Tokens of the turn.")
    stats: Annotated[TurnStats, FIRST_PROTOCOL] = Field(description="Timings and rates of the turn.")


class AbortStatus(Event):
    """Reply to `abort` on sockets of the first protocol."""

    first_protocol: ClassVar[bool] = True
    op: Literal["abort"] = "abort"
    session_id: Annotated[str, FIRST_PROTOCOL] = Field(description="The session.")
    status: Annotated[Literal["aborted", "not_found"], FIRST_PROTOCOL] = Field(
        description="Whether a turn was running."
    )


class SessionClosed(Event):
    """The session was closed, by any connection of its client; sent to all sockets of the client.

    Also sent when a session without a socket expires.
    """

    first_protocol: ClassVar[bool] = True
    op: Literal["session_closed"] = "session_closed"
    session_id: Annotated[str, FIRST_PROTOCOL] = Field(description="The session.")


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
    mcp_calls: tuple[McpCallStatus, ...] | None = Field(
        default=None, description="Tool calls that the daemon runs or whose outcome is unknown, when not resumed."
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


class McpCall(SessionEvent):
    """A tool call on an MCP server has started or ended.

    `done`: the result was added to the history as a message. `failed`: the tool did not run. `unknown`: it may have
    run; the client may call it again, or append a result of its own.
    """

    op: Literal["mcp_call"] = "mcp_call"
    call_id: str = Field(description="Id of the tool call.")
    server: str = Field(description="The MCP server.")
    tool: str = Field(description="The tool.")
    call_state: Literal["running", "done", "failed", "unknown"] = Field(description="Its state.")
    content: str | None = Field(default=None, description="The result, when it is `done`.")
    is_error: bool | None = Field(default=None, description="Whether the tool reported an error, when it is `done`.")
    detail: str = Field(default="", description="Why there is no result, as text.")


class MetadataSet(Event):
    """The metadata of a session was set or replaced; sent to all sockets of its client."""

    op: Literal["metadata_set"] = "metadata_set"
    session_id: str = Field(description="The session.")
    metadata: dict[str, str] = Field(description="The complete metadata.")


class ModelSet(Event):
    """The model of a session was changed, by `set_model` of this client."""

    op: Literal["model_set"] = "model_set"
    session_id: str = Field(description="The session.")
    model: str = Field(description="The model of its next turn.")
    n_ctx: int = Field(
        description="Context size in tokens; until the model has been loaded once, that of the previous model."
    )


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
    on_full: OnFull = Field(description="Behavior when the context is full.")
    dropped_messages: int = Field(description="Messages of the transcript that are no longer in the context.")
    params: dict[str, Any] = Field(description="Effective parameters of the session level.")
    metadata: dict[str, str] = Field(description="Metadata given at creation or by the latest `set_metadata`.")
    transcript: tuple[ChatMessage, ...] = Field(description="All messages; a running turn is not part of it yet.")
    turns: tuple[TranscriptTurn, ...] = Field(description="The most recent ended turns.")
    usage: Usage = Field(description="Tokens of all its turns.")
    mcp_calls: tuple[McpCallStatus, ...] | None = Field(
        default=None,
        description="Tool calls that the daemon runs or whose outcome is unknown; absent if there is none.",
    )


class ImageFetched(Event):
    """The file of an image."""

    op: Literal["image"] = "image"
    digest: str = Field(description="SHA-256 of the file, in hex.")
    width: int = Field(description="Width in pixels, as the model sees it.")
    height: int = Field(description="Height in pixels, as the model sees it.")
    media_type: ImageType = Field(description="Format of the file.")
    data: str = Field(description="The file in Base64.")


class Sessions(Event):
    """A page of the client's own sessions."""

    op: Literal["sessions"] = "sessions"
    sessions: tuple[SessionSummary, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")
    session_usage: SessionUsage | None = Field(default=None, description="How much of its limits the client uses.")


class SessionsFound(Event):
    """The sessions that match a search, most recently used first."""

    op: Literal["sessions_found"] = "sessions_found"
    results: tuple[SessionResult, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")
    indexed: float | None = Field(
        default=None,
        description="Indexed share of the stored sessions, from 0 to 1; absent if all are indexed. The latest are "
        "indexed first.",
    )


class Metrics(Event):
    """Readings of the GPU, the engine and the load."""

    first_protocol: ClassVar[bool] = True
    keeps_null: ClassVar[bool] = True
    op: Literal["metrics"] = "metrics"
    timestamp: Annotated[float, FIRST_PROTOCOL] = Field(description="Unix seconds.")
    gpu: Annotated[GpuReadings, FIRST_PROTOCOL] = Field(description="The first GPU.")
    inference: Annotated[InferenceReadings, FIRST_PROTOCOL] = Field(description="Load and throughput.")
    engine: EngineReadings = Field(description="The engine process.")


class MetricsSubscribed(Event):
    """Metrics frames will follow."""

    first_protocol: ClassVar[bool] = True
    op: Literal["metrics_subscribed"] = "metrics_subscribed"
    interval_ms: int = Field(description="Milliseconds between frames.")


class MetricsUnsubscribed(Event):
    """No more metrics frames follow."""

    first_protocol: ClassVar[bool] = True
    op: Literal["metrics_unsubscribed"] = "metrics_unsubscribed"


class HistoryReport(Event):
    """Load and work in steps of equal length; each column has a value for each step, null where there is no reading."""

    keeps_null: ClassVar[bool] = True
    op: Literal["metrics_history"] = "metrics_history"
    starts_at: float = Field(description="Unix seconds at which the first step begins.")
    resolution_s: int = Field(description="Seconds of a step.")
    columns: dict[str, tuple[float | None, ...]] = Field(
        description="Mean readings of the daemon: `running`, `waiting`, `sessions`, `parked_sessions`, "
        "`tokens_per_s`, `vram_used_mb`, `gpu_temp`, `rss_mb`."
    )
    series: tuple[HistorySeries, ...] = Field(
        description="Work by model or client: the eight with the most generated tokens, then all others together."
    )


class Status(Event):
    """Readings of one part of the daemon, by name."""

    op: Literal["status"] = "status"
    type: StatusType = Field(description="The part of the daemon.")
    values: dict[str, float | int | str | None] = Field(description="Readings by name.")
    plan: EnginePlan | None = Field(
        default=None,
        description="Placement of the model, for operators and `type` `model`; absent if none was planned.",
    )


class UsageReport(Event):
    """Usage of a client by day; days without a turn are omitted."""

    op: Literal["usage"] = "usage"
    client_id: str = Field(description="The account.")
    days: tuple[UsageDay, ...] = Field(description="Usage by day, the latest last.")
    left: UsageLeft | None = Field(default=None, description="Remaining quota; only in a client's own report.")


class UsageByAccount(Event):
    """A page of the accounts with usage, at most 50, by their tokens in descending order."""

    op: Literal["usage_by_account"] = "usage_by_account"
    usage_by_account: tuple[AccountUsage, ...] = Field(description="The accounts.")
    omitted_accounts: int = Field(description="Number of further accounts with usage.")
    next: str | None = Field(default=None, description="`after` of the next page; absent on the last one.")


class LogSubscribed(Event):
    """Log events will follow."""

    op: Literal["log_subscribed"] = "log_subscribed"


class LogUnsubscribed(Event):
    """No more log events follow."""

    op: Literal["log_unsubscribed"] = "log_unsubscribed"


class Log(Event):
    """Lines of the daemon's log, at most twice per second."""

    op: Literal["log"] = "log"
    log_lines: tuple[LogRecord, ...] = Field(description="The lines, oldest first.")
    skipped: int = Field(description="Number of lines omitted before them.")


class Clients(Event):
    """The connected clients."""

    op: Literal["clients"] = "clients"
    clients: tuple[ConnectedClient, ...] = Field(description="The clients, sorted by name.")


class Kicked(Event):
    """The sockets of a client were closed."""

    op: Literal["kicked"] = "kicked"
    client_id: str = Field(description="The account.")
    connections: int = Field(description="Number of sockets closed.")


class AccountsListed(Event):
    """A page of the accounts."""

    op: Literal["accounts"] = "accounts"
    accounts: tuple[AccountSummary, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")


class AccountChanged(Event):
    """An account that was read, created or changed."""

    op: Literal["account"] = "account"
    account: AccountSummary = Field(description="The account.")
    session_usage: SessionUsage | None = Field(
        default=None, description="How much it stores; only in the reply to `get_account`."
    )


class AccountDeleted(Event):
    """An account was deleted, with its tokens."""

    op: Literal["account_deleted"] = "account_deleted"
    client_id: str = Field(description="The account.")
    sessions: Literal["delete", "keep"] = Field(description="What happened to its sessions.")
    revoked_tokens: int = Field(description="Number of its tokens that had not been revoked before.")


class TokensListed(Event):
    """A page of the tokens."""

    op: Literal["access_tokens"] = "access_tokens"
    access_tokens: tuple[AccessToken, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")


class TokenChanged(Event):
    """A token that was changed or revoked."""

    op: Literal["access_token"] = "access_token"
    access_token: AccessToken = Field(description="The token.")


class TokenIssued(Event):
    """A new token with its secret, which is sent once and not stored."""

    op: Literal["new_token"] = "new_token"
    token: str = Field(description="The token, `ic_<id>_<secret>`.")
    access_token: AccessToken = Field(description="The token as listed by `list_tokens`.")


class AllSessions(Event):
    """A page of the sessions of all accounts."""

    op: Literal["all_sessions"] = "all_sessions"
    all_sessions: tuple[AccountSession, ...] = Field(description="The page.")
    next: str | None = Field(default=None, description="Cursor: pass it as `after` to get the next page.")


class SessionPurged(Event):
    """A session was ended and deleted."""

    op: Literal["session_purged"] = "session_purged"
    session_id: str = Field(description="The session.")


class AuditPage(Event):
    """A page of the audit log."""

    op: Literal["audit_log"] = "audit_log"
    audit_lines: tuple[AuditRecord, ...] = Field(description="The page, newest first.")
    older: int | None = Field(default=None, description="Cursor: pass it as `before` to get the next page.")
    audit_events: tuple[str, ...] = Field(description="All events of the audit log.")


class Nodes(Event):
    """The machines that run engines."""

    op: Literal["nodes"] = "nodes"
    nodes: tuple[ClusterNode, ...] = Field(description="The machines, the daemon's own first.")


class Draining(Event):
    """The daemon is about to stop; `going_away` follows on every socket."""

    op: Literal["draining"] = "draining"
    deadline_ms: int = Field(description="Milliseconds until running turns are interrupted.")


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
    """The embedding vectors of the texts of `embed`, in the same order."""

    op: Literal["embeddings"] = "embeddings"
    model: str = Field(description="The model.")
    dimensions: int = Field(description="Number of dimensions of each vector.")
    vectors: tuple[str, ...] = Field(
        description="The vectors, normalized to length 1, as base64 of little-endian 32-bit floats."
    )
    prompt_tokens: int = Field(description="Tokens of the texts.")


class ShareCreated(Event):
    """A share link was created. No other message has its secret.

    The web page opens it at `#/s/SHARE_ID/SHARE_TOKEN`; programs read it with `GET /shares/{share_id}`.
    """

    op: Literal["share_created"] = "share_created"
    share: Share = Field(description="The share.")
    share_token: str = Field(description="Its secret.")


class Shares(Event):
    """The client's valid share links, oldest first."""

    op: Literal["shares"] = "shares"
    shares: tuple[Share, ...] = Field(description="The shares.")


class ShareRevoked(Event):
    """The share link was revoked."""

    op: Literal["share_revoked"] = "share_revoked"
    share_id: str = Field(description="The share.")


class McpTools(Event):
    """The MCP servers that the client may use, and their tools."""

    op: Literal["mcp_tools"] = "mcp_tools"
    mcp_servers: tuple[McpServer, ...] = Field(description="The servers.")


class DocumentScores(Event):
    """The scores of the documents of `rerank`, the best first."""

    op: Literal["document_scores"] = "document_scores"
    model: str = Field(description="The model.")
    results: tuple[DocumentScore, ...] = Field(description="The documents.")
    prompt_tokens: int = Field(description="Tokens of the query with each document.")


class Presets(Event):
    """The client's presets, by type and name."""

    op: Literal["presets"] = "presets"
    presets: tuple[Preset, ...] = Field(description="All presets.")
    stored: bool = Field(description="Whether they are stored, and so survive a restart of the daemon.")
    max_presets: int = Field(description="Maximum number.")
    max_preset_chars: int = Field(description="Maximum number of characters of all presets together, as JSON.")


class PresetSaved(Event):
    """A preset was saved, by `save_preset` of this client."""

    op: Literal["preset_saved"] = "preset_saved"
    preset: Preset = Field(description="The preset.")


class PresetDeleted(Event):
    """A preset was deleted, by `delete_preset` of this client."""

    op: Literal["preset_deleted"] = "preset_deleted"
    preset_type: PresetType = Field(description="Its type.")
    name: str = Field(description="Its name.")


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


class Pull(Event):
    """A download of a model."""

    op: Literal["pull"] = "pull"
    pull: PullSummary = Field(description="The download.")


class Pulls(Event):
    """Running downloads and the most recently ended ones."""

    op: Literal["pulls"] = "pulls"
    pulls: tuple[PullSummary, ...] = Field(description="The downloads, oldest first.")


class ModelRemoved(Event):
    """The files of the model were deleted."""

    op: Literal["model_removed"] = "model_removed"
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
        default=None, description="Minimum delay before a refused request is repeated, in milliseconds."
    )


class GoingAway(Event):
    """The daemon is about to stop."""

    op: Literal["going_away"] = "going_away"
    deadline_ms: int = Field(description="Milliseconds until running turns are interrupted.")
    resume: bool = Field(description="Whether sessions can be resumed afterwards.")


class Error(Event):
    """A request or turn failed; the connection and the session stay usable."""

    first_protocol: ClassVar[bool] = True
    op: Literal["error"] = "error"
    code: str = Field(description="Code from the error table.")
    message: str = Field(description="Description of the error.")
    error: Annotated[str, FIRST_PROTOCOL] = Field(description="Equal to `message`.")
    hint: str | None = Field(default=None, description="How to resolve it.")
    field: str | None = Field(default=None, description="Path of the offending field.")
    session_id: Annotated[str | None, FIRST_PROTOCOL] = Field(default=None, description="The session concerned.")
    seq: int | None = Field(default=None, description="Sequence number; set when the error ends a turn.")
    turn_id: str | None = Field(default=None, description="The turn that the error ends.")
    retryable: bool = Field(description="Whether the same request may succeed later.")
    retry_after_ms: int | None = Field(default=None, description="Minimum delay before a retry, in milliseconds.")


AnyEvent: Any = reduce(or_, messages_in(vars(), Event))


Text: TypeAlias = Token | Reasoning | ToolCall
"""Events that carry text."""

MAX_JOINED_BYTES: Final = 64 * 1024
"""Maximum size of the text in a coalesced event: with its JSON far below the usual limit of clients, 1 MiB a frame."""


def text_of(event: Text) -> str:
    return event.arguments if isinstance(event, ToolCall) else event.content


def continues_text(first: Text, event: Event) -> bool:
    """Return whether an event continues the text of ``first``, so that they may be coalesced.

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
