"""Sessions for stateless clients: finds the session that matches the conversation sent, and the messages that it lacks.

Several choices for one question are turns in sessions of their own.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.api.request_turns import NullSink, RequestTurns
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.requests import Append, CloseSession, CreateSession, ForkSession, RewindSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import ChatMessage, MessageInParts, Mode, OnFull
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.manager import SessionManager


_MOST_AT_ONCE: Final = 1000
_NULL_SINK: Final = NullSink()
_NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest:
    """A whole conversation to be answered; the last message is the question.

    ``stateless`` means that its session is kept only for its KV. ``metadata`` is for a newly created session.
    """

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    mode: Mode = "chat"
    on_full: OnFull = "stop"
    stateless: bool = True
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class SessionMatch:
    """A session and the messages that it lacks, ending with the question."""

    session_id: str
    remaining: tuple[ChatMessage, ...]


def resolve_session(sessions: SessionManager, client: Principal, conversation: ConversationRequest) -> SessionMatch:
    """Return where a conversation continues: the client's session with the longest matching prefix, or a new one.

    A stateless session is rewound to the end of the match; any other session is forked there.

    Raises:
        InferenceCenterError: See ``Sessions.create``, ``rewind``, ``fork`` and ``append``.
    """
    found = sessions.find(
        client,
        conversation.messages,
        stateless=conversation.stateless,
        model=conversation.model,
        mode=conversation.mode,
        on_full=conversation.on_full,
    )
    if found is None:
        return open_session(sessions, client, conversation)
    session_id = found.session_id
    if found.turn is not None and conversation.stateless:
        sessions.rewind(client, RewindSession(op="rewind_session", session_id=session_id, turn=found.turn), _NULL_SINK)
    elif found.turn is not None:
        session_id = fork_session(sessions, client, session_id, turn=found.turn)
    rest = conversation.messages[found.n_messages :]
    if found.call_ids:
        rest = tuple(_with_call_ids(message, found.call_ids) for message in rest)
    return append_history(sessions, client, session_id, rest)


def _with_call_ids(message: ChatMessage, call_ids: Mapping[str, str]) -> ChatMessage:
    """Return a message with the session's ids of tool calls."""
    if message.tool_call_id is not None:
        call_id = call_ids.get(message.tool_call_id, message.tool_call_id)
        return message.model_copy(update={"tool_call_id": call_id})
    if not message.tool_calls:
        return message
    calls = (
        call.model_copy(update={"call_id": call_ids.get(call.call_id, call.call_id)}) for call in message.tool_calls
    )
    return message.model_copy(update={"tool_calls": tuple(calls)})


def fork_session(sessions: SessionManager, client: Principal, session_id: str, *, turn: str | None = None) -> str:
    """Fork a session at a turn.

    Raises:
        InferenceCenterError: See ``Sessions.fork``.
    """
    request = ForkSession(op="fork_session", session_id=session_id, turn=turn)
    created = sessions.fork(client, request, _NULL_SINK)
    sessions.detach(_NULL_SINK)
    return created.session_id


def close_session(sessions: SessionManager, client: Principal, session_id: str) -> None:
    """Close a session that is not needed any more."""
    sessions.close(client, CloseSession(op="close_session", session_id=session_id))


def open_session(sessions: SessionManager, client: Principal, conversation: ConversationRequest) -> SessionMatch:
    """Create a session for a conversation.

    Raises:
        InferenceCenterError: See ``Sessions.create`` and ``append``.
    """
    messages = conversation.messages
    system = messages[0].content if messages[0].role == "system" and len(messages) > 1 else None
    request = CreateSession(
        op="create_session",
        system=system,
        mode=conversation.mode,
        model=conversation.model,
        on_full=conversation.on_full,
        on_disconnect="detach",
        metadata=dict(conversation.metadata) or None,
    )
    created = sessions.create(client, request, _NULL_SINK, stateless=conversation.stateless)
    sessions.detach(_NULL_SINK)
    return append_history(sessions, client, created.session_id, messages if system is None else messages[1:])


def append_history(
    sessions: SessionManager, client: Principal, session_id: str, messages: tuple[ChatMessage, ...]
) -> SessionMatch:
    """Append the messages up to the last answer to a session; the rest is the question."""
    n_answered = max((n for n, message in enumerate(messages, start=1) if message.role == "assistant"), default=0)
    for start in range(0, n_answered, _MOST_AT_ONCE):
        some: list[ChatMessage | MessageInParts] = list(messages[start : min(start + _MOST_AT_ONCE, n_answered)])
        sessions.append(client, Append(op="append", session_id=session_id, messages=some), _NULL_SINK)
    return SessionMatch(session_id, messages[n_answered:])


def with_request_fields(error: InferenceCenterError, names: Mapping[str, str]) -> InferenceCenterError:
    """Return an error of ``infer`` with its fields renamed to those of the request."""
    field = names.get(error.field or "")
    if field is None:
        return error
    return InferenceCenterError(
        error.code,
        error.message.replace(error.field or "", field),
        hint=error.hint,
        field=field,
        retry_after_ms=error.retry_after_ms,
    )


@contextmanager
def run_choices(  # noqa: PLR0913 - all by name
    context: ServerContext,
    request_context: RequestContext,
    conversations: Sequence[ConversationRequest],
    *,
    n: int,
    infer: Callable[[SessionMatch, int], Infer],
    names: Mapping[str, str] = _NO_NAMES,
) -> Iterator[RequestTurns]:
    """Answer each conversation ``n`` times; turn ``i * n + j`` is choice ``j`` of conversation ``i``.

    The session of a conversation's first choice is kept for its KV, as the next request may have the same prefix. Those
    of the others are closed at the end.

    Args:
        context: The rest of the daemon.
        request_context: The request.
        conversations: Conversations to answer.
        n: Number of choices.
        infer: Returns the turn of a choice, given the session match and the index of the choice.
        names: Fields of ``infer`` by their names in the request, by which errors call them.

    Raises:
        InferenceCenterError: See ``resolve_session`` and ``RequestTurns.begin``.
    """
    sessions, client = context.sessions, request_context.caller.client
    spare: list[str] = []
    try:
        with RequestTurns(context, request_context) as turns:
            for conversation in conversations:
                first = resolve_session(sessions, client, conversation)
                places = [first]
                for _ in range(n - 1):
                    spare.append(fork_session(sessions, client, first.session_id))
                    places.append(replace(first, session_id=spare[-1]))
                for choice, place in enumerate(places):
                    turns.begin(infer(place, choice))
            yield turns
    except InferenceCenterError as error:
        raise with_request_fields(error, names) from None
    finally:
        for session_id in spare:
            with suppress(InferenceCenterError):  # it was purged meanwhile
                close_session(sessions, client, session_id)
