"""OpenAI's Conversations API: a conversation is one of its client's stored sessions.

An entry of the session's metadata holds the conversation's id, and whether its first message is the instructions of a
response, which are not an item. A response continues the conversation in its session. With other instructions, another
model or another truncation the whole conversation moves to a new session, as after the deletion of an item. The former
session is closed unless responses can be retrieved from it. Since forks copy metadata, the entry also names its
session.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from pydantic import Field, StringConstraints

from inferencecenter.api.body import RequestModel, checked
from inferencecenter.api.endpoint import Document, Operation, document
from inferencecenter.api.foreign_fields import DialectModel
from inferencecenter.api.message_images import with_stored_images
from inferencecenter.api.request_turns import NullSink
from inferencecenter.api.responses.request_schemas import (
    RESPONSE_FIELDS,
    InputItem,
    ListItems,
    messages_of,
)
from inferencecenter.api.responses.response_schemas import ItemList, ResponseObject
from inferencecenter.api.responses.serializers import input_items, page_of
from inferencecenter.api.session_match import close_session
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import Append, CreateSession, ListSessions, SetMetadata
from inferencecenter.protocol.values import MetadataText
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.api.endpoint import Call, Reply
    from inferencecenter.protocol.values import ChatMessage, MessageInParts, OnFull
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.manager import SessionManager
    from inferencecenter.sessions.session import SessionSnapshot

PATH: Final = "/v1/conversations"
_ONE: Final = PATH + "/{conversation_id}"
_ITEMS: Final = _ONE + "/items"
_ITEM: Final = _ITEMS + "/{item_id}"
_MOST_ITEMS: Final = 20
_MOST_AT_ONCE: Final = 1000
_SEARCHED_SESSIONS: Final = 5000
"""Archived sessions searched for a conversation at the charge of one operation; metadata has no index."""
_NULL_SINK: Final = NullSink()

_ENTRY: Final = "inferencecenter.conversation"
_VALUE: Final = re.compile(r"(conv_[A-Za-z0-9_-]{22}) (s_[A-Za-z0-9_-]+) (\d+) ([01])")

ConversationMetadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], MetadataText],
    Field(max_length=15, fail_fast=True),
]


# Storage.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """A conversation in its session: ``created_at`` is Unix seconds."""

    name: str
    created_at: int
    session: SessionSnapshot
    has_instructions: bool

    @property
    def session_id(self) -> str:
        return self.session.config.session_id

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the client."""
        return {name: value for name, value in self.session.config.metadata.items() if name != _ENTRY}

    @property
    def instructions(self) -> str | None:
        """The instructions of the latest response."""
        return self.session.history.messages[0].content if self.has_instructions else None

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages without the instructions."""
        return self.session.history.messages[int(self.has_instructions) :]

    @property
    def context(self) -> tuple[ChatMessage, ...]:
        """The messages that are in the model's context."""
        history = self.session.history
        return history.view.of(history.messages)[int(self.has_instructions) :]

    @property
    def resumes_at(self) -> int:
        """Index of the first message from which on all are in the model's context."""
        return max(0, self.session.history.view.resumes_at - int(self.has_instructions))

    def move(self, sessions: SessionManager, client: Principal, session_id: str, *, has_instructions: bool) -> None:
        """Move the conversation to another session with the same messages.

        Raises:
            InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
        """
        entry = _entry(self.name, session_id, self.created_at, has_instructions=has_instructions)
        _set_metadata(sessions, client, session_id, self.metadata | entry)
        if self.session.turn_log.turns:
            _set_metadata(sessions, client, self.session_id, self.metadata)
        else:
            close_session(sessions, client, self.session_id)


def find_conversation(sessions: SessionManager, client: Principal, name: str) -> StoredConversation:
    """Return a conversation of the client.

    Raises:
        InferenceCenterError: ``session_not_found``, also for another client's.
    """
    for session_id, value in sessions.tagged(client, _ENTRY).items():
        match = _VALUE.fullmatch(value)
        if match is not None and match.group(1, 2) == (name, session_id):
            return StoredConversation(
                name=name,
                created_at=int(match[3]),
                session=sessions.snapshot(client, session_id),
                has_instructions=match[4] == "1",
            )
    raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "No such conversation.", field="conversation")


async def load_conversation(context: ServerContext, client: Principal, name: str) -> None:
    """Load the session of a conversation of the client if it is archived; costs by their number.

    Raises:
        InferenceCenterError: ``rate_limited``, and see ``ServerContext.load_session``.
    """
    sessions = context.sessions
    if not any(value.startswith(f"{name} ") for value in sessions.tagged(client, _ENTRY).values()):
        n_units = sessions.archive.size_of(client.client_id).n_sessions // _SEARCHED_SESSIONS
        context.operations.charge(client.client_id, n_units=n_units)
        for session_id in await sessions.archive.find_tagged(client, _ENTRY, f"{name} "):
            await context.load_session(client, session_id)


def is_conversation(session: SessionSnapshot) -> bool:
    """Return whether a session is a conversation's."""
    config = session.config
    match = _VALUE.fullmatch(config.metadata.get(_ENTRY, ""))
    return match is not None and match[2] == config.session_id


def _entry(name: str, session_id: str, created_at: int, *, has_instructions: bool) -> dict[str, str]:
    return {_ENTRY: f"{name} {session_id} {created_at} {int(has_instructions)}"}


def _set_metadata(sessions: SessionManager, client: Principal, session_id: str, metadata: Mapping[str, str]) -> None:
    sessions.set_metadata(client, SetMetadata(op="set_metadata", session_id=session_id, metadata=dict(metadata)))


def _open(
    sessions: SessionManager,
    client: Principal,
    messages: tuple[ChatMessage, ...],
    *,
    model: str | None = None,
    on_full: OnFull = "stop",
) -> str:
    """Open a session with these messages.

    Raises:
        InferenceCenterError: See ``Sessions.create`` and ``append``; no session is left then.
    """
    request = CreateSession(op="create_session", model=model, on_full=on_full, on_disconnect="detach")
    session_id = sessions.create(client, request, _NULL_SINK).session_id
    sessions.detach(_NULL_SINK)
    try:
        _append(sessions, client, session_id, messages)
    except InferenceCenterError:
        close_session(sessions, client, session_id)
        raise
    return session_id


def _append(sessions: SessionManager, client: Principal, session_id: str, messages: tuple[ChatMessage, ...]) -> None:
    for start in range(0, len(messages), _MOST_AT_ONCE):
        some: list[ChatMessage | MessageInParts] = list(messages[start : start + _MOST_AT_ONCE])
        sessions.append(client, Append(op="append", session_id=session_id, messages=some), _NULL_SINK)


# Requests and responses.


class CreateConversation(DialectModel):
    """Request for a conversation."""

    items: list[InputItem] = Field(default=[], max_length=_MOST_ITEMS, fail_fast=True, description="Its first items.")
    metadata: ConversationMetadata = Field(
        default={}, description="Up to 15 strings of the client, returned unchanged."
    )


class UpdateConversation(DialectModel):
    """Changes of a conversation."""

    metadata: ConversationMetadata = Field(default={}, description="Strings of the client, in place of the former.")


class AddItems(DialectModel):
    """Items to add to a conversation."""

    items: list[InputItem] = Field(
        min_length=1, max_length=_MOST_ITEMS, fail_fast=True, description="The items, in order."
    )


class RemainingItems(RequestModel):
    """The items of a conversation without a deleted one."""

    items: list[InputItem]


class ConversationObject(ResponseObject):
    """A conversation."""

    id: str = Field(description="Its id.")
    object: Literal["conversation"] = "conversation"
    created_at: int = Field(description="Unix seconds.")
    metadata: dict[str, str] = Field(description="Strings of the client.")


class DeletedConversation(ResponseObject):
    """Confirmation of a conversation's deletion."""

    id: str = Field(description="Its id.")
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


def _items(messages: Iterable[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """Return the items of messages.

    An item's id is the digest of its content and counts equal items, so that it does not change when others are
    deleted.
    """
    seen: Counter[str] = Counter()
    found = input_items(tuple(messages), "")
    for item in found:
        kind = item.pop("id").partition("_")[0]
        digest = blake2b(orjson.dumps(item), digest_size=12).hexdigest()
        seen[digest] += 1
        item["id"] = f"{kind}_{digest}_{seen[digest]}"
    return found


def _without(messages: tuple[ChatMessage, ...], item_id: str) -> tuple[ChatMessage | MessageInParts, ...]:
    """Return the messages without an item.

    Raises:
        InferenceCenterError: ``turn_not_found``.
    """
    items = _items(messages)
    place = _place(items, item_id)
    return messages_of(checked(RemainingItems, {"items": [*items[:place], *items[place + 1 :]]}).items, "items")


def _place(items: tuple[dict[str, Any], ...], item_id: str) -> int:
    """Return the index of an item.

    Equal items are indistinguishable: once some are deleted, the last one represents those with higher numbers.

    Raises:
        InferenceCenterError: ``turn_not_found``.
    """
    name = item_id.rpartition("_")[0]
    equal = [index for index, item in enumerate(items) if item["id"].rpartition("_")[0] == name]
    if not equal:
        raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, "No such item.")
    return next((index for index in equal if items[index]["id"] == item_id), equal[-1])


# Handlers.


async def _with_images(call: Call, messages: Sequence[ChatMessage | MessageInParts]) -> tuple[ChatMessage, ...]:
    return await with_stored_images(call.context, call.caller.client, messages, stored=True, field="items")


async def create(call: Call) -> Reply:
    """Create a conversation."""
    body: CreateConversation = call.body
    sessions, client = call.context.sessions, call.caller.client
    session_id = _open(sessions, client, await _with_images(call, messages_of(body.items, "items")))
    name, created_at = f"conv_{secrets.token_urlsafe(16)}", int(call.context.clock())
    entry = _entry(name, session_id, created_at, has_instructions=False)
    _set_metadata(sessions, client, session_id, body.metadata | entry)
    await _stored(call)
    return document(ConversationObject(id=name, created_at=created_at, metadata=body.metadata).model_dump())


async def retrieve(call: Call) -> Reply:
    """Return a conversation."""
    return _document(await _find(call))


async def update(call: Call) -> Reply:
    """Replace a conversation's metadata."""
    body: UpdateConversation = call.body
    found = await _find(call)
    entry = {_ENTRY: found.session.config.metadata[_ENTRY]}
    _set_metadata(call.context.sessions, call.caller.client, found.session_id, body.metadata | entry)
    await _stored(call)
    return _document(await _find(call))


async def delete(call: Call) -> Reply:
    """Delete a conversation and the responses in its session."""
    found = await _find(call)
    close_session(call.context.sessions, call.caller.client, found.session_id)
    await _stored(call)
    return document(DeletedConversation(id=found.name).model_dump())


async def create_items(call: Call) -> Reply:
    """Add items to a conversation."""
    body: AddItems = call.body
    messages = await _with_images(call, messages_of(body.items, "items"))
    found = await _find_whole(call)
    if not messages:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "items are reasoning without an answer", field="items")
    _append(call.context.sessions, call.caller.client, found.session_id, messages)
    await _stored(call)
    return await _in_worker(call, partial(_added_items, found.messages, messages))


async def list_items(call: Call) -> Reply:
    """List the items of a conversation."""
    return await _in_worker(call, partial(_page, (await _find_whole(call)).messages, call.query))


async def retrieve_item(call: Call) -> Reply:
    """Return an item of a conversation."""
    return await _in_worker(call, partial(_item_document, (await _find_whole(call)).messages, call.path["item_id"]))


async def delete_item(call: Call) -> Reply:
    """Delete an item: the conversation moves to a session with the other items."""
    client, sessions = call.caller.client, call.context.sessions
    before = await _find_whole(call)
    others = await call.context.worker.run(client.client_id, partial(_without, before.messages, call.path["item_id"]))
    rest = await _with_images(call, others)
    found = await _find(call)
    if found.session.state is SessionState.BUSY or found.messages != before.messages:
        raise busy_conversation()
    session = found.session
    model = None if session.model == call.context.models.default else session.model
    session_id = _open(sessions, client, rest, model=model, on_full=session.config.on_full)
    found.move(sessions, client, session_id, has_instructions=False)
    await _stored(call)
    return _document(await _find(call))


def busy_conversation() -> InferenceCenterError:
    """Return the error of a conversation to which a response is being added."""
    return InferenceCenterError(
        ErrorCode.SESSION_BUSY, "a response of the conversation is in progress", field="conversation"
    )


async def _find(call: Call) -> StoredConversation:
    await load_conversation(call.context, call.caller.client, call.path["conversation_id"])
    return find_conversation(call.context.sessions, call.caller.client, call.path["conversation_id"])


async def _find_whole(call: Call) -> StoredConversation:
    """Return a conversation to be read or copied as a whole, which is charged by its size.

    Raises:
        InferenceCenterError: ``rate_limited``; see also ``find_conversation``.
    """
    found, client = await _find(call), call.caller.client
    n_chars = call.context.sessions.session_chars(client, found.session_id)
    call.context.operations.charge(client.client_id, n_chars=n_chars)
    return found


def _document(found: StoredConversation) -> Document:
    answer = ConversationObject(id=found.name, created_at=found.created_at, metadata=found.metadata)
    return document(answer.model_dump())


async def _stored(call: Call) -> None:
    """Wait until the client's latest change is stored."""
    client_id = call.caller.client.client_id
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish() -> None:
        if not stored.done():
            stored.set_result(None)

    call.context.sessions.journal_for(ListSessions(op="list_sessions"), client_id).release(finish)
    await call.request_context.wait_for(stored)


async def _in_worker(call: Call, work: partial[Document]) -> Document:
    """Run work linear in the conversation's length, round-robin over clients."""
    return await call.context.worker.run(call.caller.client.client_id, work)


def _added_items(before: tuple[ChatMessage, ...], added: tuple[ChatMessage, ...]) -> Document:
    n_before = len(input_items(before, ""))
    items = _items((*before, *added))[n_before:]
    answer = ItemList(data=items, first_id=items[0]["id"], last_id=items[-1]["id"], has_more=False)
    return document(answer.model_dump())


def _page(messages: tuple[ChatMessage, ...], query: ListItems) -> Document:
    return document(page_of(_items(messages), query).model_dump())


def _item_document(messages: tuple[ChatMessage, ...], item_id: str) -> Document:
    items = _items(messages)
    return document(items[_place(items, item_id)])


_FOUND_ERRORS: Final = (ErrorCode.SESSION_NOT_FOUND,)
_OPEN_ERRORS: Final = (
    ErrorCode.SESSION_LIMIT,
    ErrorCode.QUOTA_EXCEEDED,
    ErrorCode.CONTEXT_FULL,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.MODEL_LOADING,
    ErrorCode.OVERLOADED,
)
_CHANGE_ERRORS: Final = (*_FOUND_ERRORS, ErrorCode.SESSION_BUSY, ErrorCode.OVERLOADED)

OPERATIONS: Final = (
    Operation(
        method="POST",
        path=PATH,
        summary="Create a conversation.",
        handler=create,
        body=CreateConversation,
        answer=ConversationObject,
        errors=_OPEN_ERRORS,
        charged=True,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="GET",
        path=_ONE,
        summary="Retrieve a conversation.",
        handler=retrieve,
        answer=ConversationObject,
        errors=_FOUND_ERRORS,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="POST",
        path=_ONE,
        summary="Replace the metadata of a conversation.",
        handler=update,
        body=UpdateConversation,
        answer=ConversationObject,
        errors=_CHANGE_ERRORS,
        charged=True,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="DELETE",
        path=_ONE,
        summary="Delete a conversation.",
        handler=delete,
        answer=DeletedConversation,
        errors=_FOUND_ERRORS,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="POST",
        path=_ITEMS,
        summary="Add items to a conversation.",
        handler=create_items,
        body=AddItems,
        answer=ItemList,
        errors=(*_CHANGE_ERRORS, ErrorCode.CONTEXT_FULL, ErrorCode.QUOTA_EXCEEDED),
        charged=True,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="GET",
        path=_ITEMS,
        summary="List the items of a conversation.",
        handler=list_items,
        query=ListItems,
        answer=ItemList,
        errors=_FOUND_ERRORS,
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="GET",
        path=_ITEM,
        summary="Retrieve an item of a conversation.",
        handler=retrieve_item,
        errors=(*_FOUND_ERRORS, ErrorCode.TURN_NOT_FOUND),
        fields=RESPONSE_FIELDS,
    ),
    Operation(
        method="DELETE",
        path=_ITEM,
        summary="Delete an item of a conversation.",
        handler=delete_item,
        answer=ConversationObject,
        errors=(*_CHANGE_ERRORS, *_OPEN_ERRORS, ErrorCode.TURN_NOT_FOUND),
        fields=RESPONSE_FIELDS,
    ),
)
"""HTTP operations of conversations."""
