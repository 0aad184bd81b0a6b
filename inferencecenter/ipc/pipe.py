"""The engine's end of the socket to the front: blocking, read by one thread, written by any."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from inferencecenter.ipc.framing import encode, to_engine_decoder

if TYPE_CHECKING:
    import socket

    from inferencecenter.ipc.messages import FromEngine, ToEngine

_READ_BYTES = 256 * 1024


class Pipe:
    """Messages over a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = to_engine_decoder()
        self._received: deque[ToEngine] = deque()
        self._sending = threading.Lock()

    def read(self) -> ToEngine | None:
        """Wait for the next message; ``None`` when the other end is gone, in the middle of a frame or not.

        Raises:
            FrameError: What arrived is not a frame.
        """
        while not self._received:
            try:
                data = self._connection.recv(_READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received.extend(self._decoder.feed(data))
        return self._received.popleft()

    def send(self, message: FromEngine) -> None:
        """Write a message; waits while the other end is slow to read.

        Raises:
            FrameError: The message is too large.
            ConnectionError: The other end is gone.
        """
        frame = encode(message)
        with self._sending:
            self._connection.sendall(frame)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()
