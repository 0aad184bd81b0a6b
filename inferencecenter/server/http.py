"""uvicorn's HTTP protocol with a timeout for every state of a connection, to survive slow peers.

uvicorn limits the idle time between requests and the size of a request head. It limits neither the time that a head
takes, nor an unwanted request body, nor a response that the peer does not read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import orjson
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from inferencecenter.server.connection_limits import ConnectionLimiter
from inferencecenter.server.websocket import bound_writes, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.server import ServerState

LINGER_S: Final = 5.0
"""Seconds for a peer that still sends to read the answer, before the connection is reset."""
MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum size of the request line and headers."""
MAX_HEADERS: Final = 256
SMALL_CHUNKS: Final = 1024
"""Chunks of a body after which they must have an average size of ``SMALL_CHUNK_BYTES``."""
SMALL_CHUNK_BYTES: Final = 128
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_CHUNKED: Final = re.compile(rb"\ntransfer-encoding: chunked\r\n", re.IGNORECASE)
STALL_S: Final = 30.0
"""Seconds that a response may wait without a single byte being read."""

SCOPE_KEY: Final = "http"
"""Where a request's scope has its connection, in ``state``."""

_faults = logging.getLogger("uvicorn.error.http")
# Errors of peers are counted and not logged, as they could flood the log.
_faults.setLevel(logging.ERROR)


class _StrictHttp(h11.Connection):
    """Rejects requests that are costly for h11 to parse, or that a proxy may parse differently; writes chunks fast.

    Each header and each chunk costs microseconds, so a head of thousands of headers, or a body of one-byte chunks,
    would block the event loop for a tenth of a second, without authentication. h11 checks the size of a head only once
    it is complete. If both ``Content-Length`` and ``Transfer-Encoding`` are present, it uses the chunks; behind a proxy
    that uses the length, a second request could be smuggled in the body of the first (RFC 9112, 6.3). HTTP/1.0 has no
    chunks.

    Each token of a stream is a chunk. Data in the middle of a chunked body changes no state of h11, so ``chunk`` frames
    it at a tenth of the cost; h11 does everything else, and knows that the body goes on.
    """

    _n_chunks = 0
    _n_chunked_bytes = 0
    _is_chunked = False
    _has_body = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            _check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = self._n_chunked_bytes = 0
            self._has_body = event.method != b"HEAD"
            _check_length(event)
        elif isinstance(event, h11.Data):
            self._n_chunks += event.chunk_start
            self._n_chunked_bytes += len(event.data)
            if self._n_chunks > SMALL_CHUNKS and self._n_chunked_bytes < self._n_chunks * SMALL_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # it has an overload for each kind
        """Return the bytes of an event; see ``h11.Connection.send``."""
        output = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = self._has_body and output is not None and _CHUNKED.search(output) is not None
        return output

    def chunk(self, data: bytes) -> bytes | None:
        """Return data as a chunk of the response's body, as ``send`` does; ``None`` if the body has no chunks now."""
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self.in_chunks else None

    @property
    def in_chunks(self) -> bool:
        """Whether the body of a response is being sent, in chunks."""
        return self._is_chunked and self.our_state is h11.SEND_BODY


def _check_head(waiting: bytes) -> None:
    """Refuse a request head, possibly incomplete, that is too large.

    Raises:
        h11.RemoteProtocolError: It has too many lines or bytes.
    """
    end = _HEAD_END.search(waiting)
    head = waiting if end is None else waiting[: end.start()]
    if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEADERS:
        raise h11.RemoteProtocolError(f"the head has more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes")


def _check_length(request: h11.Request) -> None:
    """Refuse a request of ambiguous length.

    Raises:
        h11.RemoteProtocolError: Its length is given in two ways, or in one that its HTTP version does not support.
    """
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("the length of the request is ambiguous")


class HttpConnection(H11Protocol):
    """A connection, until it is closed or upgraded to a WebSocket.

    Args:
        config: From uvicorn.
        server_state: From uvicorn: state shared by all connections.
        app_state: From uvicorn.
        _loop: From uvicorn.
        limiter: All HTTP connections.
        head_timeout_s: Seconds within which the head of a request must arrive.
        refused: Called with the HTTP status of each response that is sent here rather than by the application.
        connected: Called when the connection was made.
        refusal: Returns the response to a refused upgrade, given the peer and the headers.
    """

    def __init__(  # noqa: PLR0913 - uvicorn's own arguments, and after them ours by their names
        self,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limiter: ConnectionLimiter[HttpConnection],
        head_timeout_s: float,
        refused: Callable[[int], object],
        connected: Callable[[], object],
        refusal: Callable[[str, Headers], bytes | None],
    ) -> None:
        super().__init__(config, server_state, {**app_state, SCOPE_KEY: self}, _loop)
        self.conn: _StrictHttp = _StrictHttp(h11.SERVER, config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        self.logger = _faults
        self._refused = refused
        self._connected = connected
        self._refusal = refusal
        self._limiter = limiter
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._in_head = False
        self._malformed = False
        self._lingers = False
        self._is_socket = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, if there is room."""
        self._raw = cast("asyncio.Transport", transport)
        super().connection_made(self._raw)
        self.client = peer_of(self)
        self._connected()
        bound_writes(self._raw)
        self.transport = cast("asyncio.Transport", _Closing(self._raw, self._close))
        if self._limiter.admit(self):
            self._await_head()
        else:
            self._write(HTTPStatus.SERVICE_UNAVAILABLE, "queue_full", "the daemon has too many connections")
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        for timer in (self._end_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data; after the response, the rest of the request is discarded."""
        if self._lingers:
            return
        super().data_received(data)
        if self._is_socket or self._lingers or self._raw.is_closing():
            return
        if self._answering:
            self._busy()
        else:
            self._in_head = True
            self._await_head()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Hand the connection over to a WebSocket, unless the upgrade is refused."""
        refusal = self._refusal(self.client[0] if self.client else "", Headers(raw=self.headers))
        if refusal is not None:  # before anything is allocated for a socket
            self._refused(HTTPStatus.TOO_MANY_REQUESTS.value)
            self._raw.write(refusal)
            self._raw.close()
            return
        self._is_socket = True
        self._leave()
        self.transport = self._raw
        del self.app_state[SCOPE_KEY]
        super().handle_websocket_upgrade(event)

    @property
    def takes_chunks(self) -> bool:
        """Whether ``write_chunk`` would write a part of the body."""
        return not self.flow.write_paused and not self.cycle.disconnected and self.conn.in_chunks

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of the body of the response in progress, and return whether that was possible.

        Otherwise ASGI's ``send`` has to: the body has no chunks, the client is behind, or has disconnected. Each token
        is such a part, and this takes a fifth of the time of ``send`` and the layers around it.
        """
        if self.flow.write_paused or self.cycle.disconnected or (chunk := self.conn.chunk(data)) is None:
            return False
        self.transport.write(chunk)
        return True

    def on_response_complete(self) -> None:
        """Wait for the next request; if the peer still sends this one, read and discard it for a while, then reset."""
        unfinished = self.cycle.more_body
        super().on_response_complete()
        if unfinished:
            self._close()
        elif not self._answering and not self._raw.is_closing():
            self._in_head = False
            self._limiter.mark_idle(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        self._answer(HTTPStatus.BAD_REQUEST, "invalid_request", msg)

    def pause_writing(self) -> None:
        """Pause the response while the peer does not read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def shutdown(self) -> None:
        """Close at shutdown, after the current response."""
        if self._lingers:
            self._raw.abort()
        else:
            super().shutdown()

    def evict(self) -> None:
        """Close an idle connection to make room for another."""
        self._raw.abort()

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._limiter.mark_idle(self)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_overdue)

    def _busy(self) -> None:
        self._limiter.mark_busy(self)
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _leave(self) -> None:
        self._busy()
        self._limiter.leave(self)

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._answer(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the request head did not arrive in time")
        else:
            self._raw.close()

    def _answer(self, status: HTTPStatus, code: str, message: str) -> None:
        """Send an error response, stop the application's handling of the request, and close once it is read."""
        self._malformed = True
        begun = False
        if self._answering:
            begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not begun:
            self._write(status, code, message)
        self._close()

    def _write(self, status: HTTPStatus, code: str, message: str) -> None:
        self._refused(status.value)
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            *(f"{name.decode()}: {value.decode()}" for name, value in self.server_state.default_headers),
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self._raw.write("\r\n".join((*lines, "", "")).encode() + body)

    def _close(self) -> None:
        """Close once all that was written has been read.

        A connection closed with unread received data is reset, and a peer that still sends would never see the
        response.
        """
        if self._lingers or self._raw.is_closing():
            return
        if not self._malformed and (self.cycle is None or not self.cycle.more_body):
            self._raw.close()
            self._end_timer = self.loop.call_later(STALL_S, self._raw.abort)
            return
        self._lingers = True
        self._busy()
        self._limiter.mark_idle(self)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self._raw.can_write_eof():
            self._raw.write_eof()
        self._end_timer = self.loop.call_later(LINGER_S, self._raw.abort)

    def _watch_reader(self) -> None:
        self._unsent_bytes = self._raw.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_S, self._check_reader)

    def _check_reader(self) -> None:
        """Reset the connection if nothing was read since the last check; a slow reader gets more time."""
        if self._raw.get_write_buffer_size() < self._unsent_bytes:
            self._watch_reader()
        else:
            self._raw.abort()


class _Closing:
    """A transport that delegates closing to its connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.write = transport.write  # called for each token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
