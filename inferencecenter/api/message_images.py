"""Images in requests of other APIs, whose clients send them with each request as data URLs or in Base64."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, MessageImagePart, MessageInParts, MessageTextPart
from inferencecenter.sessions.history import plain_messages
from inferencecenter.sessions.images.library import ImageOwner, has_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.protocol.values import CallId
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.context import Principal

_DATA_URL: Final = re.compile(r"data:image/[a-z+.-]+;base64,", re.IGNORECASE)
_IN_PART: Final = re.compile(r"\.(data|digest|url)$")
_SHOWN_CHARS: Final = 60
_MAX_URL_CHARS: Final = 4096


def image_of_url(url: str, path: str) -> MessageImagePart:
    """Return the image in a data URL, or at an address with https.

    Raises:
        InferenceCenterError: ``invalid_request`` for another address.
    """
    if (prefix := _DATA_URL.match(url)) is not None:
        return MessageImagePart(type="image", data=url[prefix.end() :])
    if url.startswith("https://") and len(url) <= _MAX_URL_CHARS:
        return MessageImagePart(type="image", url=url)
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{path} is {url[:_SHOWN_CHARS]!r}, which is not data:image/…;base64,…",
        field=path,
        hint="Send the file itself in Base64.",
    )


def user_message(parts: Sequence[str | MessageImagePart]) -> ChatMessage | MessageInParts:
    """Return a user's message of texts and images; texts that follow each other are lines."""
    return _message("user", parts, None)


def result_message(parts: Sequence[str | MessageImagePart], call_id: CallId | None) -> ChatMessage | MessageInParts:
    """Return a tool's message of texts and images."""
    return _message("tool", parts, call_id)


def _message(
    role: Literal["user", "tool"], parts: Sequence[str | MessageImagePart], call_id: CallId | None
) -> ChatMessage | MessageInParts:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return ChatMessage(role=role, content="\n".join(texts), tool_call_id=call_id)
    content: list[MessageTextPart | MessageImagePart] = []
    for part in parts:
        if isinstance(part, MessageImagePart):
            content.append(part)
        else:
            is_line = bool(content) and isinstance(content[-1], MessageTextPart)
            content.append(MessageTextPart(type="text", text=f"\n{part}" if is_line else part))
    return MessageInParts(role=role, content=tuple(content), tool_call_id=call_id)


async def with_stored_images(  # noqa: PLR0913 - keyword-only
    context: ServerContext,
    client: Principal,
    messages: Sequence[ChatMessage | MessageInParts],
    *,
    stored: bool = False,
    field: str = "messages",
    part: str | None = None,
) -> tuple[ChatMessage, ...]:
    """Return messages whose images are decoded and named by digest; those for sessions that are ``stored`` are too.

    Raises:
        InferenceCenterError: See ``ImageLibrary.resolve``. Its field is ``field``, unless messages and their parts have
            the same numbers as in the request, where ``part`` is the name of an image in a part.
    """
    if has_images(messages):
        try:
            messages = await context.sessions.images.resolve(ImageOwner(client.client_id, stored=stored), messages)
        except InferenceCenterError as error:
            error.field = field if part is None else _IN_PART.sub(f".{part}", error.field or "")
            raise
    return plain_messages(messages)
