"""Values shared by several messages."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from inferencecenter.protocol.base import FIRST_PROTOCOL

Mode = Literal["chat", "raw"]
OnFull = Literal["shift", "stop"]
OnDisconnect = Literal["detach", "close"]
Priority = Literal["interactive", "normal", "batch"]
StatusType = Literal["queue", "memory", "sessions", "performance", "model"]
Role = Literal["system", "user", "assistant", "tool"]
SessionStateName = Literal["idle", "busy", "closed", "expired"]
FinishReason = Literal[
    "stop", "length", "aborted", "context_full", "time", "tool_calls", "repetition", "quota_exceeded"
]

MetadataText = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], MetadataText],
    Field(max_length=16, fail_fast=True),
]


class Value(BaseModel):
    """Part of a message: immutable, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MAX_CALLS: Final = 128
"""Maximum number of tool calls of a message."""
MAX_TOOLS: Final = 128
"""Maximum number of tools of a turn."""


class Tool(Value):
    """A function of the client that the model may call."""

    name: ToolName = Field(description="Its name.")
    description: str | None = Field(default=None, max_length=131_072, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of its arguments, an object; absent for a tool without arguments."
    )
    strict: bool = Field(
        default=True,
        description="Whether a keyword of the schema that cannot be enforced is refused; if false, it is left to the "
        "model, with a warning.",
    )


def check_tool_names(tools: Sequence[Tool] | None) -> None:
    """Raise ``ValueError`` if two tools have the same name."""
    names = [tool.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise ValueError("two tools have the same name")


McpServerLabel = Annotated[str, StringConstraints(min_length=1, max_length=32)]
McpToolLabel = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class McpTool(Value):
    """A tool of an MCP server that the client may call."""

    name: str = Field(description="Its name.")
    description: str = Field(description="What it does, as described by the server.")
    parameters: dict[str, Any] = Field(description="JSON Schema of its arguments.")
    approval: Literal["always", "never"] = Field(
        description="Whether the user must approve each call: `always`, or `never` for a harmless tool."
    )


class McpServer(Value):
    """A declared MCP server and its tools."""

    server: str = Field(description="Its name.")
    mcp_tools: tuple[McpTool, ...] = Field(description="The tools that may be called.")
    detail: str = Field(default="", description="Why they cannot be listed, as text.")


class McpCallStatus(Value):
    """A tool call that the daemon runs, or whose outcome is unknown."""

    call_id: str = Field(description="Id of the tool call.")
    server: str = Field(description="The MCP server.")
    tool: str = Field(description="The tool.")
    call_state: Literal["running", "unknown"] = Field(
        description="`unknown` after a restart or an abort during the call: it may have run. It is never repeated "
        "automatically."
    )


class NamedTool(Value):
    """The tool that the model must call."""

    name: ToolName = Field(description="Its name.")


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class ToolCall(Value):
    """A tool call by the model."""

    call_id: CallId = Field(description="Id of the call; the message with its result refers to it as `tool_call_id`.")
    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


IMAGE_MARK: Final = "\ufffc"
"""The character that stands for an image in the content of a message that has images."""
MAX_IMAGES: Final = 64
"""Maximum number of images of a message."""
ImageDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ImageType = Literal["image/png", "image/jpeg", "image/webp", "image/gif"]


ImageAlt = Annotated[str, StringConstraints(max_length=256)]


class MessageImage(Value):
    """An image of a message."""

    digest: ImageDigest = Field(description="SHA-256 of its file, in hex.")
    width: int = Field(ge=1, description="Width in pixels, as the model sees it.")
    height: int = Field(ge=1, description="Height in pixels, as the model sees it.")
    media_type: ImageType = Field(description="Format of its file.")
    alt: ImageAlt | None = Field(
        default=None, description="What stands for it where it is not shown, such as its file's name."
    )


class MessageTextPart(Value):
    """Text of a message with parts."""

    type: Literal["text"]
    text: str = Field(description="The text.")


class MessageImagePart(Value):
    """An image of a message with parts: its file, the digest of one that the client sent before, or an address."""

    type: Literal["image"]
    data: str | None = Field(default=None, description="A PNG, JPEG, WebP or GIF file in Base64.")
    digest: ImageDigest | None = Field(default=None, description="SHA-256 of a file sent before, in hex.")
    url: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        default=None, description="Address with https of a file on a host in `server.image_hosts`."
    )
    alt: ImageAlt | None = Field(
        default=None,
        description="What stands for it where it is not shown, such as its file's name; the model does not see it.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.data, self.digest, self.url)) != 1:
            raise ValueError("an image has data, a digest or a url")
        return self


ContentPart = Annotated[MessageTextPart | MessageImagePart, Field(discriminator="type")]
MAX_PARTS: Final = 256
"""Maximum number of parts of a message."""


class MessageInParts(Value):
    """A message whose content has several parts, such as texts and images; it is stored as a message with images."""

    role: Literal["user", "tool"] = Field(description="Author of the message.")
    content: Annotated[tuple[ContentPart, ...], Field(min_length=1, max_length=MAX_PARTS, strict=False)] = Field(
        description="Its parts, in order."
    )
    tool_call_id: CallId | None = Field(default=None, description="The call whose result a tool message carries.")

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages of role tool")
        if sum(isinstance(part, MessageImagePart) for part in self.content) > MAX_IMAGES:
            raise ValueError(f"a message has at most {MAX_IMAGES} images")
        return self


class ChatMessage(Value):
    """One message of a conversation."""

    role: Role = Field(description="Author of the message.")
    content: str = Field(
        description="Plain text; may be empty. In a message with `images`, each character U+FFFC stands for one."
    )
    reasoning: str | None = Field(
        default=None,
        description="The assistant's reasoning; the model's template decides whether it is part of later prompts.",
    )
    tool_calls: (
        Annotated[tuple[ToolCall, ...], Field(min_length=1, max_length=MAX_CALLS, strict=False, fail_fast=True)] | None
    ) = Field(default=None, description="Tool calls by the assistant.")
    tool_call_id: CallId | None = Field(default=None, description="The call whose result a tool message carries.")
    images: (
        Annotated[tuple[MessageImage, ...], Field(min_length=1, max_length=MAX_IMAGES, strict=False, fail_fast=True)]
        | None
    ) = Field(default=None, description="Images of the user or of a tool, in order.")

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.images is not None:
            if self.role not in ("user", "tool"):
                raise ValueError("images belong to messages of role user or tool")
            if self.content.count(IMAGE_MARK) != len(self.images):
                raise ValueError("content must have one character U+FFFC for each of images")
        if self.role != "assistant" and (self.tool_calls is not None or self.reasoning is not None):
            raise ValueError("tool_calls and reasoning belong to messages of role assistant")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages of role tool")
        return self


def _form_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
    return "parts" if isinstance(content, (list, tuple)) else "text"


MessageInput = Annotated[
    Annotated[ChatMessage, Tag("text")] | Annotated[MessageInParts, Tag("parts")], Discriminator(_form_of)
]
"""A message as a client sends it."""


class InfillFile(Value):
    """Additional context for an infill, such as a part of another file."""

    filename: Annotated[str, StringConstraints(max_length=4096)] = Field(default="tmp", description="Its name.")
    text: str = Field(description="The text.")


class Infill(Value):
    """Context of the text to be generated, in addition to the session's text before it."""

    suffix: str = Field(description="Text after the gap; may be empty.")
    extra: Annotated[tuple[InfillFile, ...], Field(max_length=256, strict=False, fail_fast=True)] = Field(
        default=(), description="Other texts, the least important first."
    )


MAX_PRESET_TEXT_CHARS: Final = 65_536
PresetType = Literal["settings", "prompt"]
PresetName = Annotated[str, StringConstraints(min_length=1, max_length=100)]
PresetText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PRESET_TEXT_CHARS)]


class Preset(Value):
    """Named conversation settings or a named prompt of a client, available on all its devices."""

    preset_type: PresetType = Field(
        description="`settings` has a system prompt, parameters, tools and the format of answers, each optional; "
        "`prompt` has a `text`."
    )
    name: PresetName = Field(description="Its name, unique for its type.")
    text: PresetText | None = Field(
        default=None, description="Text of a prompt; `{{name}}` is a placeholder, filled in when the prompt is used."
    )
    system: PresetText | None = Field(default=None, description="System prompt.")
    params: dict[str, Any] | None = Field(default=None, description="Parameters, as in `infer`.")
    json_schema: dict[str, Any] | bool | None = Field(default=None, description="JSON Schema, as in `infer`.")
    regex: PresetText | None = Field(default=None, description="Regular expression, as in `infer`.")
    grammar: PresetText | None = Field(default=None, description="Grammar, as in `infer`.")
    tools: list[Tool] | None = Field(
        default=None, min_length=1, max_length=MAX_TOOLS, fail_fast=True, description="Tools, as in `infer`."
    )

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        set_ = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if self.preset_type == "prompt":
            wrong = [name for name in set_ if name not in ("preset_type", "name", "text")]
            if wrong:
                raise ValueError(f"a prompt has no {wrong[0]}")
            if self.text is None:
                raise ValueError("a prompt needs a text")
        elif self.text is not None:
            raise ValueError("settings have no text")
        forms = [name for name in ("json_schema", "regex", "grammar") if name in set_]
        if len(forms) > 1:
            raise ValueError(f"{forms[0]} excludes {forms[1]}")
        check_tool_names(self.tools)
        return self


class Usage(Value):
    """Tokens counted for one turn or a whole session."""

    prompt_tokens: int = Field(ge=0, description="Tokens of the prompt.")
    cached_tokens: int = Field(ge=0, description="Of those, tokens whose KV was reused.")
    completion_tokens: int = Field(ge=0, description="Tokens generated.")
    reasoning_tokens: int = Field(
        default=0, ge=0, description="Of those, tokens of the reasoning, including its delimiters."
    )


class TurnStats(Value):
    """Timings and rates of one turn."""

    ttft_ms: Annotated[float, FIRST_PROTOCOL] = Field(description="Milliseconds from `infer` to the first token.")
    total_ms: Annotated[float, FIRST_PROTOCOL] = Field(description="Milliseconds from `infer` to the end.")
    tokens: Annotated[int, FIRST_PROTOCOL] = Field(description="Tokens generated.")
    tps: Annotated[float, FIRST_PROTOCOL] = Field(description="Tokens per second after the first token.")
    prompt_tokens: int = Field(description="Tokens of the prompt, including the history.")
    cached_tokens: int = Field(description="Of those, tokens whose KV was reused.")
    queue_ms: float = Field(description="Milliseconds spent waiting for a slot.")
    preempted: int = Field(description="Number of preemptions.")


class TokenProbability(Value):
    """A token and its natural-log probability before any sampler."""

    token: str = Field(description="The token's text; bytes of incomplete characters are shown as U+FFFD.")
    token_id: int = Field(description="Its id in the vocabulary.")
    logprob: float = Field(description="Natural logarithm of its probability.")


class TokenLogprobs(Value):
    """The sampled token and the most probable ones at its position."""

    token: str = Field(description="The sampled token's text.")
    token_id: int = Field(description="Its id in the vocabulary.")
    logprob: float = Field(description="Natural logarithm of its probability.")
    top: tuple[TokenProbability, ...] = Field(description="The `n_probs` most probable tokens, in descending order.")


class ClientLimits(Value):
    """Concurrency limits of a client and quota of its token; absent fields have no limit."""

    max_sessions: int = Field(description="Open sessions.")
    max_connections: int = Field(description="Open sockets.")
    requests_per_minute: int | None = Field(default=None, description="Turns that may be started in any minute.")
    tokens_per_minute: int | None = Field(
        default=None, description="Tokens per minute: uncached prompt tokens and generated tokens."
    )
    tokens_per_day: int | None = Field(default=None, description="The same per day, which begins at midnight UTC.")
    concurrent_turns: int | None = Field(default=None, description="Turns that may run or wait at once.")
    max_tokens: int | None = Field(default=None, description="Maximum tokens of one answer.")
    models: tuple[str, ...] | None = Field(default=None, description="Names of the models that may be used.")


class AccessLimitChanges(Value):
    """Limits of an account or a token: an absent limit is inherited from the level above, null is no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=10**12, description="Turns per minute.")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, le=10**12, description="Prefilled and generated tokens per minute."
    )
    tokens_per_day: int | None = Field(
        default=None, ge=1, le=10**12, description="The same per day, which begins at midnight UTC."
    )
    concurrent_turns: int | None = Field(
        default=None, ge=1, le=10**12, description="Turns that may run or wait at once."
    )
    max_tokens: int | None = Field(default=None, ge=1, le=10**9, description="Maximum tokens of one answer.")
    models: (
        Annotated[
            tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
            Field(max_length=256, strict=False, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="Names of the models that may be used.")
    addresses: (
        Annotated[
            tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...],
            Field(max_length=256, strict=False, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="Addresses or networks from which the token is accepted.")


AccessLimitValues = dict[str, int | tuple[str, ...] | None]
"""Limits that are set, by name; null is no limit."""


class AccountSummary(Value):
    """An account in a list."""

    client_id: str = Field(description="The account.")
    source: Literal["database", "file"] = Field(
        description="Where it is: in the daemon's database, or in `clients.toml`, where operators change it."
    )
    scopes: tuple[str, ...] = Field(description="Its scopes.")
    priority: Priority = Field(description="Its priority class.")
    max_sessions: int = Field(description="Maximum number of live sessions.")
    retention_days: float | None = Field(
        default=None, description="Days without use after which a session is deleted; absent if the daemon's applies."
    )
    archive_mib: int | None = Field(
        default=None, description="Mi characters that its stored sessions may hold; absent if the daemon's applies."
    )
    created_at: float | None = Field(default=None, description="Unix seconds; absent for one of `clients.toml`.")
    unrevoked_tokens: int = Field(description="Number of tokens that are not revoked.")
    access_limits: AccessLimitValues = Field(description="Its own limits.")


class AccessToken(Value):
    """A token in a list; its secret is not stored."""

    token_id: str = Field(description="Its id.")
    client_id: str = Field(description="Its account.")
    name: str = Field(description="Its purpose.")
    created_at: float = Field(description="Unix seconds.")
    expires_at: float | None = Field(default=None, description="Unix seconds; absent if it does not expire.")
    last_used_at: float | None = Field(default=None, description="Unix seconds; absent if it has not been used yet.")
    revoked: bool = Field(description="Whether it was revoked.")
    access_limits: AccessLimitValues = Field(description="Its own limits.")


class AccountSession(Value):
    """A session of any account, without its content: neither text nor metadata."""

    session_id: str = Field(description="The session.")
    client_id: str = Field(description="The account.")
    model: str = Field(description="The model that answers; empty for the default model of an archived one.")
    messages: int = Field(description="Messages of the history.")
    tokens: int = Field(description="Tokens of the history.")
    created_at: float = Field(description="Unix seconds.")
    last_used_at: float = Field(description="Unix seconds.")
    state: SessionStateName = Field(description="State of the session.")
    archived: bool = Field(description="Whether it is archived: stored, but not in memory.")
    stored: bool = Field(description="Whether it is stored.")
    attached: bool = Field(description="Whether a socket receives its events.")


class AuditRecord(Value):
    """A line of the audit log. It stands for `count` equal events from `at` to `last_at`."""

    line_id: int = Field(description="Its number.")
    at: float = Field(description="Unix seconds.")
    last_at: float = Field(description="Unix seconds.")
    count: int = Field(description="Number of equal events within a minute.")
    event: str = Field(description="Name of the event.")
    client_id: str | None = Field(default=None, description="The account concerned, or that acted.")
    token_id: str | None = Field(default=None, description="The token concerned, or that was used.")
    address: str | None = Field(default=None, description="The remote address.")
    detail: str = Field(description="Further details.")
    actor: str | None = Field(
        default=None, description="The acting administrator; `client_id` is then the account concerned."
    )


class UsageDay(Value):
    """Usage of the turns that ended on one day."""

    day: str = Field(description="Date in UTC, such as 2026-11-22.")
    turns: int = Field(description="Turns.")
    prompt_tokens: int = Field(description="Tokens of the prompts.")
    cached_tokens: int = Field(description="Of those, tokens whose KV was reused; limits do not count them.")
    completion_tokens: int = Field(description="Tokens generated.")


class HistorySeries(Value):
    """Turns of one model or client that ended in each step."""

    group: str | None = Field(default=None, description="The model or client; null for all others together.")
    columns: dict[str, tuple[float | None, ...]] = Field(
        description="Sums `turns`, `failed_turns`, `prompt_tokens`, `completion_tokens`, and the mean `ttft_ms`."
    )


class AccountUsage(Value):
    """Usage of an account by day; days without a turn are omitted."""

    client_id: str = Field(description="The account.")
    days: tuple[UsageDay, ...] = Field(description="Its usage by day, the latest last.")


class LogRecord(Value):
    """A line of the daemon's log, without secrets and cut to 1,000 characters."""

    at: float = Field(description="Unix seconds.")
    level: str = Field(description="Its level: `debug`, `info`, `warning`, `error` or `critical`.")
    text: str = Field(description="The line.")


class UsageLeft(Value):
    """Remaining quota of the requesting token; absent fields have no limit."""

    tokens_today: int = Field(description="Tokens counted against limits since midnight UTC.")
    day_ends_in_ms: int = Field(description="Milliseconds until midnight UTC.")
    turns: int = Field(description="Turns that run or wait.")
    requests_left: int | None = Field(default=None, description="Turns that may still be started.")
    minute_tokens_left: int | None = Field(
        default=None, description="Tokens left of the quota per minute; while it is negative, turns are refused."
    )
    day_tokens_left: int | None = Field(default=None, description="Tokens left of today's quota.")


class ConnectedClient(Value):
    """A client with open sockets."""

    client_id: str = Field(description="The account.")
    connections: int = Field(description="Its sockets.")
    addresses: int = Field(description="Number of distinct remote addresses.")
    sessions: int = Field(description="Its open sessions.")
    busy: int = Field(description="Of those, sessions with a running turn.")
    tokens_today: int = Field(description="Tokens counted against limits since midnight UTC.")


class ServerLimits(Value):
    """Limits that apply to every client."""

    max_frame_bytes: int = Field(description="Maximum bytes of one frame.")
    auth_timeout_s: float = Field(description="Seconds a socket has to authenticate.")
    max_share_links: int = Field(default=0, description="Maximum number of share links of a client; 0 if they are off.")


class Share(Value):
    """A share link, without its secret."""

    share_id: str = Field(description="The share.")
    session_id: str = Field(description="The session that was shared.")
    title: str = Field(description="`title` of the session's metadata at that time; may be empty.")
    created_at: float = Field(description="Unix seconds.")
    expires_at: float | None = Field(default=None, description="Unix seconds; absent if it does not expire.")
    messages: int = Field(description="Number of messages that are shared.")


class TranscriptTurn(Value):
    """Record of one ended turn."""

    turn_id: str = Field(description="The turn.")
    finish_reason: str = Field(description="How it ended.")
    messages: int = Field(ge=0, description="Length of the transcript at its end; the last message is its answer.")
    usage: Usage = Field(description="Its tokens.")
    ended_at: float | None = Field(default=None, description="Unix seconds; absent if it ended before version 0.2.")


class SessionSummary(Value):
    """A session in a list."""

    session_id: str = Field(description="The session.")
    state: SessionStateName = Field(description="State of the session.")
    mode: Mode = Field(description="Mode given at its creation.")
    model: str = Field(description="The model that answers.")
    messages: int = Field(description="Messages of the history.")
    tokens: int = Field(description="Tokens of the history.")
    created_at: float = Field(description="Unix seconds.")
    last_used_at: float = Field(description="Unix seconds.")
    metadata: dict[str, str] = Field(description="Metadata given at creation or by the latest `set_metadata`.")
    archived: bool = Field(
        default=False,
        description="Whether it is archived: only stored, and loaded by any request that names it. Absent if not.",
    )


class TextRange(Value):
    """A range of characters (Unicode code points)."""

    start: int = Field(ge=0, description="Number of its first character, from 0.")
    end: int = Field(ge=0, description="Number of the character after it.")


class TextHit(Value):
    """A message of a session, or its title, that contains words of the query."""

    snippet: str = Field(description="Part of the text, up to 160 characters, in one line.")
    marks: tuple[TextRange, ...] = Field(description="Positions of these words in `snippet`.")
    message_index: int | None = Field(
        default=None, description="Number of the message in the transcript, from 0; absent for the title."
    )
    role: Role | None = Field(default=None, description="Role of the message; absent for the title.")
    turn_id: str | None = Field(default=None, description="The turn of the message; absent if it has none.")


class SessionResult(Value):
    """A session that matches a search."""

    session: SessionSummary = Field(description="The session.")
    hits: tuple[TextHit, ...] = Field(description="Up to 3 hits, those with all words first.")


class SessionUsage(Value):
    """How much of its limits for sessions a client uses.

    Live sessions are in memory; archived ones are only stored, and take no place in `max_sessions`.
    """

    live: int = Field(description="Live sessions.")
    max_sessions: int = Field(
        description="Maximum number of live sessions; beyond it the least recently used one is archived."
    )
    archived: int = Field(description="Archived sessions.")
    stored_chars: int = Field(
        description="Characters that all sessions hold; each archived one counts 4,096 in addition."
    )
    max_stored_chars: int = Field(
        description="Limit beyond which further stored sessions are refused; nothing is deleted."
    )
    retention_days: float | None = Field(
        default=None, description="Days without use after which a session is deleted; absent if none is."
    )


class DocumentScore(Value):
    """The score of one document."""

    index: int = Field(description="Index of the document in the request.")
    relevance_score: float = Field(description="The model's score; higher is more relevant, the scale is the model's.")


class ClusterEngine(Value):
    """An engine on a machine of the cluster."""

    model: str = Field(description="The model.")
    replica: int = Field(description="The number of the model's replica, from 0.")
    state: str = Field(description="State of the engine.")
    detail: str = Field(default="", description="What it waits for, or why it was lost, as text.")
    load_fraction: float = Field(description="How much of the model is loaded, from 0 to 1.")
    running: int = Field(description="Turns with a slot.")
    waiting: int = Field(description="Turns that wait for a slot.")
    sessions: int = Field(description="Sessions whose KV it has.")


class ClusterRpcServer(Value):
    """An RPC server of llama.cpp on a machine of the cluster, for a model with `rpc_nodes`."""

    model: str = Field(description="The model.")
    state: Literal["stopped", "starting", "ready", "missing"] = Field(
        description="`ready` if the model's engine uses it, `missing` if the engine runs or waits without it, "
        "`stopped` if there is no engine."
    )
    detail: str = Field(default="", description="Why it is missing, as text.")
    running: int = Field(default=0, description="Turns of the model with a slot, while the server is used.")


class ClusterGpu(Value):
    """A GPU of a machine of the cluster."""

    name: str = Field(description="The device.")
    used_mb: float = Field(description="Memory in use by all processes, in MiB.")
    total_mb: float = Field(description="Memory, in MiB.")
    utilization: float | None = Field(default=None, description="Share of time in which it was busy, in percent.")
    temp: float | None = Field(default=None, description="Degrees Celsius.")


class ClusterNode(Value):
    """A machine that runs engines; values that are unknown are absent."""

    name: str = Field(description="Its name in `nodes` of models; `local` is the daemon's own.")
    address: str | None = Field(default=None, description="Its address, if it has joined the cluster.")
    state: Literal["up", "down", "unknown"] = Field(
        description="Whether it is in the cluster; `unknown` if the cluster does not answer."
    )
    drain: Literal["none", "draining", "drained"] = Field(
        description="Whether its sessions are being moved to other machines, or were."
    )
    drain_waits_for: tuple[str, ...] = Field(
        default=(), description="What is not done yet while it is `draining`, as text."
    )
    version: str | None = Field(default=None, description="Version of its engines.")
    heartbeat_age_s: float | None = Field(
        default=None, description="Seconds since the last heartbeat of any of its engines."
    )
    sessions: int = Field(description="Sessions whose KV is there.")
    engines: tuple[ClusterEngine, ...] = Field(description="Its engines, loaded or not.")
    rpc_servers: tuple[ClusterRpcServer, ...] = Field(
        default=(), description="Its RPC servers, for the engines of the daemon's machine that use its devices."
    )
    ram_used_mb: float | None = Field(default=None, description="Main memory in use, in MiB.")
    ram_total_mb: float | None = Field(default=None, description="Main memory, in MiB.")
    gpus: tuple[ClusterGpu, ...] = Field(default=(), description="Its GPUs.")


class ReplicaSummary(Value):
    """One of several engines of a model."""

    node: str = Field(default="", description="Its machine, by the name in the model's `nodes`.")

    state: Literal["loading", "loaded", "asleep", "failed"] = Field(description="Its state.")
    detail: str = Field(default="", description="Why it was lost or could not be loaded, as text.")
    running: int = Field(default=0, description="Turns with a slot.")
    waiting: int = Field(default=0, description="Turns that wait for a slot.")
    restarts: int = Field(default=0, description="Restarts after a loss.")


class ModelRoll(Value):
    """A changed entry of a model, whose engines are replaced one after the other."""

    done: int = Field(description="Engines that are replaced, added or removed.")
    total: int = Field(description="All that are to be.")
    failed: bool = Field(
        default=False, description="Whether a new one could not be loaded, and the former ones were put back."
    )
    detail: str = Field(default="", description="Why it failed, or the turns that it waits for, as text.")


class ModelSummary(Value):
    """A model in a list; values that are unknown before it is loaded are absent."""

    name: str = Field(description="Its name for `create_session` and `load_model`.")
    default: bool = Field(description="Whether it is the default model, used by sessions that name none.")
    kind: Literal["chat", "embedding", "reranking"] = Field(
        default="chat", description="What it does: it has sessions, takes `embed`, or takes `rerank`."
    )
    state: Literal["unloaded", "loading", "loaded", "asleep", "failed"] = Field(
        description="Its state; a turn loads a model that is `unloaded` or `asleep`."
    )
    detail: str = Field(default="", description="Why it could not be loaded, as text.")
    n_ctx: int | None = Field(default=None, description="Context size of a session in tokens.")
    slots: int | None = Field(default=None, description="Maximum number of concurrent turns.")
    parameters: int | None = Field(default=None, description="Parameters.")
    size_mb: float | None = Field(default=None, description="Size of its weights in MiB.")
    has_chat_template: bool | None = Field(
        default=None, description="Whether its file has a chat template; a base model has none, and continues text."
    )
    load_fraction: float | None = Field(default=None, description="Fraction that is loaded, while it is `loading`.")
    vision: bool = Field(default=False, description="Whether it takes images.")
    replicas: tuple[ReplicaSummary, ...] | None = Field(
        default=None, description="Its engines, if it has several; `slots` are those of all."
    )
    roll: ModelRoll | None = Field(
        default=None,
        description="The change of its entry that is being applied to its engines, or the last if it failed.",
    )


class PullSummary(Value):
    """A download of a model and its progress."""

    reference: str = Field(description="What was requested.")
    phase: Literal["running", "done", "failed", "cancelled"] = Field(description="Its phase.")
    requested_by: str = Field(description="The account that requested it.")
    model: str | None = Field(default=None, description="Name of the model, when the download is done.")
    file: str | None = Field(default=None, description="The file being downloaded; absent before the first byte.")
    done_bytes: int = Field(default=0, description="Bytes received.")
    total_bytes: int = Field(default=0, description="Bytes of all files; 0 until it is known.")
    detail: str = Field(default="", description="Why it failed, as text.")


PlanText = Annotated[str, StringConstraints(max_length=512)]


class PlannedDevice(Value):
    """Memory plan of one GPU, and the state of the GPU when it was made."""

    id: PlanText = Field(description="Its PCI bus address, or llama.cpp's name for it.")
    name: PlanText = Field(description="Its name.")
    total_bytes: int = Field(description="Its memory.")
    free_bytes: int = Field(description="Free memory when the plan was made.")
    margin_bytes: int = Field(description="Memory left free as a safety margin.")
    layers: int = Field(description="Layers placed there; the output matrix counts as one.")
    weight_bytes: int = Field(description="Their weights.")
    kv_bytes: int = Field(description="KV cache of these layers, of all slots.")
    compute_bytes: int = Field(description="Compute buffers.")
    context_bytes: int = Field(description="Overhead of the driver and its libraries.")
    used_bytes: int | None = Field(default=None, description="Memory use as measured, if it was.")


class PlannedHost(Value):
    """Memory plan of the host."""

    available_bytes: int | None = Field(default=None, description="Available memory when the plan was made, if known.")
    weight_bytes: int = Field(description="Weights, including the embeddings.")
    kv_bytes: int = Field(description="KV cache of the layers that are not on a GPU.")
    compute_bytes: int = Field(description="Compute buffers.")
    expert_layers: int = Field(description="Layers on GPUs whose experts stay in host memory.")


class PlanReason(Value):
    """A value chosen by a plan, and why."""

    name: PlanText = Field(description="The setting or settings.")
    value: PlanText = Field(description="Its value.")
    why: PlanText = Field(description="The reason as text.")
    explicit: bool = Field(description="Whether it was set explicitly.")


class EnginePlan(Value):
    """Placement of a model on GPUs and host, as planned at the latest start of its engine."""

    fits: bool = Field(description="Whether everything fits; if not, explicit settings are kept regardless.")
    layers: int = Field(description="Layers of the model; the output matrix counts as one.")
    n_gpu_layers: int = Field(description="Of those, layers on GPUs.")
    split_mode: Literal["layer", "none"] = Field(description="`layer` where several GPUs share them.")
    slots: int = Field(description="Maximum number of concurrent turns.")
    n_ctx: int = Field(description="Context size of each in tokens.")
    n_batch: int = Field(description="Maximum tokens per decode call.")
    n_ubatch: int = Field(description="Of those, tokens computed at once.")
    kv_type_k: PlanText = Field(description="Data type of the keys in the KV cache.")
    kv_type_v: PlanText = Field(description="Data type of the values in the KV cache.")
    flash_attention: bool = Field(description="Whether it is used, if the GPU has kernels for the model.")
    n_threads: int = Field(description="Number of compute threads.")
    devices: tuple[PlannedDevice, ...] = Field(max_length=64, description="The GPUs in use.")
    host: PlannedHost = Field(description="Memory of the host.")
    reasons: tuple[PlanReason, ...] = Field(max_length=32, description="The chosen values, each with its reason.")
    advice: tuple[PlanText, ...] = Field(
        max_length=128, description="Warnings: what does not fit, alternatives, and hints."
    )


class GpuReadings(Value):
    """Readings of the first GPU; null without a GPU or the reading."""

    temp: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Degrees Celsius.")
    vram_total_mb: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Memory, in MiB.")
    vram_used_mb: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Memory in use by all processes, in MiB.")
    vram_free_mb: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Free memory, in MiB.")
    power_watts: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Power drawn.")
    fan_percent: Annotated[float | None, FIRST_PROTOCOL] = Field(description="Fan speed.")
    throttling: Annotated[bool | None, FIRST_PROTOCOL] = Field(description="Whether the GPU throttles its clock.")
    name: str | None = Field(description="The device.")
    utilization: float | None = Field(description="Percent.")
    throttle_reasons: tuple[str, ...] | None = Field(description="Throttle reasons as named by NVML.")


class InferenceReadings(Value):
    """Load and throughput of the engine."""

    active_generations: Annotated[int, FIRST_PROTOCOL] = Field(description="Turns that run or wait.")
    total_sessions: Annotated[int, FIRST_PROTOCOL] = Field(description="Open sessions.")
    last_tps: Annotated[float, FIRST_PROTOCOL] = Field(description="Tokens per second of the turn that ended last.")
    last_ttft_ms: Annotated[float, FIRST_PROTOCOL] = Field(description="Its time to the first token.")
    total_tokens_generated: Annotated[int, FIRST_PROTOCOL] = Field(
        description="Tokens generated since the daemon started."
    )
    queue_depth: int = Field(description="Turns that wait for a slot.")
    tokens_per_s: float = Field(description="Tokens per second over the last ten seconds.")
    slots_used: int = Field(description="Slots in which a turn runs.")
    slots: int = Field(description="Maximum number of sequences decoded at once.")
    parked_sessions: int = Field(description="Sessions whose KV cache is offloaded from the slots.")
    parked_mb: float = Field(description="Size of the offloaded KV cache in MiB.")


class EngineReadings(Value):
    """The engine process."""

    state: str = Field(description="State of the process.")
    model: str | None = Field(description="The loaded model.")
    gpu_layers: int | None = Field(description="Layers on the GPU.")
    restarts: int = Field(description="Number of restarts.")
    rss_mb: float | None = Field(description="Resident memory, in MiB.")
