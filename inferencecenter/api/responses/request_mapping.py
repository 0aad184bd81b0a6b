"""Maps a request for a response to a turn of a session: which session continues, and the turn's messages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.api.body import checked
from inferencecenter.api.message_images import with_stored_images
from inferencecenter.api.responses.conversations import (
    busy_conversation,
    find_conversation,
    is_conversation,
    load_conversation,
)
from inferencecenter.api.responses.response_schemas import Echo, McpToolName
from inferencecenter.api.responses.serializers import NO_MCP_TOOLS, echo_of, note_of, read_note, read_response_id
from inferencecenter.api.session_match import (
    ConversationRequest,
    SessionMatch,
    append_history,
    close_session,
    fork_session,
    open_session,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, MessageInParts
from inferencecenter.sessions.prompt_lookup import PromptQuery
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from inferencecenter.api.responses.conversations import StoredConversation
    from inferencecenter.api.responses.request_schemas import CreateResponse
    from inferencecenter.api.responses.response_schemas import McpOutputItem, Note, OutputCompaction, OutputItem
    from inferencecenter.protocol.values import OnFull, Priority
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.session import SessionSnapshot

_NOT_FOUND: Final = (ErrorCode.SESSION_NOT_FOUND, ErrorCode.TURN_NOT_FOUND)
_MAX_METADATA: Final = 16
EMPTY_QUESTION: Final = (ChatMessage(role="user", content=""),)
"""Replaces a missing question, so that the context can be prefilled."""
_PRIORITIES: Final[dict[str, Priority]] = {"flex": "batch", "priority": "interactive", "fast": "interactive"}
_ON_FULL: Final[dict[str, OnFull]] = {"auto": "shift", "disabled": "stop"}


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn, and the fields that its response echoes from the request.

    If its session was ``opened`` for it, it is removed if the turn cannot start. It takes the place of that of the
    ``moving`` conversation once the turn has started. Its output begins with the ``first_items``.
    """

    infer: Infer
    echo: Echo
    note: str
    opened: bool
    moving: StoredConversation | None = None
    first_items: tuple[OutputItem, ...] = ()
    mcp_tools: Mapping[str, McpToolName] = field(default_factory=lambda: NO_MCP_TOOLS)


@dataclass(frozen=True, slots=True)
class CompactedInput:
    """A compacted conversation without its instructions.

    ``item`` is its summary, and the messages ``replacement`` replace all before the ``latest`` ones. ``stored`` are the
    messages of a conversation that keeps its items.
    """

    item: OutputCompaction
    replacement: tuple[ChatMessage, ...]
    latest: tuple[ChatMessage, ...]
    stored: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a turn runs: in an existing session or in one that was ``opened``, with a ``moving`` conversation."""

    place: SessionMatch
    opened: bool = False
    moving: StoredConversation | None = None


@dataclass(frozen=True, slots=True)
class _Previous:
    """The turn of the previous response: its position, the text up to its end, and its instructions.

    Its session ``may_grow`` if the request appends nothing else.
    """

    session_id: str
    turn_id: str
    messages: tuple[ChatMessage, ...]
    instructions: str | None
    stored: bool
    may_grow: bool


def prepare_turn(  # noqa: PLR0913 - keyword-only
    context: ServerContext,
    client: Principal,
    request: CreateResponse,
    *,
    warnings: Iterable[str] = (),
    generate: bool = True,
    mcp_items: tuple[McpOutputItem, ...] = (),
    compacted: CompactedInput | None = None,
) -> PreparedTurn:
    """Find or create the session of a request, and return its turn; its response has ``mcp_items`` and ``warnings``.

    What was ``compacted`` is answered in place of the request's conversation. Without ``generate`` the turn generates
    as little as possible, as only the prefill is wanted.

    Raises:
        InferenceCenterError: ``previous_response_not_found``, ``session_busy`` while the previous response is in
            progress, ``invalid_request``; see also ``Sessions.create``, ``fork`` and ``append``.
    """
    if request.conversation_name is not None and not generate:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "a response of a conversation has to be generated", field="generate"
        )
    question = request.messages
    if not question and not generate:
        question = EMPTY_QUESTION
    if not question or question[-1].role not in ("user", "tool"):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "input must end with a message of role user, or with the output of a function",
            field="input",
        )
    echo = echo_of(
        request, model=request.model or context.models.default, created_at=context.clock(), warnings=warnings
    )
    compaction = None if compacted is None else compacted.item
    mcp_tools = _mcp_tools_of(context, client, request)
    note = note_of(echo, generate=generate, compaction=compaction, mcp_items=mcp_items, mcp_tools=mcp_tools)
    infer = infer_of(request, question, generate=generate)
    if compacted is None:
        found = _locate(context, client, request, question)
    elif request.conversation_name is None:
        found = _open(context, client, request, (*compacted.replacement, *compacted.latest))
    else:
        found = _locate_compacted(context, client, request, compacted)
    place = found.place
    infer = infer.model_copy(update={"session_id": place.session_id, "messages": list(place.remaining)})
    first_items = (*(() if compaction is None else (compaction,)), *mcp_items)
    return PreparedTurn(
        infer,
        echo,
        note=note,
        opened=found.opened,
        moving=found.moving,
        first_items=first_items,
        mcp_tools=mcp_tools,
    )


def _mcp_tools_of(context: ServerContext, client: Principal, request: CreateResponse) -> dict[str, McpToolName]:
    """Return the tools of MCP servers that the conversation has had and has now, by the names for the model."""
    offered = {
        tool.called: McpToolName(called=tool.called, server_label=tool.server, name=tool.name)
        for tool in request.mcp.tools
    }
    note = previous_note(context, client, request)
    return offered if note is None else note.mcp_by_name | offered


def previous_note(context: ServerContext, client: Principal, request: CreateResponse) -> Note | None:
    """Return the note of the previous response; ``None`` if there is none, or it cannot be continued."""
    with suppress(InferenceCenterError):  # an id that cannot be read is refused by the caller
        place = read_response_id(request.previous_response_id or "")
        return read_note(context.sessions.get_turn(client, *place).note)
    return None


async def load_context(context: ServerContext, client: Principal, request: CreateResponse) -> None:
    """Store the images of a request, and load the archived session that it continues.

    Raises:
        InferenceCenterError: See ``with_stored_images`` and ``ServerContext.load_session``.
    """
    if any(isinstance(message, MessageInParts) for message in request.given_messages):
        given = request.given_messages
        request.name_images(await with_stored_images(context, client, given, stored=request.store, field="input"))
    if request.conversation_name is not None:
        await load_conversation(context, client, request.conversation_name)
        return
    place = None
    with suppress(InferenceCenterError):  # an id that cannot be read is refused by the caller
        place = read_response_id(request.previous_response_id or "")
    if place is not None:
        await context.load_session(client, place.session_id)


def conversation_of(context: ServerContext, client: Principal, request: CreateResponse) -> tuple[ChatMessage, ...]:
    """Return the whole conversation of a request: its instructions, its history and its input.

    Raises:
        InferenceCenterError: ``previous_response_not_found``, ``session_busy`` while it is in progress, or
            ``session_not_found`` for the conversation.
    """
    before: tuple[ChatMessage, ...] = ()
    if request.conversation_name is not None:
        before = find_conversation(context.sessions, client, request.conversation_name).context
    elif request.previous_response_id is not None:
        before = _previous(context, client, request.previous_response_id).messages
    return (*_system(request), *before, *request.messages)


def query_of(request: CreateResponse, messages: tuple[ChatMessage, ...]) -> PromptQuery:
    """Return the prompt of a request whose whole conversation is ``messages``."""
    return PromptQuery(
        messages=messages, model=request.model, tools=request.wire_tools or (), thinking=thinking_of(request)
    )


def start_turn(
    context: ServerContext, client: Principal, prepared: PreparedTurn, start: Callable[[Infer, str], object]
) -> None:
    """Start a turn with ``start``, which also gets its note; on an error a session opened for it is removed.

    Raises:
        InferenceCenterError: See ``Sessions.infer``.
    """
    try:
        start(prepared.infer, prepared.note)
    except InferenceCenterError:
        if prepared.opened:
            close_session(context.sessions, client, prepared.infer.session_id)
        raise
    if prepared.moving is not None:
        has_instructions = prepared.echo.instructions is not None
        prepared.moving.move(context.sessions, client, prepared.infer.session_id, has_instructions=has_instructions)


def _locate(
    context: ServerContext, client: Principal, request: CreateResponse, question: tuple[ChatMessage, ...]
) -> _Location:
    """Return where a request continues.

    A session continues only from its end: responses after the previous one stay unchanged.
    """
    sessions = context.sessions
    if request.conversation_name is not None:
        return _locate_conversation(context, client, request, question)
    name = request.previous_response_id
    previous = None if name is None else _previous(context, client, name)
    session = None if previous is None else _extendable_session(context, client, request, previous)
    if previous is not None and session is not None:
        n_stored = request.mcp.n_stored
        if _ends_with(session, previous, n_stored) and not is_conversation(session):
            return _Location(SessionMatch(previous.session_id, question[n_stored:]))
        forked = fork_session(sessions, client, previous.session_id, turn=previous.turn_id)
        return _Location(SessionMatch(forked, question), opened=True)
    return _open(context, client, request, (*(previous.messages if previous else ()), *question))


def _open(
    context: ServerContext, client: Principal, request: CreateResponse, messages: tuple[ChatMessage, ...]
) -> _Location:
    """Return a new session for the instructions of a request and these messages."""
    conversation = ConversationRequest(
        messages=(*_system(request), *messages),
        model=request.model,
        on_full=_ON_FULL[request.truncation],
        stateless=not request.store,
        metadata=_metadata(request),
    )
    return _Location(open_session(context.sessions, client, conversation), opened=True)


def _locate_conversation(
    context: ServerContext, client: Principal, request: CreateResponse, question: tuple[ChatMessage, ...]
) -> _Location:
    """Return the session of a conversation if it matches the request's options, and a new one otherwise."""
    assert request.conversation_name is not None, "the caller has checked it"
    found = find_conversation(context.sessions, client, request.conversation_name)
    session = found.session
    if session.state is SessionState.BUSY:
        raise busy_conversation()
    options = session.model, session.config.on_full
    if found.instructions == request.instructions and options == _options(context, request):
        return _Location(SessionMatch(found.session_id, question))
    system = _system(request)
    whole = ConversationRequest(
        messages=(*system, *found.messages, *question),
        model=request.model,
        on_full=_ON_FULL[request.truncation],
        stateless=False,
    )
    place = open_session(context.sessions, client, whole)
    if found.resumes_at:
        context.sessions.hide_messages(client, place.session_id, len(system) + found.resumes_at)
    return _Location(place, opened=True, moving=found)


def _locate_compacted(
    context: ServerContext, client: Principal, request: CreateResponse, compacted: CompactedInput
) -> _Location:
    """Return the session of a conversation whose context is replaced by what was compacted; its items stay.

    Raises:
        InferenceCenterError: ``session_busy`` if the conversation has changed since.
    """
    assert request.conversation_name is not None, "the caller has checked it"
    if find_conversation(context.sessions, client, request.conversation_name).messages != compacted.stored:
        raise busy_conversation()
    question, latest = request.messages, compacted.latest
    summarized = question[: max(0, len(question) - len(latest))]
    found = _locate_conversation(context, client, request, (*summarized, *compacted.replacement, *latest))
    sessions, session_id = context.sessions, found.place.session_id
    place = append_history(sessions, client, session_id, found.place.remaining)
    n_messages = len(sessions.snapshot(client, session_id).history.messages) + len(place.remaining)
    sessions.hide_messages(client, session_id, n_messages - len(compacted.replacement) - len(latest))
    return replace(found, place=place)


def _system(request: CreateResponse) -> tuple[ChatMessage, ...]:
    return () if request.instructions is None else (ChatMessage(role="system", content=request.instructions),)


def _previous(context: ServerContext, client: Principal, name: str) -> _Previous:
    try:
        place = read_response_id(name)
        facts = context.sessions.get_turn(client, *place)
    except InferenceCenterError as error:
        if error.code not in _NOT_FOUND:
            raise
        raise _lost() from None
    if facts.running:
        raise InferenceCenterError(
            ErrorCode.SESSION_BUSY, "the previous response is not complete", field="previous_response_id"
        )
    if facts.answer is None:
        raise _lost()
    note = read_note(facts.note)
    if note is None:
        messages = (*facts.before, *facts.input_messages, facts.answer)
        return _Previous(*place, messages, instructions=None, stored=True, may_grow=True)
    messages = (*facts.before, *_question(facts.input_messages), *((facts.answer,) if note.generate else ()))
    history = messages if note.instructions is None else messages[1:]
    return _Previous(*place, history, instructions=note.instructions, stored=note.store, may_grow=note.generate)


def _question(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    return () if messages == EMPTY_QUESTION else messages


def _lost() -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND,
        field="previous_response_id",
        hint="Send the whole conversation as input, without previous_response_id.",
    )


def _extendable_session(
    context: ServerContext, client: Principal, request: CreateResponse, previous: _Previous
) -> SessionSnapshot | None:
    """Return the previous response's session if it is idle and matches the request's options, ``None`` otherwise."""
    if not previous.may_grow or request.instructions != previous.instructions or request.store != previous.stored:
        return None
    session = context.sessions.snapshot(client, previous.session_id)
    matches = (session.model, session.config.on_full) == _options(context, request)
    return session if session.state is SessionState.IDLE and matches else None


def _options(context: ServerContext, request: CreateResponse) -> tuple[str, OnFull]:
    """Return the model and the behavior of a full context that the session of a request has."""
    return request.model or context.models.default, _ON_FULL[request.truncation]


def _ends_with(session: SessionSnapshot, previous: _Previous, n_results: int) -> bool:
    """Return whether the previous response and results of its calls are the end of the session."""
    turns = session.turn_log.turns
    end = previous.turn_id, len(session.history.messages) - n_results
    return bool(turns) and (turns[-1].turn_id, turns[-1].messages) == end


def _metadata(request: CreateResponse) -> dict[str, str]:
    """Return the session's metadata, including other fields about the caller as far as there is room."""
    names = ("user", "safety_identifier", "prompt_cache_key")
    more = {name: value for name in names if (value := getattr(request, name)) is not None}
    return dict(list((request.metadata | more).items())[:_MAX_METADATA])


def infer_of(request: CreateResponse, question: tuple[ChatMessage, ...], *, generate: bool = True) -> Infer:
    """Return the turn, still without a session and with the last message only.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    fields: dict[str, Any] = {
        "op": "infer",
        "session_id": "-",
        "messages": [question[-1]],
        "params": _params(request) if generate else {**_params(request), "max_tokens": 1},
        "tools": request.wire_tools,
        "tool_choice": request.wire_tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "json_schema": request.json_schema,
        "strict_schema": request.strict_schema,
        "thinking": thinking_of(request),
        "thinking_required": False,
        "n_probs": request.n_probs,
        "priority": _PRIORITIES.get(request.service_tier),
    }
    return checked(Infer, fields)


def thinking_of(request: CreateResponse) -> bool | None:
    """Return whether the model reasons, ``None`` for its default."""
    return None if request.reasoning.effort is None else request.reasoning.effort != "none"


def _params(request: CreateResponse) -> dict[str, Any]:
    """Return the turn's parameters.

    Raises:
        InferenceCenterError: ``invalid_request`` for one that is given twice.
    """
    own = {
        **request.sampler_params,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_output_tokens,
    }
    given = {name: value for name, value in own.items() if value is not None}
    for name in given.keys() & request.params.keys():
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{name} is given twice: also in params", field=f"params.{name}"
        )
    return {**request.params, **given}
