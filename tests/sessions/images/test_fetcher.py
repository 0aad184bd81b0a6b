"""Images at addresses are fetched from allowed hosts only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx2
import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.values import MessageImagePart, MessageInParts
from inferencecenter.sessions.history import plain_messages
from inferencecenter.sessions.images.fetcher import ImageFetcher
from inferencecenter.sessions.images.library import ImageLibrary, ImageOwner
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FILE = image_file((8, 6))


class _Body(httpx2.AsyncByteStream):
    def __init__(self, content: bytes, read: list[int]) -> None:
        self._content = content
        self._read = read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._content), 64):
            self._read.append(start)
            yield self._content[start : start + 64]


class Host(httpx2.AsyncBaseTransport):
    """Answers requests with a file, and records their addresses; waits for ``released`` if it is cleared."""

    def __init__(self, content: bytes = FILE, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.requested: list[str] = []
        self.received = asyncio.Semaphore(0)
        self.read: list[int] = []
        self.released = asyncio.Event()
        self.released.set()
        self._content, self._status, self._headers = content, status, headers

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request."""
        self.requested.append(str(request.url))
        assert "authorization" not in request.headers
        self.received.release()
        await self.released.wait()
        return httpx2.Response(self._status, headers=self._headers, stream=_Body(self._content, self.read))


def fetcher(host: Host, *hosts: str, max_bytes: int = 10_000) -> ImageFetcher:
    """A fetcher that is answered by ``host``."""
    return ImageFetcher(hosts, max_bytes=max_bytes, transport=host)


async def test_file_of_an_allowed_host_becomes_an_image() -> None:
    """It is decoded and named as one that was sent."""
    host = Host()
    library = ImageLibrary(None, max_bytes=10_000, clock=lambda: 0.0, fetcher=fetcher(host, "Images.example.org"))
    part = MessageImagePart(type="image", url="https://images.example.org:443/a.png?b=c")
    try:
        owner = ImageOwner("ada")
        (message,) = plain_messages(await library.resolve(owner, [MessageInParts(role="user", content=(part,))]))
    finally:
        library.close()
    assert message.images is not None
    assert (message.images[0].width, message.images[0].height) == (8, 6)
    assert host.requested == ["https://images.example.org/a.png?b=c"]


async def test_without_allowed_hosts_nothing_is_fetched() -> None:
    """This is the default."""
    library = ImageLibrary(None, max_bytes=10_000, clock=lambda: 0.0)
    part = MessageImagePart(type="image", url="https://example.org/")
    try:
        with pytest.raises(InferenceCenterError) as refused:
            await library.resolve(ImageOwner("ada"), [MessageInParts(role="user", content=(part,))])
    finally:
        library.close()
    assert refused.value.field == "messages.0.content.0.url"
    assert "fetches no images" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example.org/a.png",
        "https://example.org.evil.test/",
        "https://evil.test/https://example.org/",
        "https://example.org@evil.test/a.png",
        "https://user:secret@example.org/a.png",
        "https://example.org:8443/a.png",
        "https://example.org\\@evil.test/",
        "https://[::1]/a.png",
        "http://example.org/a.png",
        "file:///etc/passwd",
        "https://",
        "https://exa mple.org",
        "https://example.org:99999999/",
        "//example.org/a",
        "",
    ],
)
async def test_other_addresses_are_not_connected_to(url: str) -> None:
    """The error names the allowed hosts."""
    host = Host()
    with pytest.raises(InferenceCenterError) as refused:
        await fetcher(host, "example.org").fetch("ada", url, path="messages.0")
    assert refused.value.field == "messages.0"
    assert "example.org" in (refused.value.hint or "")
    assert host.requested == []


async def test_port_may_be_allowed() -> None:
    """It is part of the entry then."""
    assert await fetcher(Host(), "example.org:8443").fetch("ada", "https://example.org:8443/", path="p") == FILE


async def test_redirection_is_not_followed() -> None:
    """It could lead anywhere."""
    host = Host(status=302, headers={"location": "https://example.org/other"})
    with pytest.raises(InferenceCenterError, match="the host answers 302"):
        await fetcher(host, "example.org").fetch("ada", "https://example.org/", path="p")
    assert len(host.requested) == 1


async def test_large_file_is_read_no_further_than_its_limit() -> None:
    """Whatever its headers say."""
    host = Host(b"x" * 10_000, headers={"content-length": "10"})
    with pytest.raises(InferenceCenterError, match="more than 200 bytes"):
        await fetcher(host, "example.org", max_bytes=200).fetch("ada", "https://example.org/", path="p")
    assert len(host.read) == 4


async def test_files_of_a_client_at_once_are_limited() -> None:
    """Those of others are fetched meanwhile."""
    host = Host()
    host.released.clear()
    fetching = fetcher(host, "example.org")
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(fetching.fetch("ada", "https://example.org/", path="p")) for _ in range(4)]
        for _ in begun:
            await host.received.acquire()
        with pytest.raises(InferenceCenterError, match="4 images of this client"):
            await fetching.fetch("ada", "https://example.org/", path="p")
        begun.append(tasks.create_task(fetching.fetch("bob", "https://example.org/", path="p")))
        host.released.set()
    assert [task.result() for task in begun] == [FILE] * 5
    assert await fetching.fetch("ada", "https://example.org/", path="p") == FILE
