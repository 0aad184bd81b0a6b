"""All requests that a client may send."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from inferencecenter.protocol.base import FIRST_PROTOCOL, Request, SessionId, TurnId, messages_in
from inferencecenter.protocol.trace_context import Traceparent
from inferencecenter.protocol.values import (
    MAX_TOOLS,
    AccessLimitChanges,
    CallId,
    ImageDigest,
    Infill,
    McpServerLabel,
    McpToolLabel,
    MessageInput,
    Metadata,
    Mode,
    NamedTool,
    OnDisconnect,
    OnFull,
    Preset,
    PresetName,
    PresetType,
    Priority,
    StatusType,
    Tool,
    ToolChoice,
    check_tool_names,
)

MAX_GRAMMAR_CHARS: Final = 262_144
"""Maximum characters of a grammar, a regular expression, or a serialized JSON Schema."""

MAX_PREFIX_CHARS: Final = 262_144
"""Maximum number of characters of `prefix`."""

RawParams = dict[str, Any]
"""Parameters as given by the client; ``params.parse_params`` validates them."""

MAX_LIFETIME_S: Final = 3_153_600_000
"""Maximum lifetime of a token or a share link, in seconds."""

START: Final = "start"
"""The position before the first turn, in place of a turn id."""

ShareId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Credential = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Protocol = Annotated[
    Literal[1] | None, Field(description="1 makes this a v1 socket; without it, the socket uses the first protocol.")
]


class Hello(Request):
    """Request the daemon's identity and readiness; allowed at any time, also before authentication."""

    first_protocol: ClassVar[bool] = True
    op: Literal["hello"]
    protocol: Protocol = None


ONE_CREDENTIAL: Final = "give either token, or client_id and api_key"


class Auth(Request):
    """Authenticate with a token, or with a client id and its API key.

    On a Unix socket, without both, as the user that opened it: `auth.unix_users` has its account.
    """

    first_protocol: ClassVar[bool] = True
    op: Literal["auth"]
    token: Credential | None = Field(default=None, description="`ic_<id>_<secret>`.")
    client_id: Annotated[Credential | None, FIRST_PROTOCOL] = Field(default=None, description="Account name.")
    api_key: Annotated[Credential | None, FIRST_PROTOCOL] = Field(default=None, description="The account's key.")
    protocol: Protocol = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        pair = self.client_id is not None and self.api_key is not None
        partial = (self.client_id is None) != (self.api_key is None)
        if partial or (pair and self.token is not None):
            raise ValueError(ONE_CREDENTIAL)
        return self

    @property
    def has_credential(self) -> bool:
        return self.token is not None or self.client_id is not None


class CreateSession(Request):
    """Open a session with its own context."""

    first_protocol: ClassVar[bool] = True
    op: Literal["create_session"]
    system: str | None = Field(default=None, description="System prompt.")
    mode: Mode = Field(
        default="chat", description="`chat` applies the model's chat template, `raw` continues plain text."
    )
    model: str | None = Field(
        default=None,
        max_length=256,
        description="Model name, as listed by `list_models`. Without it the session uses the default model, also "
        "after that changes.",
    )
    params: Annotated[RawParams | None, FIRST_PROTOCOL] = Field(
        default=None, description="Parameters of the session level."
    )
    priority: Priority | None = Field(default=None, description="Priority class of the session's turns.")
    on_full: OnFull | None = Field(
        default=None,
        description=(
            "When the context is full, `shift` continues without the oldest turns, `stop` ends the answer. "
            "Default: `shift` in mode `chat`, `stop` in mode `raw`."
        ),
    )
    on_disconnect: OnDisconnect | None = Field(
        default=None,
        description=(
            "When the socket is lost, `detach` lets the session and its turn continue, `close` ends both. "
            "Default: `detach` on v1 sockets, `close` on sockets of the first protocol."
        ),
    )
    store: bool = Field(default=True, description="Whether the session may be written to disk.")
    ttl_s: float | None = Field(
        default=None, gt=0, le=31_536_000, description="Idle seconds before it expires; less than 1 counts as 1."
    )
    metadata: Metadata | None = Field(
        default=None, description="Up to 16 strings for the client's own use, returned unchanged."
    )


class Infer(Request):
    """Start a turn: send a prompt or messages and have the model answer.

    Without both, the model answers the last message of the history, which must be from `user` or `tool`.
    """

    first_protocol: ClassVar[bool] = True
    op: Literal["infer"]
    session_id: Annotated[SessionId, FIRST_PROTOCOL] = Field(description="The session.")
    prompt: Annotated[str | None, FIRST_PROTOCOL] = Field(default=None, min_length=1, description="The user's message.")
    messages: list[MessageInput] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        fail_fast=True,
        description="New messages, the last from `user` or `tool`.",
    )
    params: Annotated[RawParams | None, FIRST_PROTOCOL] = Field(
        default=None, description="Parameters of the turn level."
    )
    tools: list[Tool] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_TOOLS,
        fail_fast=True,
        description="Tools that the model may call, with unique names.",
    )
    tool_choice: ToolChoice = Field(
        default="auto",
        description="Whether tools are called: `auto` leaves it to the model, `none` forbids it, `required` forces a "
        "call, `{name}` forces this tool.",
    )
    parallel_tool_calls: bool = Field(default=True, description="Whether the model may call several tools at once.")
    json_schema: dict[str, Any] | bool | None = Field(
        default=None,
        description="JSON Schema that the answer conforms to; with tools, an answer that calls none of them.",
    )
    strict_schema: bool = Field(
        default=True,
        description="Whether a keyword of `json_schema` that cannot be enforced is refused; if false, it is left to "
        "the model, with a warning.",
    )
    regex: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description="Regular expression that matches the whole answer.",
    )
    grammar: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description="Grammar that the answer conforms to: GBNF if its rules use `::=`, else Lark.",
    )
    prefix: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PREFIX_CHARS,
        description="Start of the answer, which the model continues; events have only what follows it, the transcript "
        "has both.",
    )
    thinking: bool | None = Field(
        default=None,
        description="Whether the model reasons before it answers, if its template offers the choice; the template's "
        "default otherwise.",
    )
    thinking_required: bool = Field(
        default=True,
        description="Whether the turn is refused if `thinking` is set and the model's template does not offer the "
        "choice; if false, `thinking` then has no effect, with a warning.",
    )
    infill: Infill | None = Field(
        default=None,
        description="Text after a gap, which the model fills in; for models that have tokens for this, in sessions "
        "with mode `raw`. It is not part of the session's text.",
    )
    n_probs: int | None = Field(default=None, ge=0, le=20, description="Shorthand for `params.n_probs`.")
    priority: Priority | None = Field(
        default=None, description="Priority class of this turn; raising it needs the scope `priority`."
    )
    turn_key: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, description="Idempotency key: a second `infer` with the same key attaches to the first turn."
    )
    traceparent: Traceparent | None = Field(
        default=None,
        description="Parent span of the turn in W3C Trace Context format; defaults to the one of the HTTP upgrade.",
    )

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.messages[-1].role not in ("user", "tool"):
            raise ValueError("the last of messages must have role user or tool")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(forms) > 1:
            raise ValueError(f"{forms[0]} excludes {forms[1]}")
        if forms and self.prefix is not None:
            raise ValueError(f"{forms[0]} excludes prefix: the form is that of the whole answer")
        return self

    @model_validator(mode="after")
    def _known_tools(self) -> Self:
        check_tool_names(self.tools)
        names = [tool.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.name not in names:
            raise ValueError(f"tool_choice names {choice.name}, which is none of the tools")
        if choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        return self


class Abort(Request):
    """Abort the running turn; its text so far is kept unless `discard` is set.

    Without a turn, it stops the session's running MCP calls.
    """

    first_protocol: ClassVar[bool] = True
    op: Literal["abort"]
    session_id: Annotated[SessionId, FIRST_PROTOCOL] = Field(description="The session.")
    turn_id: TurnId | None = Field(default=None, description="Abort only if this turn is the running one.")
    discard: bool = Field(default=False, description="Also discard the turn: its messages and its partial answer.")


class CloseSession(Request):
    """Close a session and delete it."""

    first_protocol: ClassVar[bool] = True
    op: Literal["close_session"]
    session_id: Annotated[SessionId, FIRST_PROTOCOL] = Field(description="The session.")


class ResumeSession(Request):
    """Attach a session to this socket; `session_resumed` is the reply, then the missed events are replayed.

    The socket that was attached before receives `session_detached`.
    """

    op: Literal["resume_session"]
    session_id: SessionId = Field(description="The session.")
    epoch: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="From the latest `session_created` or `session_resumed`; without it no gap is detected.",
    )
    last_seq: int = Field(default=0, ge=0, description="Sequence number of the last received event; 0 if none.")


class ListMcpTools(Request):
    """List the tools of the MCP servers that the client may use; the reply is `mcp_tools`."""

    op: Literal["list_mcp_tools"]
    server: McpServerLabel | None = Field(default=None, description="Only those of this server.")


class CallMcpTool(Request):
    """Run a tool call of the latest answer on an MCP server, and append its result to the session.

    This approves the call, with the arguments that the model chose. `mcp_call` is sent when the call starts and when it
    ends. Until then other changes of the session are refused; `abort` stops its calls. Once all calls have results,
    `infer` without a message continues.
    """

    op: Literal["call_mcp_tool"]
    session_id: SessionId = Field(description="The session.")
    call_id: CallId = Field(description="Id of a tool call that has no result yet.")
    server: McpServerLabel = Field(description="An MCP server that `mcp_tools` lists.")
    tool: McpToolLabel | None = Field(
        default=None, description="Name of the tool on that server; absent, the name in the tool call."
    )


class Append(Request):
    """Append messages to the history without generating: few-shot examples, imports."""

    op: Literal["append"]
    session_id: SessionId = Field(description="The session.")
    messages: list[MessageInput] = Field(
        min_length=1, max_length=1000, fail_fast=True, description="Messages to add, in order."
    )


class ForkSession(Request):
    """Open a session that starts with this one's history; the reply is `session_created`, with `parent`.

    The new session has the same settings. Its turns keep their ids, so that it can be rewound to any of them.
    """

    op: Literal["fork_session"]
    session_id: SessionId = Field(description="The session to copy.")
    turn: TurnId | None = Field(
        default=None,
        description="Id of the last turn to copy; `start` copies what precedes the first turn. Without it "
        "everything is copied.",
    )


class RewindSession(Request):
    """Rewind a session to the end of a turn: everything later is discarded.

    The KV cache of the remaining turns is kept.
    """

    op: Literal["rewind_session"]
    session_id: SessionId = Field(description="The session.")
    turn: TurnId = Field(description="Id of the last turn to keep; `start` rewinds to before the first turn.")


class SetMetadata(Request):
    """Replace the metadata of a session, such as a title; `metadata_set` is sent to all sockets of the client.

    History and last-used time do not change, and a running turn continues.
    """

    op: Literal["set_metadata"]
    session_id: SessionId = Field(description="The session.")
    metadata: Metadata = Field(description="Up to 16 strings for the client's own use, in place of the previous ones.")


class SetModel(Request):
    """Change the model that answers in a session; `model_set` is sent to all sockets of the client.

    The next turn prefills the history anew, and loads the model if necessary. History and last-used time do not change.
    """

    op: Literal["set_model"]
    session_id: SessionId = Field(description="The session.")
    model: ModelName | None = Field(
        default=None,
        description="Model name, as listed by `list_models`. Without it the session uses the default model, also after "
        "that changes.",
    )


class GetSession(Request):
    """Read a session: transcript, usage, state."""

    op: Literal["get_session"]
    session_id: SessionId = Field(description="The session.")


class GetImage(Request):
    """Read the file of an image of the client's own messages; the reply is `image`."""

    op: Literal["get_image"]
    digest: ImageDigest = Field(description="Its digest, as in `images` of a message.")


class ListSessions(Request):
    """List the client's own sessions, live and archived."""

    op: Literal["list_sessions"]
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: SessionId | None = Field(default=None, description="`next` of the previous page.")
    order: Literal["oldest", "recent"] = Field(
        default="oldest", description="`oldest`: by creation, oldest first; `recent`: by last use, latest first."
    )


class SearchSessions(Request):
    """Search titles and messages of the client's stored sessions, live and archived.

    It costs 10 operations, and one more for each 8 Mi characters that the client stores, for each word or phrase. A
    query with more than about a million hits is refused.

    A session matches if each word and each "phrase" of the query occurs in its transcript or in `title` of its
    metadata; the last word also matches as a prefix. Case and diacritics are ignored. Chinese, Japanese, Korean, Thai,
    Lao, Khmer and Burmese characters match anywhere, so that any part of a text in these scripts is found. The first
    131,072 characters of each message are searched; the answer of a running turn can be found once it has ended.
    """

    op: Literal["search_sessions"]
    query: str = Field(
        min_length=1, max_length=256, description='Up to 16 words and "phrases"; there are no operators.'
    )
    limit: int = Field(default=20, ge=1, le=50, description="Page size.")
    after: SessionId | None = Field(default=None, description="`next` of the previous page.")


class CreateShare(Request):
    """Share a snapshot of a session by a link, if the operator allows it; the reply is `share_created`.

    Any account of the daemon that has the link may read the messages, except the system prompt, until the share is
    revoked or expires, or the session is deleted. Later messages are not shared.
    """

    op: Literal["create_share"]
    session_id: SessionId = Field(description="The session; it must be stored.")
    expires_in_s: int | None = Field(
        default=None, ge=1, le=MAX_LIFETIME_S, description="Lifetime in seconds; without it, it does not expire."
    )


class ListShares(Request):
    """List the client's own share links; the reply is `shares`."""

    op: Literal["list_shares"]


class RevokeShare(Request):
    """Revoke a share link; the reply is `share_revoked`."""

    op: Literal["revoke_share"]
    share_id: ShareId = Field(description="The share.")


MAX_EMBEDDED_TEXTS: Final = 256
MAX_TEXT_CHARS: Final = 1_048_576


class EmbedTexts(Request):
    """Compute embedding vectors of texts; the reply, `embeddings`, is sent when all are computed.

    The socket can be used in the meantime; at most 8 such requests may be outstanding.
    """

    op: Literal["embed"]
    texts: list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT_CHARS)]] = Field(
        min_length=1, max_length=MAX_EMBEDDED_TEXTS, fail_fast=True, description="The texts."
    )
    model: ModelName | None = Field(
        default=None, description="Name of an embedding model; may be absent if there is one."
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Number of dimensions, if the model allows it (`matryoshka`): vectors are truncated and normalized "
        "again.",
    )
    priority: Priority | None = Field(
        default=None, description="Priority class of the request; raising it needs the scope `priority`."
    )


class RerankDocuments(Request):
    """Score the relevance of documents to a query; the reply, `document_scores`, is sent when all are computed.

    The socket can be used in the meantime; requests count together with those of `embed`.
    """

    op: Literal["rerank"]
    query: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT_CHARS)] = Field(
        description="The query that the documents are scored for."
    )
    documents: list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT_CHARS)]] = Field(
        min_length=1, max_length=MAX_EMBEDDED_TEXTS, fail_fast=True, description="The documents."
    )
    model: ModelName | None = Field(
        default=None, description="Name of a reranking model; may be absent if there is one."
    )
    top_n: int | None = Field(
        default=None, ge=1, description="How many of the best documents to return; all if absent."
    )
    priority: Priority | None = Field(
        default=None, description="Priority class of the request; raising it needs the scope `priority`."
    )


class ListPresets(Request):
    """Read the client's presets."""

    op: Literal["list_presets"]


class SavePreset(Request):
    """Save a preset, replacing the one with its type and name; `preset_saved` is sent to all sockets of the client."""

    op: Literal["save_preset"]
    preset: Preset = Field(description="The preset.")


class DeletePreset(Request):
    """Delete a preset; `preset_deleted` is sent to all sockets of the client."""

    op: Literal["delete_preset"]
    preset_type: PresetType = Field(description="Its type.")
    name: PresetName = Field(description="Its name.")


class ListModels(Request):
    """List the available models; the reply is `models`."""

    op: Literal["list_models"]


class LoadModel(Request):
    """Load a model and make it the default of sessions that name none; `swap` events follow, then `model_changed`.

    No turn is cut off: running turns end with the model that started them.
    """

    op: Literal["load_model"]
    name: ModelName = Field(description="A name that `models` lists.")


class UnloadModel(Request):
    """Free the memory of a model once its turns have ended; the next turn that needs it loads it again."""

    op: Literal["unload_model"]
    name: ModelName = Field(description="A name that `models` lists.")


ModelReference = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class PullModel(Request):
    """Download a model into the daemon's directory; the reply is `pull`, and `list_pulls` shows the progress.

    The download continues when the socket closes. An interrupted one is resumed by another request.
    """

    op: Literal["pull_model"]
    reference: ModelReference = Field(
        description="`owner/repo:Q4_K_M`, `owner/repo/file.gguf` or `owner/repo` of the hub that `HF_ENDPOINT` names."
    )


class ListPulls(Request):
    """List running downloads and the most recently ended ones; the reply is `pulls`."""

    op: Literal["list_pulls"]


class CancelPull(Request):
    """Cancel a download at its next chunk; received data is kept. The reply is `pull`."""

    op: Literal["cancel_pull"]
    reference: ModelReference = Field(description="As listed by `list_pulls`.")


class RemoveModel(Request):
    """Delete the files of a model from the daemon's directory; its running turns end first.

    The default model and models that settings name are not deleted. The reply is `model_removed`.
    """

    op: Literal["remove_model"]
    name: ModelName = Field(description="A name that `models` lists.")


class Metrics(Request):
    """Request one metrics frame."""

    first_protocol: ClassVar[bool] = True
    op: Literal["metrics"]


class SubscribeMetrics(Request):
    """Subscribe to periodic metrics frames."""

    first_protocol: ClassVar[bool] = True
    op: Literal["subscribe_metrics"]
    interval_ms: int = Field(default=1000, ge=100, le=3_600_000, description="Milliseconds between frames.")


class UnsubscribeMetrics(Request):
    """Stop the metrics frames."""

    first_protocol: ClassVar[bool] = True
    op: Literal["unsubscribe_metrics"]


class MetricsHistory(Request):
    """Request load and work of the last 24 hours: the client's own work, for administrators that of all clients."""

    op: Literal["metrics_history"]
    range_s: int = Field(default=3600, ge=60, le=86_400, description="Length of the period until now, in seconds.")
    resolution_s: int | None = Field(
        default=None,
        ge=60,
        le=86_400,
        multiple_of=60,
        description="Seconds of a step; by default the fewest whole minutes that give at most 360 steps.",
    )
    group_by: Literal["model", "client"] = Field(
        default="model", description="Whether a series is the work of a model or of a client."
    )


class Status(Request):
    """Request the readings of one part of the daemon; other clients' shares need the operator scope."""

    op: Literal["status"]
    type: StatusType = Field(
        default="queue",
        description="The part of the daemon. Readings of `model` are those of the default model; among them are its "
        "adapters in `lora`, and in `projector` the file by which it takes images: `null` if there is none.",
    )


class Usage(Request):
    """Request a client's usage by day and its remaining quota; other clients' need the operator scope."""

    op: Literal["usage"]
    client_id: Credential | None = Field(default=None, description="The client; by default the requesting one.")
    days: int = Field(
        default=30, ge=1, le=3660, description="Number of days, including today; days begin at midnight UTC."
    )


class ListUsage(Request):
    """Request the usage of all accounts by day; the reply is `usage_by_account`."""

    op: Literal["list_usage"]
    days: int = Field(
        default=30, ge=1, le=366, description="Number of days, including today; days begin at midnight UTC."
    )
    limit: int = Field(
        default=50, ge=1, le=50, description="Page size; a page also has at most 4,000 days of all accounts together."
    )
    after: Credential | None = Field(default=None, description="`next` of the previous page.")


class SubscribeLog(Request):
    """Subscribe to the daemon's log: `log_subscribed` is the reply, then `log` events follow, recent lines first."""

    op: Literal["subscribe_log"]
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level; lines below the daemon's own level are never logged."
    )


class UnsubscribeLog(Request):
    """Stop the log events; the reply is `log_unsubscribed`."""

    op: Literal["unsubscribe_log"]


class ListClients(Request):
    """List the connected clients; the reply is `clients`."""

    op: Literal["list_clients"]


class Kick(Request):
    """Close all sockets of a client; its sessions continue detached. The reply is `kicked`."""

    op: Literal["kick"]
    client_id: Credential = Field(description="As listed by `list_clients`.")


AccountId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
TokenId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
TokenLabel = Annotated[str, StringConstraints(max_length=256)]
ScopeNames = Annotated[tuple[str, ...], Field(min_length=1, max_length=8, strict=False, fail_fast=True)]
MaxSessions = Annotated[int, Field(ge=1, le=100_000)]
RetentionDays = Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False, strict=False)]
ArchiveMib = Annotated[int, Field(ge=1, le=2**20)]


class ListAccounts(Request):
    """List the accounts, oldest first, and after them those of `clients.toml`; the reply is `accounts`."""

    op: Literal["list_accounts"]
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: AccountId | None = Field(default=None, description="`next` of the previous page.")


class CreateAccount(Request):
    """Create an account, which has no token yet; the reply is `account`."""

    op: Literal["create_account"]
    client_id: AccountId = Field(description="Letters, digits and `._@+-`, beginning with a letter or digit.")
    scopes: ScopeNames = Field(default=("user",), description="Its scopes.")
    priority: Priority | None = Field(default=None, description="Priority class; by default the daemon's.")
    max_sessions: MaxSessions | None = Field(
        default=None, description="Maximum number of live sessions; by default the daemon's."
    )
    retention_days: RetentionDays | None = Field(
        default=None, description="Days without use after which a session is deleted; by default the daemon's."
    )
    archive_mib: ArchiveMib | None = Field(
        default=None, description="Mi characters that its stored sessions may hold; by default the daemon's."
    )
    access_limits: AccessLimitChanges | None = Field(default=None, description="Its own limits.")


class ChangeAccount(Request):
    """Change the given fields of an account; the reply is `account`.

    Limits apply at once: with fewer `retention_days`, sessions that have been unused for longer are deleted. A change
    of scopes or priority closes its sockets with 1012, and applies when they reconnect.
    """

    op: Literal["change_account"]
    client_id: AccountId = Field(description="The account.")
    scopes: ScopeNames | None = Field(default=None, description="Its scopes, in place of the previous ones.")
    priority: Priority | None = Field(default=None, description="Its priority class.")
    max_sessions: MaxSessions | None = Field(default=None, description="Maximum number of live sessions.")
    retention_days: RetentionDays | None = Field(
        default=None, description="Days without use after which a session is deleted; null for the daemon's."
    )
    archive_mib: ArchiveMib | None = Field(
        default=None, description="Mi characters that its stored sessions may hold; null for the daemon's."
    )
    access_limits: AccessLimitChanges | None = Field(
        default=None, description="Its own limits, in place of all previous ones."
    )


class GetAccount(Request):
    """Read an account and how much it stores, such as before its deletion; the reply is `account`."""

    op: Literal["get_account"]
    client_id: AccountId = Field(description="The account.")


class DeleteAccount(Request):
    """Delete an account of the database with its tokens; the reply is `account_deleted`.

    Its tokens are revoked and its sockets closed with 4401 first. `sessions` has no default: `delete` ends its sessions
    and deletes all its stored data, including presets, shares and usage; `keep` leaves the data stored, for an account
    that is created with the same name. If the request fails, the account is still listed.
    """

    op: Literal["delete_account"]
    client_id: AccountId = Field(description="The account, which is not the administrator's own.")
    sessions: Literal["delete", "keep"] = Field(description="What happens to its sessions.")


class ListTokens(Request):
    """List tokens, oldest first, also revoked ones; the reply is `access_tokens`."""

    op: Literal["list_tokens"]
    client_id: AccountId | None = Field(default=None, description="Only those of this account.")
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: TokenId | None = Field(default=None, description="`next` of the previous page.")


class CreateToken(Request):
    """Create a token of an account; the reply is `new_token`, the only message that contains its secret."""

    op: Literal["create_token"]
    client_id: AccountId = Field(description="The account.")
    name: TokenLabel = Field(default="", description="Its purpose, such as phone or laptop.")
    expires_in_s: int | None = Field(
        default=None, ge=1, le=MAX_LIFETIME_S, description="Lifetime in seconds; without it, it does not expire."
    )
    access_limits: AccessLimitChanges | None = Field(default=None, description="Its own limits.")


class ChangeToken(Request):
    """Replace the limits of a token; the reply is `access_token`. They apply at once."""

    op: Literal["change_token"]
    token_id: TokenId = Field(description="The token.")
    access_limits: AccessLimitChanges = Field(description="Its own limits, in place of all previous ones.")


class RotateToken(Request):
    """Replace a token by a new one with the same name, expiry and limits; the reply is `new_token`.

    The old one is revoked, and its sockets are closed.
    """

    op: Literal["rotate_token"]
    token_id: TokenId = Field(description="The token.")


class RevokeToken(Request):
    """Revoke a token and close its sockets; the reply is `access_token`."""

    op: Literal["revoke_token"]
    token_id: TokenId = Field(description="The token.")


class ListAllSessions(Request):
    """List the sessions of all accounts, oldest first, without their contents; the reply is `all_sessions`."""

    op: Literal["list_all_sessions"]
    client_id: AccountId | None = Field(default=None, description="Only those of this account.")
    archived: bool = Field(default=False, description="Whether to list archived sessions instead of those in memory.")
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: SessionId | None = Field(default=None, description="`next` of the previous page.")


class PurgeSession(Request):
    """End a session of any account and delete it; the reply is `session_purged`."""

    op: Literal["purge_session"]
    session_id: SessionId = Field(description="The session.")


class ReadAudit(Request):
    """Read the audit log, newest first; the reply is `audit_log`."""

    op: Literal["read_audit"]
    client_id: Credential | None = Field(default=None, description="Only lines about this account or its actions.")
    event: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, description="Only this event."
    )
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    before: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="`older` of the previous page."
    )


class ListNodes(Request):
    """List the machines that run engines, this one first; the reply is `nodes`, empty for a daemon in no cluster."""

    op: Literal["list_nodes"]


NodeName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class DrainNode(Request):
    """Move the sessions of a machine to other ones, and end its engines; the reply is `nodes`.

    New turns go elsewhere at once. Running ones have `engine.swap_patience_s` to end, and continue on another machine
    after that. A restarted daemon does not use the machine either.
    """

    op: Literal["drain_node"]
    node: NodeName = Field(description="The machine, as listed by `list_nodes`.")


class UndrainNode(Request):
    """Use a machine again that was drained; the reply is `nodes`."""

    op: Literal["undrain_node"]
    node: NodeName = Field(description="The machine, as listed by `list_nodes`.")


class Drain(Request):
    """Stop the daemon as SIGTERM does: `going_away` is broadcast, running turns may finish, new clients are refused.

    The reply is `draining`.
    """

    op: Literal["drain"]


class Ping(Request):
    """Request a `pong`."""

    op: Literal["ping"]


AnyRequest: Any = reduce(or_, messages_in(vars(), Request))
