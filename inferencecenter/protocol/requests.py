"""All requests that a client may send."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from inferencecenter.protocol.base import DAGGER, Request, SessionId, TurnId, messages_in
from inferencecenter.protocol.trace_context import Traceparent
from inferencecenter.protocol.values import (
    ChatMessage,
    Infill,
    Metadata,
    Mode,
    NamedTool,
    OnDisconnect,
    OnFull,
    Priority,
    StatusType,
    Tool,
    ToolChoice,
)

MAX_GRAMMAR_CHARS: Final = 262_144
"""Maximum characters of a grammar, a regular expression, or a serialized JSON Schema."""

MAX_PREFIX_CHARS: Final = 262_144
"""Maximum characters of the given start of an answer."""

RawParams = dict[str, Any]
"""Parameters as given by the client; ``params.parse_params`` validates them."""

START: Final = "start"
"""The position before the first turn, in place of a turn id."""

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Credential = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Protocol = Annotated[Literal[1] | None, Field(description="1 makes this a v1 socket; absent, an old one.")]


class Hello(Request):
    """Request the daemon's identity and readiness; allowed at any time, also before authentication."""

    dagger: ClassVar[bool] = True
    op: Literal["hello"]
    protocol: Protocol = None


class Auth(Request):
    """Authenticate with a token, or with a client id and its API key."""

    dagger: ClassVar[bool] = True
    op: Literal["auth"]
    token: Credential | None = Field(default=None, description="`ic_<id>_<secret>`.")
    client_id: Annotated[Credential | None, DAGGER] = Field(default=None, description="Account name.")
    api_key: Annotated[Credential | None, DAGGER] = Field(default=None, description="The account's key.")
    protocol: Protocol = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        pair = self.client_id is not None and self.api_key is not None
        partial = (self.client_id is None) != (self.api_key is None)
        if partial or pair == (self.token is not None):
            raise ValueError("give either token, or client_id and api_key")
        return self


class CreateSession(Request):
    """Open a session with its own context."""

    dagger: ClassVar[bool] = True
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
    params: Annotated[RawParams | None, DAGGER] = Field(default=None, description="Parameters of the session level.")
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
    """Start a turn: send a prompt or messages and have the model answer."""

    dagger: ClassVar[bool] = True
    op: Literal["infer"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")
    prompt: Annotated[str | None, DAGGER] = Field(default=None, min_length=1, description="The user's message.")
    messages: list[ChatMessage] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        fail_fast=True,
        description="New messages, the last from `user` or `tool`.",
    )
    params: Annotated[RawParams | None, DAGGER] = Field(default=None, description="Parameters of the turn level.")
    tools: list[Tool] | None = Field(
        default=None,
        min_length=1,
        max_length=128,
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
        description="Whether a keyword of `json_schema` that cannot be enforced is refused; otherwise it is left to "
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
        "choice; otherwise `thinking` has no effect, with a warning.",
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
        if (self.prompt is None) == (self.messages is None):
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
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.name not in names:
            raise ValueError(f"tool_choice names {choice.name}, which is none of the tools")
        if choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        return self


class Abort(Request):
    """Abort the running turn; its text so far is kept unless `discard` is set."""

    dagger: ClassVar[bool] = True
    op: Literal["abort"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")
    turn_id: TurnId | None = Field(default=None, description="Abort only if this turn is the running one.")
    discard: bool = Field(default=False, description="Also discard the turn: its messages and its partial answer.")


class CloseSession(Request):
    """Close a session and delete it."""

    dagger: ClassVar[bool] = True
    op: Literal["close_session"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")


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


class Append(Request):
    """Append messages to the history without generating: few-shot examples, imports."""

    op: Literal["append"]
    session_id: SessionId = Field(description="The session.")
    messages: list[ChatMessage] = Field(
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


class GetSession(Request):
    """Read a session: transcript, usage, state."""

    op: Literal["get_session"]
    session_id: SessionId = Field(description="The session.")


class ListSessions(Request):
    """List the client's own sessions, live and archived."""

    op: Literal["list_sessions"]
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: SessionId | None = Field(default=None, description="`next` of the previous page.")
    order: Literal["oldest", "recent"] = Field(
        default="oldest", description="`oldest` created first, or most `recent` use first."
    )


MAX_EMBEDDED_TEXTS: Final = 256
MAX_TEXT_CHARS: Final = 1_048_576


class EmbedTexts(Request):
    """Compute the vectors of texts by an embedding model; the reply is `embeddings`, when all are computed.

    The socket can be used meanwhile; with more than 8 such requests at once further ones are refused.
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
        description="Length of the vectors, which are cut and scaled to length 1 again, if the model allows it "
        "(`matryoshka`).",
    )
    priority: Priority | None = Field(
        default=None, description="Priority class of the request; raising it needs the scope `priority`."
    )


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


class Metrics(Request):
    """Request one metrics frame."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics"]


class SubscribeMetrics(Request):
    """Subscribe to periodic metrics frames."""

    dagger: ClassVar[bool] = True
    op: Literal["subscribe_metrics"]
    interval_ms: int = Field(default=1000, ge=100, le=3_600_000, description="Milliseconds between frames.")


class UnsubscribeMetrics(Request):
    """Stop the metrics frames."""

    dagger: ClassVar[bool] = True
    op: Literal["unsubscribe_metrics"]


class Status(Request):
    """Request the readings of one part of the daemon; other clients' shares need the operator scope."""

    op: Literal["status"]
    type: StatusType = Field(default="queue", description="Which side.")


class Usage(Request):
    """Request a client's usage by day and its remaining quota; other clients' need the operator scope."""

    op: Literal["usage"]
    client_id: Credential | None = Field(default=None, description="The client; the requesting one when absent.")
    days: int = Field(
        default=30, ge=1, le=3660, description="Number of days, including today; days begin at midnight UTC."
    )


class ListClients(Request):
    """List the connected clients; the reply is `clients`."""

    op: Literal["list_clients"]


class Kick(Request):
    """Close all sockets of a client; its sessions continue detached. The reply is `kicked`."""

    op: Literal["kick"]
    client_id: Credential = Field(description="As `clients` lists it.")


class Drain(Request):
    """Stop the daemon as SIGTERM does: `going_away` is broadcast, running turns may finish, new clients are refused.

    The reply is `draining`.
    """

    op: Literal["drain"]


class Ping(Request):
    """Request a `pong`."""

    op: Literal["ping"]


AnyRequest: Any = reduce(or_, messages_in(vars(), Request))
