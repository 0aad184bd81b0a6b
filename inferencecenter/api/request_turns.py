"""The sink of a turn, and the turns of one HTTP request: their events, coalesced for a slow reader, and their end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Never, Self, TypeVar

from inferencecenter.api import sse
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort
from inferencecenter.server.coalescing_queue import EventQueue

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.manager import SessionManager

KeyT = TypeVar("KeyT")

MOST_SEPARATE: Final = 32
"""Number of queued events from which text is coalesced: a reader that keeps up gets one event per token."""

_ENDS: Final = (events.End, events.Error, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class TurnSink(Generic[KeyT]):
    """Receives the events of one turn; implements ``sessions.client.EventSink``.

    Args:
        key: Identifies the turn to the receiver of its events.
        session_id: The session.
        on_event: Called with this sink and each event; the sink is ``over`` with the last one.
        outlived: Whether the turn continues when it is left, since its answer can be retrieved later.
        discard: Whether the text of a turn that is left is discarded.
    """

    __slots__ = ("_discard", "_on_event", "_outlived", "key", "over", "session_id")

    def __init__(
        self,
        key: KeyT,
        session_id: str,
        *,
        on_event: Callable[[TurnSink[KeyT], Event], None],
        outlived: bool,
        discard: bool = True,
    ) -> None:
        self.key = key
        self.session_id = session_id
        self.over = False
        self._on_event = on_event
        self._outlived = outlived
        self._discard = discard

    def send(self, event: Event) -> None:
        """Forward an event; events after the turn's end belong to other turns."""
        if self.over:
            return
        self.over = type(event) in _ENDS
        self._on_event(self, event)

    def leave(self, sessions: SessionManager, client: Principal) -> None:
        """Detach from the turn, and abort it unless it has ended or is outlived."""
        over, self.over = self.over, True
        if not over and not self._outlived:
            with suppress(InferenceCenterError):  # it has ended, and its end event is queued
                sessions.abort(client, Abort(op="abort", session_id=self.session_id, discard=self._discard))
        sessions.detach(self)


class RequestTurns:
    """Context manager of the turns that a request starts.

    On exit unfinished turns are aborted without a trace; likewise as soon as ``fail`` is called, or when more is queued
    for a slow reader than allowed.

    Args:
        context: The rest of the daemon.
        request_context: The request.
        discard: Whether the text of aborted turns is discarded.
        outlived: Whether turns continue without the request instead of being aborted.
    """

    def __init__(
        self, context: ServerContext, request_context: RequestContext, *, discard: bool = True, outlived: bool = False
    ) -> None:
        self._context = context
        self._request_context = request_context
        self._client = request_context.caller.client
        self._discard = discard
        self._outlived = outlived
        self._sinks: list[TurnSink[int]] = []
        self._queue: EventQueue[int, Never] = EventQueue(
            limit_bytes=context.settings.outbox_bytes,
            overflowed=self._overflow,
            metrics=context.metrics,
            n_separate=MOST_SEPARATE,
        )
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._connection = request_context.connection
        self._encode: Callable[[int, Event], bytes] | None = None
        self._written_s = 0.0

    def __enter__(self) -> Self:
        self._request_context.listen(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._request_context.forget(self.fail)
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def begin(self, request: Infer, *, note: str = "") -> int:
        """Start a turn and return its index.

        Raises:
            InferenceCenterError: See ``Sessions.infer``.
        """
        traceparent = self._request_context.caller.traceparent
        if request.traceparent is None and traceparent is not None:
            request = request.model_copy(update={"traceparent": traceparent})
        sink = TurnSink(
            len(self._sinks),
            request.session_id,
            on_event=self._on_event,
            outlived=self._outlived,
            discard=self._discard,
        )
        self._context.sessions.infer(self._client, request, sink, note=note)
        self._sinks.append(sink)
        return sink.key

    def fail(self, reason: Exception) -> None:
        """End all turns now; the reader of ``batches`` gets ``reason`` instead of queued events."""
        if self._failure is None:
            self._failure = reason
            self._end()
            self._wake()

    def write_through(self, encode: Callable[[int, Event], bytes]) -> None:
        """Write tokens to the connection as they come, encoded, while the reader of ``batches`` waits for events.

        The reader has sent everything before them, so the order is kept, and the client keeps up; no task is resumed
        for them. All other events, and tokens that cannot be written now, go to the reader.
        """
        self._encode = encode

    async def take_events(self, take: Callable[[int, Event], object]) -> None:
        """Call ``take`` with the index of a turn and each of its events, until all turns have ended.

        Raises:
            InferenceCenterError: See ``batches``; so does ``ClientDisconnectedError``.
        """
        async for batch in self.batches():
            for index, event in batch:
                take(index, event)

    async def write_events(
        self, encode: Callable[[int, Event], bytes], *, keepalive: bytes = sse.KEEPALIVE
    ) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events until all turns have ended, and ``keepalive`` where there is no text for long.

        Raises:
            InferenceCenterError: See ``batches``; so does ``ClientDisconnectedError``.
        """
        self.write_through(encode)
        async for batch in self.batches():
            if written := b"".join([encode(index, event) for index, event in batch]):
                yield written
            elif not batch:
                yield keepalive

    async def batches(self) -> AsyncGenerator[list[tuple[int, Event]], None]:
        """Yield new events, each with the index of its turn, until all turns have ended.

        An empty list means ``server.sse_keepalive_s`` without text, whatever other events there were.

        Raises:
            InferenceCenterError: The request was ended, or its reader is too slow.
            ClientDisconnectedError: The client has disconnected.
        """
        clock, keepalive_s = asyncio.get_running_loop().time, self._context.settings.sse_keepalive_s
        quiet_until = clock() + keepalive_s
        while True:
            if not self._queue and self._failure is None:
                await self._wait(quiet_until)
                quiet_until = max(quiet_until, self._written_s + keepalive_s)
            if self._failure is not None:
                raise self._failure
            queued = self._queue.pop_all()
            had_text = any(isinstance(event, events.Text) for _, event in queued)
            if queued:
                yield queued
            if self._failure is None and not self._queue and all(sink.over for sink in self._sinks):
                return
            if not had_text and clock() >= quiet_until:
                yield []
                had_text = True
            if had_text:
                quiet_until = clock() + keepalive_s

    def _on_event(self, sink: TurnSink[int], event: Event) -> None:
        """Queue an event of a turn, coalesced with queued text if there is much."""
        if self._failure is not None or (type(event) is events.Token and self._has_written(sink.key, event)):
            return
        self._queue.put_event(sink.key, event)
        self._wake()

    def _has_written(self, key: int, token: events.Token) -> bool:
        """Write a token to the connection if nothing is to be sent before it, and return whether this was so."""
        encode, connection, waiter = self._encode, self._connection, self._waiter
        if encode is None or connection is None or waiter is None or waiter.done() or not connection.takes_chunks:
            return False
        connection.write_chunk(encode(key, token))
        self._written_s = asyncio.get_running_loop().time()
        return True

    async def _wait(self, until: float) -> None:
        """Wait for an event, or about until a time: a timer that is set already ends the wait too, for less cost."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_at(until, self._time_out)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _time_out(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _overflow(self) -> None:
        self._failure = InferenceCenterError(ErrorCode.OVERLOADED, "the response was not read fast enough")
        # Not at once: a session may be in the middle of publishing.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        """Drop what is queued, and abort unfinished turns or detach from them."""
        self._queue.clear()
        for sink in self._sinks:
            sink.leave(self._context.sessions, self._client)


class NullSink:
    """An event sink that discards events."""

    def send(self, event: Event) -> None:
        """Discard the event."""
