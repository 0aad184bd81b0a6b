"""``POST /images``: images that are too large for a frame, which messages then name by digest."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final

from pydantic import Field

from inferencecenter.api.body import RequestModel, invalid_field
from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol.values import MessageImage
from inferencecenter.sessions.images.library import FORMATS_HINT, ImageOwner

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply


class UploadImage(RequestModel):
    """An image file."""

    data: str = Field(description=f"The file in Base64. {FORMATS_HINT}")


async def upload(call: Call) -> Reply:
    """Store an image for later messages of the client."""
    client, images = call.caller.client, call.context.sessions.images
    request: UploadImage = call.body

    def unpack() -> bytes:
        try:
            return base64.b64decode(request.data, validate=True)
        except (binascii.Error, ValueError):
            raise invalid_field("data", "data is not Base64") from None

    file = await call.context.worker.run(client.client_id, unpack)
    image = await images.add(ImageOwner(client.client_id, stored=True), file, path="data")
    return document(image.model_dump())


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
