"""Images on their way: from clients to the store, and from there to engines.

A message in parts becomes one whose images are named by digest, before anything of its request happens, so that turns,
records and histories never hold files. A file whose bytes a client has sent before is found by its digest and not
decoded again. Files of sessions that are not stored are held in memory until their session ends. Engines request pixels
when they must compute rows of an image, which is decoded again then: only its digest and size are needed otherwise.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_worker import FairWorker
from inferencecenter.protocol.values import (
    IMAGE_MARK,
    MAX_IMAGES,
    ChatMessage,
    MessageImage,
    MessageImagePart,
    MessageInParts,
)
from inferencecenter.sessions.images.decoder import FORMATS_HINT, ImageDecoder
from inferencecenter.sessions.images.store import too_many_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferencecenter.sessions.images.decoder import DecodedImage
    from inferencecenter.sessions.images.fetcher import ImageFetcher
    from inferencecenter.sessions.images.store import ImageFile

MAX_HELD_BYTES: Final = 64 * 1024 * 1024
MAX_POOL_BYTES: Final = 256 * 1024 * 1024
_PIXEL_BYTES: Final = 64 * 1024 * 1024
"""Decoded pixels that are kept for the engine, which requests them soon after an image arrived."""
_COLLECT_EVERY: Final = 64

_log = structlog.get_logger(__name__)


def has_images(messages: Iterable[ChatMessage | MessageInParts]) -> bool:
    """Return whether messages name or carry images, or have parts."""
    return any(isinstance(message, MessageInParts) or message.images is not None for message in messages)


@dataclass(frozen=True, slots=True)
class ImageOwner:
    """The session that an image is for; the files of one that is not ``stored`` stay in memory.

    Without a session, images belong to requests that send the whole conversation each time: the least recently used
    are evicted.
    """

    client_id: str
    session_id: str = ""
    stored: bool = False


@dataclass(slots=True)
class _HeldImages:
    """Files by digest, the most recently used last."""

    client_id: str
    files: OrderedDict[str, tuple[MessageImage, bytes]] = field(default_factory=OrderedDict)

    @property
    def n_bytes(self) -> int:
        return sum(len(file) for _, file in self.files.values())

    def evict(self, n_bytes: int) -> int:
        """Forget the least recently used images of at least ``n_bytes``, or all; return how many bytes they had."""
        evicted = 0
        while self.files and evicted < n_bytes:
            _, (_, file) = self.files.popitem(last=False)
            evicted += len(file)
        return evicted


class ImageLibrary:
    """Images of all clients. Methods are called on the event loop.

    Args:
        file: Where images are stored; ``None`` if no session is.
        max_bytes: Bytes that a client's images in the file may have together.
        max_held_bytes: Bytes that a client's images in memory may have together.
        max_pool_bytes: Bytes that the images of requests without a session may have together, for all clients.
        clock: Unix seconds.
        decoded: Decodes a file; blocks. By default an ``ImageDecoder`` does.
        fetcher: Fetches files at addresses; without one, none is fetched.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; most have defaults
        self,
        file: ImageFile | None,
        *,
        max_bytes: int,
        clock: Callable[[], float],
        max_held_bytes: int = MAX_HELD_BYTES,
        max_pool_bytes: int = MAX_POOL_BYTES,
        decoded: Callable[[bytes], DecodedImage] | None = None,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._max_pool_bytes = max_pool_bytes
        self._clock = clock
        self._processes = ImageDecoder()
        self._decoded = decoded or self._processes.decode
        self._fetcher = fetcher
        self._decoder = FairWorker("image-decoder")
        self._disk = FairWorker("image-store")
        self._held: dict[tuple[str, str], _HeldImages] = {}
        self._pixels: OrderedDict[str, bytes] = OrderedDict()
        self._n_added = 0

    async def resolve(
        self, owner: ImageOwner, messages: Sequence[ChatMessage | MessageInParts]
    ) -> list[ChatMessage | MessageInParts]:
        """Return messages whose images are stored and named by digest.

        Raises:
            InferenceCenterError: ``invalid_request``, ``quota_exceeded`` or ``storage_unavailable``.
        """
        n_images = sum(
            sum(isinstance(part, MessageImagePart) for part in message.content)
            if isinstance(message, MessageInParts)
            else len(message.images or ())
            for message in messages
        )
        if n_images > MAX_IMAGES:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"messages have {n_images} images; {MAX_IMAGES} are allowed in a request",
                field="messages",
            )
        return [await self._resolved(owner, index, message) for index, message in enumerate(messages)]

    async def add(self, owner: ImageOwner, file: bytes, *, path: str) -> MessageImage:
        """Decode and keep an image file, or find it by its digest; ``path`` is its field in errors.

        Raises:
            InferenceCenterError: See ``resolve``.
        """
        digest = await self._decoder.run(owner.client_id, partial(_digest, file))
        return await self._add(owner, file, digest, path=path)

    async def _add(self, owner: ImageOwner, file: bytes, digest: str, *, path: str) -> MessageImage:
        if (known := await self._find(owner, digest)) is not None:
            return known
        try:
            decoded = await self._decoder.run(owner.client_id, partial(self._decoded, file))
        except InferenceCenterError as error:
            error.field = path
            raise
        await self._keep(owner, decoded.image, file)
        self._keep_pixels(digest, decoded.pixels)
        return decoded.image

    async def add_encoded(self, owner: ImageOwner, data: str, *, path: str) -> MessageImage:
        """Decode and keep an image file in Base64; see ``add``.

        Raises:
            InferenceCenterError: See ``resolve``.
        """
        # Clients of other APIs send an image again with each question: one job, as waiting for a thread takes longer.
        file, digest = await self._decoder.run(owner.client_id, partial(_unpacked, data, path))
        return await self._add(owner, file, digest, path=path)

    async def read(self, client_id: str, digest: str) -> tuple[MessageImage, bytes]:
        """Return an image that a client may see, and its file.

        Raises:
            InferenceCenterError: ``invalid_request`` if there is none, ``storage_unavailable``.
        """
        for held in self._held.values():
            if held.client_id == client_id and digest in held.files:
                return held.files[digest]
        if (store := self._file) is not None:
            now = self._clock()
            image = await self._disk.run(client_id, partial(store.find, client_id, digest, now=now))
            file = None if image is None else await self._disk.run(client_id, partial(store.read, digest))
            if image is not None and file is not None:
                return image, file
        raise _unknown(digest, "digest")

    async def pixels(self, digest: str) -> bytes | None:
        """Return the pixels of an image for an engine; ``None`` if its file is gone."""
        if (pixels := self._pixels.pop(digest, None)) is not None:
            return pixels
        try:
            file = await self._file_of(digest)
            return None if file is None else (await self._decoder.run("", partial(self._decoded, file))).pixels
        except InferenceCenterError as error:
            _log.error("image_unreadable", digest=digest, reason=error.message)
            return None

    def release(self, client_id: str, session_id: str) -> None:
        """Free the images of a session that was not stored."""
        self._held.pop((client_id, session_id), None)

    def share(self, client_id: str, session_id: str, *, by: str) -> None:
        """Keep the images of a session that is not stored for its fork ``session_id`` too."""
        if (held := self._held.get((client_id, by))) is not None:
            self._held[client_id, session_id] = _HeldImages(client_id, held.files.copy())

    async def forget_client(self, client_id: str) -> None:
        """Delete the images of a deleted client.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        if self._file is not None:
            await self._disk.run(client_id, partial(self._file.forget_client, client_id))

    def close(self) -> None:
        self._decoder.close()
        self._processes.close()
        self._disk.close()
        if self._file is not None:
            self._file.close()

    async def _resolved(
        self, owner: ImageOwner, index: int, message: ChatMessage | MessageInParts
    ) -> ChatMessage | MessageInParts:
        path = f"messages.{index}"
        if isinstance(message, ChatMessage):
            if message.images is None:
                return message
            known = [
                _with_alt(await self._known(owner, image.digest, f"{path}.images"), image.alt)
                for image in message.images
            ]
            return message.model_copy(update={"images": tuple(known)})
        texts, images = [], []
        for number, part in enumerate(message.content):
            if not isinstance(part, MessageImagePart):
                texts.append(part.text.replace(IMAGE_MARK, "\ufffd"))
                continue
            texts.append(IMAGE_MARK)
            where = f"{path}.content.{number}"
            if part.digest is not None:
                image = await self._known(owner, part.digest, f"{where}.digest")
            elif part.url is not None:
                image = await self._add_fetched(owner, part.url, path=f"{where}.url")
            else:
                image = await self.add_encoded(owner, part.data or "", path=f"{where}.data")
            images.append(_with_alt(image, part.alt))
        return ChatMessage(
            role=message.role,
            content="".join(texts),
            images=tuple(images) or None,
            tool_call_id=message.tool_call_id,
        )

    async def _add_fetched(self, owner: ImageOwner, url: str, *, path: str) -> MessageImage:
        if self._fetcher is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "an image is an address",
                field=path,
                hint="The daemon fetches no images; send the file itself in Base64.",
            )
        return await self.add(owner, await self._fetcher.fetch(owner.client_id, url, path=path), path=path)

    async def _keep(self, owner: ImageOwner, image: MessageImage, file: bytes) -> None:
        if not owner.stored or (store := self._file) is None:
            self._hold(owner, image, file)
            return
        now = self._clock()
        add = partial(store.add, owner.client_id, image, file, now=now, max_bytes=self._max_bytes)
        await self._disk.run(owner.client_id, add)
        self._n_added += 1
        if self._n_added % _COLLECT_EVERY == 1:
            await self._disk.run(owner.client_id, partial(store.collect, now=now))

    async def _known(self, owner: ImageOwner, digest: str, path: str) -> MessageImage:
        if (image := await self._find(owner, digest)) is None:
            raise _unknown(digest, path)
        return image

    async def _find(self, owner: ImageOwner, digest: str) -> MessageImage | None:
        """Return an image that the client has sent before, which is kept for the owner from now on."""
        for session_id in dict.fromkeys((owner.session_id, "")):
            held = self._held.get((owner.client_id, session_id))
            if held is not None and digest in held.files:
                held.files.move_to_end(digest)
                image, file = held.files[digest]
                if session_id != owner.session_id:
                    await self._keep(owner, image, file)
                return image
        if (store := self._file) is None:
            return None
        stored = await self._disk.run(owner.client_id, partial(store.find, owner.client_id, digest, now=self._clock()))
        if stored is not None and not owner.stored:
            content = await self._disk.run(owner.client_id, partial(store.read, digest))
            self._hold(owner, stored, content or b"")
        return stored

    async def _file_of(self, digest: str) -> bytes | None:
        for held in self._held.values():
            if digest in held.files:
                return held.files[digest][1]
        return None if self._file is None else await self._disk.run("", partial(self._file.read, digest))

    def _hold(self, owner: ImageOwner, image: MessageImage, file: bytes) -> None:
        place = owner.client_id, owner.session_id
        held = self._held.get(place) or _HeldImages(owner.client_id)
        total = held.n_bytes + len(file)
        if owner.session_id:
            others = (each for each in self._held.values() if each.client_id == owner.client_id and each is not held)
            total += sum(each.n_bytes for each in others)
        else:
            total -= held.evict(total - self._max_held_bytes)
        if total > self._max_held_bytes:
            raise too_many_bytes(total, self._max_held_bytes)
        held.files[image.digest] = (image, file)
        self._held.pop(place, None)
        if not owner.session_id:
            self._shrink_pools(self._max_pool_bytes - held.n_bytes)
        self._held[place] = held  # the last one is that used last

    def _shrink_pools(self, max_bytes: int) -> None:
        """Evict images of requests without a session, those of the clients that sent none for longest first."""
        pools = {place: each for place, each in self._held.items() if not place[1]}
        excess = sum(each.n_bytes for each in pools.values()) - max_bytes
        for place, each in pools.items():
            excess -= each.evict(excess)
            if not each.files:
                del self._held[place]

    def _keep_pixels(self, digest: str, pixels: bytes) -> None:
        self._pixels[digest] = pixels
        self._pixels.move_to_end(digest)
        while sum(map(len, self._pixels.values())) > _PIXEL_BYTES and len(self._pixels) > 1:
            self._pixels.popitem(last=False)


def _with_alt(image: MessageImage, alt: str | None) -> MessageImage:
    return image if alt is None else image.model_copy(update={"alt": alt})


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def _unpacked(data: str, path: str) -> tuple[bytes, str]:
    """Return the file in Base64 and its digest."""
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "an image is not Base64", field=path, hint=FORMATS_HINT
        ) from None
    return file, _digest(file)


def _unknown(digest: str, path: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{digest} is not an image of this client",
        field=path,
        hint="Send the image's data. An image that no session names is deleted a day after its last use.",
    )
