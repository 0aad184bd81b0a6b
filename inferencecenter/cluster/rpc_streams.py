"""One end of a tunnel to an RPC server: numbered streams of bytes over one connection, and heartbeats.

A socket that cannot be written stops the reading of the tunnel, and a full tunnel that of the sockets. All streams stop
with one of them: an RPC server serves one connection at a time, so the others have nothing to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.keepalive import Keepalive
from inferencecenter.ipc.rpc_tunnel import FromRpcHost, StreamBytes, StreamClosed, ToRpcHost, TunnelBeat

if TYPE_CHECKING:
    from inferencecenter.ipc.framing import Decoder

_WINDOW_BYTES: Final = 4 * 2**20
_Sent = TypeVar("_Sent", bound=FromRpcHost | ToRpcHost)
_Received = TypeVar("_Received", bound=FromRpcHost | ToRpcHost)


class TunnelStream(asyncio.Protocol):
    """The socket of one stream; what arrives before it is connected is kept."""

    def __init__(self, tunnel: TunnelEnd[Any, Any], number: int) -> None:
        self._tunnel = tunnel
        self.number = number
        self._is_closed = False
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Write what the other end has read; it may not know yet that the socket is closed, on which uvloop raises."""
        if self._transport is None:
            self._early.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the socket after what was written."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WINDOW_BYTES)
        for data in self._early:
            self._transport.write(data)
        self._early.clear()
        if self._is_closed:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._tunnel.channel.send(StreamBytes(self.number, data))
        if not self._tunnel.channel.has_room:
            self.pause()

    def pause_writing(self) -> None:
        self._tunnel.channel.pause_reading()

    def resume_writing(self) -> None:
        self._tunnel.channel.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.channel.resume_reading()
        self._tunnel.lose(self.number)


class TunnelEnd(Generic[_Sent, _Received]):
    """The streams of a tunnel, and the heartbeats of this end.

    Args:
        decoder: Decodes what arrives.
        lost_after_s: The connection is dropped after this time without a message.
    """

    def __init__(self, decoder: Decoder[_Received], *, lost_after_s: float) -> None:
        self.channel: Channel[_Sent | StreamBytes | StreamClosed | TunnelBeat, _Received] = Channel(
            decoder, self.receive, on_drain=self._resume_streams, window_bytes=_WINDOW_BYTES
        )
        self.lost_after_s = lost_after_s
        self._streams: dict[int, TunnelStream] = {}
        self._keepalive = Keepalive(self.channel, beat=self.beat, lost_after_s=lambda: self.lost_after_s)

    def add(self, stream: TunnelStream) -> None:
        """Add a stream whose socket is connected or about to be."""
        self._streams[stream.number] = stream

    def lose(self, number: int) -> None:
        """Tell the other end that a stream's socket is closed, unless it knows."""
        if self._streams.pop(number, None) is not None:
            self.channel.send(StreamClosed(number))

    async def run(self) -> str:
        """Exchange heartbeats until the connection is lost, and return the cause; its streams end with it."""
        try:
            return await self._keepalive.run()
        finally:
            while self._streams:
                self._streams.popitem()[1].close()

    def beat(self) -> None:
        """Tell the other end that this one is there."""
        self.channel.send(TunnelBeat())

    def on_message(self, message: _Received) -> None:
        """Handle a message that is neither a stream's nor a heartbeat."""

    def receive(self, message: _Received) -> None:
        """Handle a message."""
        self._keepalive.received()
        match message:
            case StreamBytes(stream=number, data=data):
                if (stream := self._streams.get(number)) is not None:
                    stream.write(data)
            case StreamClosed(stream=number):
                if (stream := self._streams.pop(number, None)) is not None:
                    stream.close()
            case TunnelBeat():
                pass
            case _:
                self.on_message(message)

    def _resume_streams(self) -> None:
        for stream in self._streams.values():
            stream.resume()
