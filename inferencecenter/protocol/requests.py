"""Every op a client may send."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints, model_validator

from inferencecenter.protocol.base import DAGGER, Request, SessionId, TurnId
from inferencecenter.protocol.trace_context import Traceparent
from inferencecenter.protocol.values import (
    ChatMessage,
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
"""Characters of a grammar or a regular expression, and of a JSON Schema when it is written out."""

RawParams = dict[str, Any]
"""Parameters as the client wrote them; ``params.parse_params`` gives them meaning."""

START: Final = "start"
"""Stands for the place before the first turn, where a turn's id is asked for."""

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Credential = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Protocol = Annotated[Literal[1] | None, Field(description="1 makes this a v1 socket; absent, an old one.")]


class Hello(Request):
    """Ask who answers; allowed at any time, also before authentication."""

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
    def _one_way(self) -> Auth:
        pair = self.client_id is not None and self.api_key is not None
        partial = (self.client_id is None) != (self.api_key is None)
        if partial or pair == (self.token is not None):
            raise ValueError("give either token, or client_id and api_key")
        return self


class CreateSession(Request):
    """Open a conversation with its own context."""

    dagger: ClassVar[bool] = True
    op: Literal["create_session"]
    system: str | None = Field(default=None, description="System prompt.")
    mode: Mode = Field(default="chat", description="`chat` applies the model's template, `raw` continues plain text.")
    model: str | None = Field(
        default=None,
        max_length=256,
        description="Model name, as `list_models` tells. Without it the session goes with the daemon's choice, also "
        "when that changes.",
    )
    params: Annotated[RawParams | None, DAGGER] = Field(default=None, description="Session level of parameters.")
    priority: Priority | None = Field(default=None, description="Class of this session's turns.")
    on_full: OnFull | None = Field(
        default=None,
        description=(
            "What happens when the context is full: `shift` goes on without the oldest turns, `stop` ends the answer. "
            "Without it `shift` in mode `chat`, `stop` in mode `raw`."
        ),
    )
    on_disconnect: OnDisconnect | None = Field(
        default=None,
        description=(
            "What happens when the socket is gone: `detach` lets the session and its turn go on, `close` ends both. "
            "Without it `detach` on v1 sockets, `close` on sockets of the first protocol."
        ),
    )
    store: bool = Field(default=True, description="Whether the session may be written to disk.")
    ttl_s: float | None = Field(
        default=None, gt=0, le=31_536_000, description="Idle seconds before it expires; less than 1 counts as 1."
    )
    metadata: Metadata | None = Field(default=None, description="Up to 16 strings of your own, given back as they are.")


class Infer(Request):
    """Start a turn: say something and have it answered."""

    dagger: ClassVar[bool] = True
    op: Literal["infer"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")
    prompt: Annotated[str | None, DAGGER] = Field(default=None, min_length=1, description="What the user says.")
    messages: list[ChatMessage] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        fail_fast=True,
        description="New messages, the last from `user` or `tool`.",
    )
    params: Annotated[RawParams | None, DAGGER] = Field(default=None, description="Turn level of parameters.")
    tools: list[Tool] | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        fail_fast=True,
        description="Tools that the model may ask for, each name once.",
    )
    tool_choice: ToolChoice = Field(
        default="auto",
        description="Whether it does: `auto` leaves it to the model, `none` forbids, `required` demands, and `{name}` "
        "demands one tool.",
    )
    parallel_tool_calls: bool = Field(default=True, description="Whether it may ask for several at once.")
    json_schema: dict[str, Any] | bool | None = Field(
        default=None, description="The answer is JSON that this JSON Schema accepts."
    )
    regex: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description="This expression matches the whole answer.",
    )
    grammar: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description="This grammar spells the answer: GBNF where its rules have `::=`, else Lark.",
    )
    thinking: bool | None = Field(
        default=None,
        description="Whether the model thinks before it answers, where its template lets one choose; without it as the "
        "template has it.",
    )
    n_probs: int | None = Field(default=None, ge=0, le=20, description="Short for `params.n_probs`.")
    priority: Priority | None = Field(default=None, description="Class of this turn; raising it needs the scope.")
    turn_key: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, description="A second `infer` with the same key attaches to the first turn."
    )
    traceparent: Traceparent | None = Field(
        default=None,
        description="Span of the client's trace that the turn belongs to, as in W3C Trace Context; without it the one "
        "that came with the upgrade.",
    )

    @model_validator(mode="after")
    def _one_input(self) -> Infer:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.messages[-1].role not in ("user", "tool"):
            raise ValueError("the last of messages must have role user or tool")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Infer:
        forms = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(forms) > 1:
            raise ValueError(f"{forms[0]} excludes {forms[1]}")
        if forms and self.tools is not None and self.tool_choice != "none":
            raise ValueError(f"{forms[0]} excludes tools, unless tool_choice is none")
        return self

    @model_validator(mode="after")
    def _known_tools(self) -> Infer:
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
    """End the running turn; what was said stays unless `discard` is set."""

    dagger: ClassVar[bool] = True
    op: Literal["abort"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")
    turn_id: TurnId | None = Field(default=None, description="Abort only if this turn is the running one.")
    discard: bool = Field(default=False, description="Also forget the turn: its question and its partial answer.")


class CloseSession(Request):
    """End a session and forget it."""

    dagger: ClassVar[bool] = True
    op: Literal["close_session"]
    session_id: Annotated[SessionId, DAGGER] = Field(description="The session.")


class ResumeSession(Request):
    """Come back to a session from this socket; `session_resumed` answers, then the events that were missed.

    The socket that had the session gets `session_detached`.
    """

    op: Literal["resume_session"]
    session_id: SessionId = Field(description="The session.")
    epoch: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="As `session_created` or `session_resumed` said last; without it nothing is missed.",
    )
    last_seq: int = Field(default=0, ge=0, description="Number of the last event that arrived; 0 if none did.")


class Append(Request):
    """Add history without generating: few-shot examples, imports."""

    op: Literal["append"]
    session_id: SessionId = Field(description="The session.")
    messages: list[ChatMessage] = Field(
        min_length=1, max_length=1000, fail_fast=True, description="Messages to add, in order."
    )


class ForkSession(Request):
    """Open another session with the same beginning; `session_created` answers, with `parent`.

    Everything that was chosen for the session holds for the new one. Its turns keep their ids, so that it can be taken
    back to any of them.
    """

    op: Literal["fork_session"]
    session_id: SessionId = Field(description="The session to copy.")
    turn: TurnId | None = Field(
        default=None,
        description="Id of the last turn to take over; `start` takes over what came before the first turn. Without it "
        "everything is taken over.",
    )


class RewindSession(Request):
    """Take a session back to where it was when a turn ended: what came later is gone.

    The turns that stay are not read again.
    """

    op: Literal["rewind_session"]
    session_id: SessionId = Field(description="The session.")
    turn: TurnId = Field(description="Id of the last turn to keep; `start` goes back to before the first turn.")


class SetMetadata(Request):
    """Give a session other metadata, as a title; `metadata_set` tells so on all sockets of the client.

    What the session holds and when it was used last stays as it is, and a running turn goes on.
    """

    op: Literal["set_metadata"]
    session_id: SessionId = Field(description="The session.")
    metadata: Metadata = Field(description="Up to 16 strings of your own, in place of those that it had.")


class GetSession(Request):
    """Read a session: transcript, usage, state."""

    op: Literal["get_session"]
    session_id: SessionId = Field(description="The session.")


class ListSessions(Request):
    """List the client's own sessions, oldest first."""

    op: Literal["list_sessions"]
    limit: int = Field(default=100, ge=1, le=1000, description="Page size.")
    after: SessionId | None = Field(default=None, description="`next` of the page before.")


class ListModels(Request):
    """Ask which models there are; `models` answers."""

    op: Literal["list_models"]


class LoadModel(Request):
    """Load a model and make it the one of all sessions that name none; `swap` frames answer, then `model_changed`.

    Nobody's turn is cut: those that run end with the model that began them.
    """

    op: Literal["load_model"]
    name: ModelName = Field(description="A name that `models` lists.")


class UnloadModel(Request):
    """Free the memory of a model when its turns have ended; the next turn that wants it loads it again."""

    op: Literal["unload_model"]
    name: ModelName = Field(description="A name that `models` lists.")


class Metrics(Request):
    """Ask for one metrics frame."""

    dagger: ClassVar[bool] = True
    op: Literal["metrics"]


class SubscribeMetrics(Request):
    """Ask for a metrics frame every interval."""

    dagger: ClassVar[bool] = True
    op: Literal["subscribe_metrics"]
    interval_ms: int = Field(default=1000, ge=100, le=3_600_000, description="Milliseconds between frames.")


class UnsubscribeMetrics(Request):
    """Stop the metrics frames."""

    dagger: ClassVar[bool] = True
    op: Literal["unsubscribe_metrics"]


class Status(Request):
    """Ask about one side of the daemon; others' shares need the operator scope."""

    op: Literal["status"]
    type: StatusType = Field(default="queue", description="Which side.")


class Usage(Request):
    """Ask what a client used by day, and what its token may still use; another's needs the operator scope."""

    op: Literal["usage"]
    client_id: Credential | None = Field(default=None, description="Whose; one's own when absent.")
    days: int = Field(
        default=30, ge=1, le=3660, description="So many days, today included; they begin at midnight UTC."
    )


class ListClients(Request):
    """Ask which clients are connected; `clients` answers."""

    op: Literal["list_clients"]


class Kick(Request):
    """Close all sockets of a client; its sessions go on without them. `kicked` answers."""

    op: Literal["kick"]
    client_id: Credential = Field(description="As `clients` lists it.")


class Drain(Request):
    """Have the daemon stop as SIGTERM does: everybody hears `going_away`, running turns get time, nobody new gets in.

    `draining` answers.
    """

    op: Literal["drain"]


class Ping(Request):
    """Ask for a `pong`."""

    op: Literal["ping"]


AnyRequest = (
    Hello
    | Auth
    | CreateSession
    | Infer
    | Abort
    | CloseSession
    | ResumeSession
    | Append
    | ForkSession
    | RewindSession
    | SetMetadata
    | GetSession
    | ListSessions
    | ListModels
    | LoadModel
    | UnloadModel
    | Metrics
    | SubscribeMetrics
    | UnsubscribeMetrics
    | Status
    | Usage
    | ListClients
    | Kick
    | Drain
    | Ping
)
