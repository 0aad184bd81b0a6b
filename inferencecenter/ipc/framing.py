"""Frames on the socket between the two processes: a little-endian u32 length, then a MessagePack message.

Both ends of the pipe (``channel`` in the front, ``BlockingChannel`` in the engine) use these frames.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from inferencecenter.ipc.messages import FromEngine, ToEngine

if TYPE_CHECKING:
    import socket


MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()

Message = TypeVar("Message", ToEngine, FromEngine)


class FramingError(Exception):
    """The other end sent something that is not a frame; nothing after it can be understood."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        FrameError: The message is larger than ``MAX_FRAME_BYTES``.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FramingError(f"a {type(message).__name__} of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class Decoder(Generic[Message]):
    """Turns bytes, cut anywhere, back into messages.

    Args:
        union: The messages that may arrive, as ``ToEngine``.
        max_frame_bytes: Length at which a frame is taken for garbage.
    """

    def __init__(self, union: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Take in ``data`` and return the messages that are now complete, oldest first.

        Raises:
            FrameError: The bytes are not frames of known messages; the decoder is of no further use.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            size = int.from_bytes(self._buffer[start:body], "little")
            if size > self._max_frame_bytes:
                raise FramingError(f"a frame of {size} bytes exceeds {self._max_frame_bytes}")
            if len(self._buffer) - body < size:
                break
            messages.append(self._decode(bytes(self._buffer[body : body + size])))
            start = body + size
        del self._buffer[:start]
        return messages

    def _decode(self, payload: bytes) -> Message:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise FramingError(f"a frame of {len(payload)} bytes is no message: {error}") from error


def to_engine_decoder(*, max_frame_bytes: int = MAX_FRAME_BYTES) -> Decoder[ToEngine]:
    """Return the decoder of the engine's end."""
    return Decoder(ToEngine, max_frame_bytes=max_frame_bytes)


def from_engine_decoder(*, max_frame_bytes: int = MAX_FRAME_BYTES) -> Decoder[FromEngine]:
    """Return the decoder of the front's end."""
    return Decoder(FromEngine, max_frame_bytes=max_frame_bytes)


_READ_BYTES = 256 * 1024


class BlockingChannel:
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
