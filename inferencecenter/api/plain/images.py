"""``POST /images``: images that are too large for a frame, which messages then name by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import Field

from inferencecenter.api.body import RequestModel
from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol.values import MessageImage
from inferencecenter.sessions.images.decoder import FORMATS_HINT
from inferencecenter.sessions.images.library import ImageOwner

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply


class UploadImage(RequestModel):
    """An image file."""

    data: str = Field(description=f"The file in Base64. {FORMATS_HINT}")


async def upload(call: Call) -> Reply:
    """Store an image for later messages of the client."""
    owner = ImageOwner(call.caller.client.client_id, stored=True)
    image = await call.context.sessions.images.add_encoded(owner, call.body.data, path="data")
    return document(image.model_dump(exclude_none=True))


OPERATION: Final = Operation(
    method="POST",
    path="/images",
    summary="Store an image, which messages then name by its digest.",
    handler=upload,
    body=UploadImage,
    answer=MessageImage,
    error_format=OWN_ERRORS,
    errors=(ErrorCode.QUOTA_EXCEEDED, ErrorCode.STORAGE_UNAVAILABLE),
)
