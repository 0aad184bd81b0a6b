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

Message = TypeVar("Message")


class FramingError(Exception):
    """The peer sent something that is not a frame; nothing after it can be decoded."""


def encode(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        FramingError: The message is larger than ``MAX_FRAME_BYTES``.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FramingError(f"a {type(message).__name__} of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class Decoder(Generic[Message]):
    """Reassembles messages from arbitrarily split bytes.

    Args:
        union: The messages that may arrive, as ``ToEngine``.
        max_frame_bytes: Longer frames are rejected as garbage.
    """

    def __init__(self, union: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add ``data`` and return the messages that are now complete, oldest first.

        Raises:
            FramingError: The bytes are not frames of known messages; the decoder is unusable afterwards.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            size = int.from_bytes(self._buffer[start:body], "little")
            if size > self.max_frame_bytes:
                raise FramingError(f"a frame of {size} bytes exceeds {self.max_frame_bytes}")
            if len(self._buffer) - body < size:
                break
            payload = bytes(self._buffer[body : body + size])
            try:
                messages.append(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                raise FramingError(f"a frame of {size} bytes is no message: {error}") from error
            start = body + size
        del self._buffer[:start]
        return messages


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
        """Wait for the next message; ``None`` when the peer has disconnected, even in the middle of a frame.

        Raises:
            FramingError: The received bytes are not a frame.
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
        """Write a message; blocks while the peer is slow to read.

        Raises:
            FramingError: The message is too large.
            ConnectionError: The peer has disconnected.
        """
        frame = encode(message)
        with self._sending:
            self._connection.sendall(frame)

    def close(self) -> None:
        self._connection.close()
