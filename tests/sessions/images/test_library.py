"""Images between clients, the store and engines."""

from __future__ import annotations

import base64
import hashlib
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import (
    ChatMessage,
    MessageImage,
    MessageImagePart,
    MessageInParts,
    MessageTextPart,
)
from inferencecenter.sessions.images.decoder import DecodedImage
from inferencecenter.sessions.images.library import ImageLibrary, ImageOwner
from inferencecenter.sessions.images.store import GRACE_S, IMAGES_NAME, ImageFile
from inferencecenter.sessions.store.database import open_file
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADA = ImageOwner("ada", "s_1", stored=True)
BOB = ImageOwner("bob", "s_2", stored=True)
UNSTORED = ImageOwner("ada", "s_3", stored=False)
SUN, MOON = b"sun", b"moon"


def digest_of(file: bytes) -> str:
    """The digest of a file."""
    return hashlib.sha256(file).hexdigest()


def database_in(directory: Path) -> sqlite3.Connection:
    """The session file of a directory."""
    database = open_file(directory / DATABASE_NAME).database
    assert database is not None
    return database


class Images:
    """A library on files in ``directory`` whose decoder takes any file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 1_000_000.0
        self.decoded: list[bytes] = []
        database_in(directory).close()
        self.library = self.reopened()

    def reopened(self, *, max_bytes: int = 100) -> ImageLibrary:
        """The library of another daemon on the same files."""
        file = ImageFile(self.directory / IMAGES_NAME, sessions=self.directory / DATABASE_NAME)
        self.library = ImageLibrary(
            file,
            max_bytes=max_bytes,
            max_held_bytes=100,
            max_pool_bytes=200,
            clock=lambda: self.now,
            decoded=self._decode,
        )
        return self.library

    def _decode(self, file: bytes) -> DecodedImage:
        self.decoded.append(file)
        image = MessageImage(digest=digest_of(file), width=2, height=1, media_type="image/png")
        return DecodedImage(image, file[:1] * 6)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    """A library on empty files."""
    opened = Images(tmp_path)
    yield opened
    opened.library.close()


def question(*parts: str | bytes, **fields: Any) -> MessageInParts:
    """A message of texts and image files."""
    content = tuple(
        MessageTextPart(type="text", text=part)
        if isinstance(part, str)
        else MessageImagePart(type="image", data=base64.b64encode(part).decode())
        for part in parts
    )
    return MessageInParts(role="user", content=content, **fields)


def again(digest: str) -> MessageInParts:
    """A message that names an image."""
    return MessageInParts(role="user", content=(MessageImagePart(type="image", digest=digest),))


async def resolve(images: Images, owner: ImageOwner, *messages: ChatMessage | MessageInParts) -> list[ChatMessage]:
    """The messages as they are stored."""
    resolved = await images.library.resolve(owner, messages)
    assert all(isinstance(message, ChatMessage) for message in resolved)
    return [message for message in resolved if isinstance(message, ChatMessage)]


async def test_message_in_parts_becomes_text_with_marks(images: Images) -> None:
    """Images are named by digest, in order; a mark typed by the user is no image."""
    (message,) = await resolve(images, ADA, question("What is \ufffc", SUN, " and ", MOON, "?"))
    assert message.content == "What is \ufffd\ufffc and \ufffc?"
    assert [image.digest for image in message.images or ()] == [digest_of(SUN), digest_of(MOON)]


async def test_image_is_found_by_digest(images: Images) -> None:
    """In a later message, by another daemon, and as a transcript has it; its size is not taken from the client."""
    await resolve(images, ADA, question(SUN))
    images.library.close()
    images.reopened()
    (named,) = await resolve(images, ADA, again(digest_of(SUN)))
    claimed = MessageImage(digest=digest_of(SUN), width=999, height=1, media_type="image/gif")
    (sent,) = await resolve(images, ADA, ChatMessage(role="user", content="\ufffc", images=(claimed,)))
    assert named.images == sent.images
    assert (named.images or ())[0].width == 2
    image, file = await images.library.read("ada", digest_of(SUN))
    assert (image, file) == ((named.images or ())[0], SUN)


async def test_image_of_another_client_is_unknown(images: Images) -> None:
    """Also where both clients' sessions are not stored, and until they send the same file."""
    await resolve(images, ADA, question(SUN))
    await resolve(images, UNSTORED, question(MOON))
    for digest in (digest_of(SUN), digest_of(MOON)):
        with pytest.raises(InferenceCenterError) as caught:
            await resolve(images, BOB, again(digest))
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "messages.0.content.0.digest")
        with pytest.raises(InferenceCenterError):
            await images.library.read("bob", digest)
    await resolve(images, BOB, question(SUN))
    assert (await images.library.read("bob", digest_of(SUN)))[1] == SUN


async def test_pixels_are_decoded_once_for_a_new_image(images: Images) -> None:
    """And again when an engine needs them later; an unknown image has none."""
    await resolve(images, ADA, question(SUN))
    assert await images.library.pixels(digest_of(SUN)) == b"s" * 6
    assert images.decoded == [SUN]
    assert await images.library.pixels(digest_of(SUN)) == b"s" * 6
    assert images.decoded == [SUN, SUN]
    assert await images.library.pixels(digest_of(b"none")) is None


async def test_images_of_a_client_are_bounded(images: Images) -> None:
    """In the file and in memory; an image that the client has already costs nothing."""
    for owner in (ADA, UNSTORED):
        await resolve(images, owner, question(b"x" * 90))
        await resolve(images, owner, question(b"x" * 90))
        with pytest.raises(InferenceCenterError, match="100 are allowed") as caught:
            await resolve(images, owner, question(b"y" * 11))
        assert caught.value.code is ErrorCode.QUOTA_EXCEEDED
    await resolve(images, BOB, question(b"y" * 11))


async def test_images_without_a_session_are_evicted(images: Images) -> None:
    """The least recently used first; requests send them again."""
    requests = ImageOwner("ada")
    for file in (b"a" * 40, b"b" * 40, b"a" * 40, b"c" * 40):
        await resolve(images, requests, question(file))
    assert images.decoded == [b"a" * 40, b"b" * 40, b"c" * 40]
    await resolve(images, requests, question(b"a" * 40))
    assert len(images.decoded) == 3
    await resolve(images, requests, question(b"b" * 40))
    assert len(images.decoded) == 4
    with pytest.raises(InferenceCenterError, match="101 bytes; 100 are allowed"):
        await resolve(images, requests, question(b"d" * 101))


async def test_images_without_a_session_are_bounded_for_all_clients(images: Images) -> None:
    """Those of the client that sent some last stay, also if they are new."""
    for client in ("ada", "bob", "cy"):
        await resolve(images, ImageOwner(client), question(b"a" * 80, client.encode()))
    await resolve(images, ImageOwner("bob"), question(b"bob"))
    assert len(images.decoded) == 6
    await resolve(images, ImageOwner("cy"), question(b"c" * 20))
    await resolve(images, ImageOwner("cy"), question(b"a" * 80))
    with pytest.raises(InferenceCenterError):
        await images.library.read("ada", digest_of(b"a" * 80))
    assert (await images.library.read("cy", digest_of(b"c" * 20)))[1] == b"c" * 20


async def test_images_of_a_request_are_bounded(images: Images) -> None:
    """Over all of its messages, before any is decoded."""
    messages = [question(*[SUN] * 33), question(*[MOON] * 32)]
    with pytest.raises(InferenceCenterError, match="65 images; 64 are allowed"):
        await resolve(images, ADA, *messages)
    assert not images.decoded


async def test_data_that_is_not_base64_is_refused(images: Images) -> None:
    """By its path."""
    message = MessageInParts(role="user", content=(MessageImagePart(type="image", data="no base64!"),))
    with pytest.raises(InferenceCenterError, match="not Base64") as caught:
        await resolve(images, ADA, question("ok"), message)
    assert caught.value.field == "messages.1.content.0.data"


async def test_unstored_images_end_with_their_sessions(images: Images) -> None:
    """Nothing of them is written; a fork keeps them."""
    await resolve(images, UNSTORED, question(SUN))
    images.library.share("ada", "s_4", by="s_3")
    images.library.release("ada", "s_3")
    assert (await images.library.read("ada", digest_of(SUN)))[1] == SUN
    images.library.release("ada", "s_4")
    with pytest.raises(InferenceCenterError):
        await images.library.read("ada", digest_of(SUN))
    assert SUN not in (images.directory / IMAGES_NAME).read_bytes()


async def test_images_of_a_deleted_client_are_deleted(images: Images) -> None:
    """Unless another client has the same."""
    await resolve(images, ADA, question(SUN, MOON))
    await resolve(images, BOB, question(SUN))
    await images.library.forget_client("ada")
    assert (await images.library.read("bob", digest_of(SUN)))[1] == SUN
    with pytest.raises(InferenceCenterError):
        await images.library.read("ada", digest_of(SUN))


def test_images_that_no_message_names_are_deleted_after_a_day(tmp_path: Path) -> None:
    """Images of stored messages are kept, and those of an unfinished turn or a share."""
    database = database_in(tmp_path)
    file = ImageFile(tmp_path / IMAGES_NAME, sessions=tmp_path / DATABASE_NAME)
    named = ("in a message", "in a turn", "in a share", "of another client", "unused")
    names = {name: digest_of(name.encode()) for name in named}
    for name, digest in names.items():
        image = MessageImage(digest=digest, width=2, height=1, media_type="image/png")
        file.add("ada", image, name.encode(), now=0.0, max_bytes=1000)
    columns = "session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept, view_resumes_at, facts"
    for row, client_id, digest in ((1, "ada", names["in a message"]), (2, "bob", names["of another client"])):
        database.execute(
            f"INSERT INTO sessions (id, {columns}) VALUES (?, ?, ?, '', 0, 0, 0, '', 0, 0, '')",
            (row, f"s_{row}", client_id),
        )
        more = f'{{"images":[{{"digest":"{digest}","width":2,"height":1,"media_type":"image/png"}}]}}'
        database.execute("INSERT INTO messages VALUES (?, 0, 'user', '\ufffc', ?)", (row, more))
    database.execute(
        "INSERT INTO orders (session, turn_id, request, params, rank, warnings, submitted_at, rendered_at, made_by)"
        " VALUES (1, 't', ?, '', 0, '', 0, '', '')",
        (f'{{"messages": ["{names["in a turn"]}"]}}',),
    )
    shared = f'[{{"role":"user","images":[{{"digest":"{names["in a share"]}"}}]}}]'
    database.execute("INSERT INTO shares VALUES ('sh', 's_9', 'ada', x'00', '', 0, NULL, 1, ?)", (shared,))
    assert file.collect(now=GRACE_S - 1) == 0
    assert file.collect(now=GRACE_S + 1) == 2
    assert {name for name, digest in names.items() if file.read(digest)} == set(named[:3])
    database.execute("DELETE FROM sessions WHERE id = 1")
    database.execute("DELETE FROM shares")
    assert file.collect(now=3 * GRACE_S) == 3
    file.close()
    database.close()
