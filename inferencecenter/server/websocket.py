"""uvicorn's WebSocket protocol, made robust against clients that stop reading.

Frames are written by plain calls rather than through ASGI's ``send``, which waits for a reader that may never come.
Measured on Linux: without ``TCP_NOTSENT_LOWAT`` the kernel buffers 4 MB before a stopped reader is noticed, and a
graceful close of such a socket never completes; hence the limit, and ``abort``.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final, cast

import structlog
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from inferencecenter.protocol.close import CloseCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from websockets.frames import Frame
    from websockets.http11 import Request

    from inferencecenter.telemetry.logs import LogLimit

NOT_SENT_LOW_WATER_BYTES: Final = 16 * 1024
_HIGH_WATER_BYTES: Final = 32 * 1024
_LOW_WATER_BYTES: Final = 8 * 1024
_UNIX_BUFFER_BYTES: Final = 64 * 1024
LINGER_S: Final = 5.0
CLOSE_FRAME_TIMEOUT_S: Final = 1.0
"""Seconds for a close frame to reach a peer that seems to have stopped reading."""
SCOPE_KEY: Final = "websocket"
PEER_KEY: Final = "unix_peer"
"""What stands for the address of a peer on a Unix socket, in ``state`` of its scope."""
_PIECE_BYTES: Final = 8 * 1024
_NOT_UTF8: Final = 1007
_BAD_UPGRADE: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 32\r\nconnection: close\r\n\r\n"
    b"the upgrade cannot be understood"
)

_log = structlog.get_logger(__name__)


def bound_writes(transport: asyncio.Transport) -> None:
    """Send writes at once, and limit the unsent bytes in the kernel, which cannot be counted here."""
    transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=_LOW_WATER_BYTES)
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER_BYTES)
    elif raw is not None and raw.family == socket.AF_UNIX:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)


def peer_of(protocol: H11Protocol | WebSocketsSansIOProtocol) -> tuple[str, int] | None:
    """Return the peer of a connection as ASGI's ``client``; on a Unix socket its text has no port."""
    unix_peer = protocol.app_state.get(PEER_KEY)
    return protocol.client if unix_peer is None else (unix_peer, 0)


class WebSocket(WebSocketsSansIOProtocol):
    """A socket; the ASGI application finds it in ``scope["state"]["websocket"]``.

    Args:
        args: From uvicorn.
        bad_frames: Shared by all sockets: limits the log lines about invalid frames.
        options: From uvicorn.
    """

    on_writable: Callable[[], None] | None = None
    """Called when the transport is writable again."""
    on_lost: Callable[[], None] | None = None
    """Called when the transport is closed."""
    _alive: bool = False
    _failed: bool = False

    def __init__(self, *args: Any, bad_frames: LogLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bad_frames = bad_frames
        self._unread = bytearray()
        self._reading: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare the transport of an upgraded socket."""
        super().connection_made(transport)
        self.client = peer_of(self)
        self.lost: asyncio.Future[None] = self.loop.create_future()
        bound_writes(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application that the peer is gone."""
        super().connection_lost(exc)
        if self._reading is not None:
            self._reading.cancel()
        if not self.lost.done():
            self.lost.set_result(None)
        if self.on_lost is not None:
            self.on_lost()

    def handle_connect(self, event: Request) -> None:
        """Pass this object to the application along with the upgrade."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"][SCOPE_KEY] = self

    def data_received(self, data: bytes) -> None:
        """Process received data; after a protocol error it is discarded until the peer has seen the reason."""
        self._alive = True
        if self._failed:
            return
        if not self.handshake_initiated:
            super().data_received(data)  # the head, which is complete
            if not self.handshake_initiated:
                self._refuse_upgrade()
            return
        is_behind = bool(self._unread)
        self._unread += data
        if not is_behind:
            self._read_on()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message; if none is left, parse more of the received data."""
        message = await self.queue.get()
        if self.queue.empty():
            if self._unread:
                self._read_on_soon()
            else:
                self._resume_reading()
        return message

    # One read of the transport may hold 40,000 frames, which take a tenth of a second to parse. So it is parsed in
    # pieces, the next one in another iteration of the event loop, and only once the application has taken the messages
    # of the last one. A large frame just takes more iterations.

    def _read_on(self) -> None:
        self._reading = None
        piece = bytes(self._unread[:_PIECE_BYTES])
        del self._unread[:_PIECE_BYTES]
        super().data_received(piece)
        if self._failed:
            self._unread.clear()
        if not self._unread:
            if self.queue.empty():
                self._resume_reading()
            return
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
        if self.queue.empty() or self.close_sent:
            self._read_on_soon()

    def _read_on_soon(self) -> None:
        if self._reading is None and not self.disconnected:
            self._reading = self.loop.call_soon(self._read_on)

    def _resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the application; text that is not UTF-8 closes the socket with 1007."""
        if self.curr_msg_data_type != "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        data, self.frames = b"".join(self.frames), []
        try:
            self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
        except UnicodeDecodeError:  # which uvicorn logs with its traceback, for each frame
            if self.conn.state is not State.OPEN:
                return  # the peer's close came with it, and is answered next
            self.conn.send_close(_NOT_UTF8, "the frame is not UTF-8")
            self.handle_parser_exception()
            return
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    async def send(self, message: ASGISendEvent) -> None:
        """Forward a message of the application; mark a refused upgrade as complete, which uvicorn omits."""
        await super().send(message)
        if message["type"] == "websocket.accept":
            # uvicorn, websockets and Starlette keep the headers of the upgrade as long as the socket, 4 KB in all.
            for headers in (self.request.headers, self.response.headers, cast("list[Any]", self.scope["headers"])):
                headers.clear()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def resume_writing(self) -> None:
        """Resume writing: the peer has caught up."""
        super().resume_writing()
        self._alive = True
        if self.on_writable is not None:
            self.on_writable()

    @property
    def takes_frames(self) -> bool:
        """Whether a frame may be written now; while the peer is behind it should be queued."""
        return self.writable.is_set()

    def write_text(self, frame: bytes) -> None:
        """Write a text frame, regardless of back-pressure; ignored once the socket is closing."""
        if not self.close_sent and self.conn.state is State.OPEN and not self.transport.is_closing():
            self.conn.send_text(frame)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def write_piece(self, piece: bytes, *, first: bool, last: bool) -> None:
        """Write a fragment of a text message; ignored once the socket is closing."""
        if not self.close_sent and self.conn.state is State.OPEN and not self.transport.is_closing():
            if first:
                self.conn.send_text(piece, fin=last)
            else:
                self.conn.send_continuation(piece, fin=last)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def finish(self, code: int, reason: str, *, linger_s: float = LINGER_S) -> None:
        """Send a close frame after all written data, and abort a peer that does not answer within ``linger_s``."""
        if not self.handshake_complete:
            self.send_500_response()
            self.transport.close()
        if self.close_sent or self.disconnected or self.transport.is_closing():
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self._linger(linger_s)

    def handle_ping(self) -> None:
        """Answer a ping, unless the peer does not read its pongs or has failed."""
        pong = b"".join(self.conn.data_to_send())
        if self.takes_frames and not self._failed:
            self.transport.write(pong)

    def handle_close(self, event: Frame) -> None:
        """Answer the peer's close, and wait a bounded time for it to be read."""
        super().handle_close(event)
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(LINGER_S, self.abort)

    def handle_parser_exception(self) -> None:
        """Report a protocol error of the peer, mostly a frame over the limit (1009).

        Received data is read and discarded for a while before the connection is closed. Closed with unread data it
        would be reset, and the peer, still sending its large frame, would never see the reason.
        """
        self._failed = True
        close = self.conn.close_sent
        code, reason = (close.code, close.reason) if close is not None else (CloseCode.INTERNAL, "")
        if (n_more := self._bad_frames.admit()) is not None:
            _log.warning("bad_frame", address=self.client and self.client[0], code=code, reason=reason, more=n_more)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.stop_keepalive()
        self._linger(LINGER_S)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def keepalive_timeout(self) -> None:
        """Abort a peer that has shown no activity since the ping; a slow reader gets more time."""
        if self._alive and self.ping_timeout is not None:
            self._alive = False
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        self.finish(CloseCode.INTERNAL, "keepalive ping timeout", linger_s=CLOSE_FRAME_TIMEOUT_S)

    def send_keepalive_ping(self) -> None:
        self._alive = False
        super().send_keepalive_ping()

    def shutdown(self) -> None:
        """Close at shutdown."""
        self.finish(CloseCode.RESTART, "the daemon stops")

    def abort(self) -> None:
        """Abort the connection and drop its buffers."""
        self.transport.abort()

    def _refuse_upgrade(self) -> None:
        """Refuse an upgrade request with a length or a body, which uvicorn would leave unanswered."""
        self._failed = True
        self.transport.write(_BAD_UPGRADE)
        self.transport.close()

    def _linger(self, linger_s: float) -> None:
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self._unread:
            self._read_on_soon()
        else:
            self._resume_reading()
        self.close_timer = self.loop.call_later(linger_s, self.abort)
