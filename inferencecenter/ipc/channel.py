"""The front's end of the pipe to the engine, on the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from inferencecenter.ipc.framing import MAX_FRAME_BYTES, FramingError, encode, from_engine_decoder

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from inferencecenter.ipc.messages import FromEngine, ToEngine

MAX_UNREAD_BYTES: Final = 3 * MAX_FRAME_BYTES
"""What may wait for an engine that does not read, before it counts as lost."""
WINDOW_BYTES: Final = 8 * 2**20
"""What may wait before turns are held back. One more turn and all look-ups still fit below the limit."""


class Channel(asyncio.Protocol):
    """Frames over a connected socket.

    Args:
        on_message: Called on the event loop with each message, in order; must not raise.
        on_drain: Called on the event loop when there is room again; must not raise.
        window_bytes: What may wait to be read by the other end before there is no room.
        max_unread_bytes: What may wait before the channel gives up.
    """

    def __init__(
        self,
        on_message: Callable[[FromEngine], None],
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
        self._decoder = from_engine_decoder()
        self._transport: asyncio.Transport | None = None
        self._fault = ""
        self._lost = asyncio.Event()

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_message: Callable[[FromEngine], None],
        *,
        on_drain: Callable[[], None] = lambda: None,
        window_bytes: int = WINDOW_BYTES,
    ) -> Channel:
        """Return a channel over a connected Unix socket, which it takes over."""
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(on_message, on_drain=on_drain, window_bytes=window_bytes), sock=sock
        )
        return channel

    @property
    def has_room(self) -> bool:
        """Whether what waits to be read is within the window; ``on_drain`` is called when it is again."""
        return self._has_room

    def send(self, message: ToEngine) -> None:
        """Send a message; nothing happens when the channel is lost already.

        Raises:
            FrameError: The message is too large for a frame.
        """
        frame = encode(message)
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        unread = self._transport.get_write_buffer_size()
        if unread > self._max_unread_bytes:
            self._give_up(f"the engine left {unread} bytes unread")

    def close(self) -> None:
        """Close the socket once what was sent has gone out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    async def lost(self) -> str:
        """Wait until nothing more will arrive; return what went wrong in words, empty after a plain end of file."""
        await self._lost.wait()
        return self._fault

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._window_bytes)

    def pause_writing(self) -> None:
        """Take note that more than the window waits to be read."""
        self._has_room = False

    def resume_writing(self) -> None:
        """Tell that a good part of the window has been read."""
        self._has_room = True
        self._on_drain()

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that are complete."""
        try:
            messages = self._decoder.feed(data)
        except FramingError as error:
            self._give_up(str(error))
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that nothing more will arrive."""
        self._fault = self._fault or (str(exc) if exc else "")
        self._lost.set()

    def _give_up(self, fault: str) -> None:
        self._fault = self._fault or fault
        self.abort()
