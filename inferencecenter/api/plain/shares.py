"""``GET /shares/{share_id}``: a shared conversation and its images, for any account that has its link."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from pydantic import BaseModel, Field

from inferencecenter.api.endpoint import Call, Document, Operation
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.auth.audit import AuditEvent, audit_entry
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, MessageImage
from inferencecenter.sessions.shares import check_share_links

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.sessions.shares import OpenedShare

_HEADER: Final = "x-share-token"


class SharedConversation(BaseModel, defer_build=True):
    """A snapshot of a conversation."""

    share_id: str = Field(description="The share.")
    client_id: str = Field(description="The account that shared it.")
    title: str = Field(description="Title of the conversation; may be empty.")
    created_at: float = Field(description="When it was shared, in Unix seconds.")
    expires_at: float | None = Field(default=None, description="Unix seconds; null if it does not expire.")
    transcript: tuple[ChatMessage, ...] = Field(
        description="The messages, without the system prompt; images are at `/shares/{share_id}/images/{digest}`."
    )


class SharedImage(MessageImage):
    """The file of an image in a shared conversation."""

    data: str = Field(description="The file in Base64.")


async def open_share(call: Call) -> Reply:
    """Return a shared conversation."""
    found = await _opened(call)
    share_id, client = found.share.share_id, call.caller.client
    line = audit_entry(
        AuditEvent.SHARE_OPENED,
        client_id=client.client_id,
        token_id=client.token_id or None,
        address=call.caller.address,
        detail=f"{share_id} of {found.share.client_id}",
    )
    call.context.authenticator.audit(line)
    call.hold_result(len(found.messages))
    return await call.context.worker.run(client.client_id, partial(_document, found))


async def read_shared_image(call: Call) -> Reply:
    """Return an image that a shared conversation has, as long as its owner has it.

    Raises:
        InferenceCenterError: ``share_not_found``, also for another image.
    """
    found, digest = await _opened(call), call.path["digest"]
    context, client_id = call.context, call.caller.client.client_id
    if not found.has_image(digest):
        raise InferenceCenterError(ErrorCode.SHARE_NOT_FOUND)
    try:
        image, file = await context.sessions.images.read(found.share.client_id, digest)
    except InferenceCenterError as error:
        if error.code is ErrorCode.INVALID_REQUEST:
            raise InferenceCenterError(ErrorCode.SHARE_NOT_FOUND) from None
        raise
    context.operations.charge(client_id, n_units=0, n_chars=len(file))
    call.hold_result(2 * len(file))
    return await context.worker.run(client_id, partial(_image_document, image, file))


async def _opened(call: Call) -> OpenedShare:
    check_share_links(call.context.settings)
    client = call.caller.client
    found = await call.context.sessions.shares.open(client, call.path["share_id"], call.headers.get(_HEADER, ""))
    call.context.operations.charge(client.client_id, n_chars=len(found.messages))
    return found


def _image_document(image: MessageImage, file: bytes) -> Document:
    answer = SharedImage(**dict(image), data=b64encode(file).decode())
    return Document(orjson.dumps(answer.model_dump(exclude_none=True)), headers={"cache-control": "no-store"})


def _document(found: OpenedShare) -> Document:
    share = found.share
    answer = {
        "share_id": share.share_id,
        "client_id": share.client_id,
        "title": share.title,
        "created_at": share.created_at,
        "expires_at": share.expires_at,
        "transcript": orjson.Fragment(found.messages),
    }
    return Document(orjson.dumps(answer), headers={"cache-control": "no-store"})


OPERATIONS: Final = (
    Operation(
        method="GET",
        path="/shares/{share_id}",
        summary="Read a shared conversation; the header `X-Share-Token` has the secret of its link.",
        handler=open_share,
        answer=SharedConversation,
        error_format=OWN_ERRORS,
        errors=(ErrorCode.SHARE_NOT_FOUND,),
    ),
    Operation(
        method="GET",
        path="/shares/{share_id}/images/{digest}",
        summary="Read an image of a shared conversation; the header `X-Share-Token` has the secret of its link.",
        handler=read_shared_image,
        answer=SharedImage,
        error_format=OWN_ERRORS,
        errors=(ErrorCode.SHARE_NOT_FOUND,),
    ),
)
