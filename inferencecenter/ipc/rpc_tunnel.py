"""Messages of a tunnel to an RPC server of llama.cpp on another machine.

The host of the server connects to the tunnel's process on the daemon's machine, sends ``TunnelHello`` and gets
``TunnelWelcome`` or ``TunnelRefused``. From then on the connection carries numbered streams of bytes, one for each
connection of an engine: ``StreamOpened`` makes the host connect to the server. Both ends send a message at least every
``BEAT_S`` seconds. A lost connection is not made again, since llama.cpp cannot continue on another one.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from inferencecenter.ipc.framing import Decoder

MAX_TUNNEL_FRAME_BYTES: Final = 4 * 2**20
"""Largest frame; a stream's bytes come in parts of at most 256 KiB."""
_Stream: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class StreamBytes(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a stream; those of one that is closed are dropped."""

    stream: _Stream
    data: bytes


class StreamClosed(msgspec.Struct, frozen=True, tag=True):
    """No more bytes of this stream will come, and none are wanted."""

    stream: _Stream


class TunnelBeat(msgspec.Struct, frozen=True, tag=True):
    """This end is there."""


# --- host to tunnel


class RpcServerEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The server's process has ended, and the host ends too; ``from_outside`` if another process killed it."""

    detail: str
    from_outside: bool = False


class TunnelHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message; ``key`` is the ticket's and valid once. A server has ``ended`` if it never listened."""

    version: str
    name: str
    key: str
    node: str
    ended: RpcServerEnded | None = None


# --- tunnel to host


class TunnelWelcome(msgspec.Struct, frozen=True, tag=True):
    """The host is accepted."""


class TunnelRefused(msgspec.Struct, frozen=True, tag=True):
    """The host is not accepted, and ends with its server."""

    reason: str


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    """An engine has connected: connect to the server."""

    stream: _Stream


FromRpcHost: TypeAlias = TunnelHello | RpcServerEnded | StreamBytes | StreamClosed | TunnelBeat
ToRpcHost: TypeAlias = TunnelWelcome | TunnelRefused | StreamOpened | StreamBytes | StreamClosed | TunnelBeat


def from_rpc_host_decoder(*, max_frame_bytes: int) -> Decoder[FromRpcHost]:
    """Return the decoder of the tunnel's process."""
    return Decoder(FromRpcHost, max_frame_bytes=max_frame_bytes)


def to_rpc_host_decoder() -> Decoder[ToRpcHost]:
    """Return the decoder of the host."""
    return Decoder(ToRpcHost, max_frame_bytes=MAX_TUNNEL_FRAME_BYTES)
