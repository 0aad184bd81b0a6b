"""The asyncio end of a connection that carries frames: a socket pair to an engine, a link to its host, or a tunnel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

import msgspec

from inferencecenter.ipc.framing import MAX_FRAME_BYTES, FramingError, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.framing import Decoder

Sent = TypeVar("Sent", bound=msgspec.Struct)
Received = TypeVar("Received", bound=msgspec.Struct)

MAX_UNREAD_BYTES: Final = 3 * MAX_FRAME_BYTES
"""Most bytes that may wait for an engine that does not read; beyond that it counts as lost."""
WINDOW_BYTES: Final = 8 * 2**20
"""Bytes that may wait before turns are held back. One more turn and all lookups still fit below the limit."""


class Channel(asyncio.Protocol, Generic[Sent, Received]):
    """Frames over a connected socket.

    Args:
        decoder: Decodes what arrives.
        on_message: Called on the event loop with each message, in order; must not raise.
        on_drain: Called on the event loop when there is room again; must not raise.
        window_bytes: Unread bytes beyond which there is no room.
        max_unread_bytes: Unread bytes beyond which the channel gives up.

    Attributes:
        sent_bytes: Bytes of the sent frames, without encryption.
        received_bytes: Bytes received.
    """

    def __init__(
        self,
        decoder: Decoder[Received],
        on_message: Callable[[Received], None],
        *,
        on_drain: Callable[[], None] = lambda: None,
        window_bytes: int = WINDOW_BYTES,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_drain = on_drain
        self._window_bytes = window_bytes
        self._max_unread_bytes = max_unread_bytes
        self._has_room = True
        self._is_paused = False
        self._decoder = decoder
        self._transport: asyncio.Transport | None = None
        self._fault = ""
        self._lost = asyncio.Event()
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether the unread bytes are within the window; ``on_drain`` is called when they are again."""
        return self._has_room

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read."""
        return self._is_paused

    def send(self, message: Sent) -> None:
        """Send a message; does nothing once the channel is lost.

        Raises:
            FramingError: The message is too large for a frame.
        """
        frame = encode(message)
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        self.sent_bytes += len(frame)
        unread = self._transport.get_write_buffer_size()
        if unread > self._max_unread_bytes:
            self.give_up(f"the engine left {unread} bytes unread")

    def close(self) -> None:
        """Close the socket after sending what is buffered."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, fault: str) -> None:
        """Drop the connection because of ``fault``."""
        self._fault = self._fault or fault
        self.abort()

    def pause_reading(self) -> None:
        """Read nothing, so that the peer has to wait, until ``resume_reading``."""
        self._is_paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    async def lost(self) -> str:
        """Wait until nothing more will arrive; return the cause, empty after a plain end of file."""
        await self._lost.wait()
        return self._fault

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._window_bytes)

    def pause_writing(self) -> None:
        """Record that the window is exceeded."""
        self._has_room = False

    def resume_writing(self) -> None:
        """Call ``on_drain``: a good part of the window has been read."""
        self._has_room = True
        self._on_drain()

    def data_received(self, data: bytes) -> None:
        """Deliver the complete messages."""
        self.received_bytes += len(data)
        try:
            messages = self._decoder.feed(data)
        except FramingError as error:
            self.give_up(str(error))
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the callers of ``lost``."""
        self._fault = self._fault or (str(exc) if exc else "")
        self._lost.set()
