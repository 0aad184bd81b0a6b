"""The turns of one request: a stream of their events, coalesced for a slow reader, and their end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Never, Self

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort
from inferencecenter.server.coalescing_queue import EventQueue

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.server.context import ServerContext


MOST_SEPARATE: Final = 32
"""Number of queued events from which text is coalesced: a reader that keeps up gets one event per token."""

_ENDS: Final = (events.End, events.Error, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class _TurnSink:
    """Receives the events of one turn; implements ``sessions.client.EventSink``.

    Args:
        index: Index of the turn within the request.
        request: The turn's request.
        turns: Receives the events.
    """

    __slots__ = ("_turns", "index", "over", "request")

    def __init__(self, index: int, request: Infer, turns: RequestTurns) -> None:
        self.index = index
        self.request = request
        self.over = False
        self._turns = turns

    def send(self, event: Event) -> None:
        """Forward an event; events after the turn's end belong to other turns."""
        if self.over:
            return
        self.over = type(event) in _ENDS
        self._turns.on_event(self.index, event)


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
        self._sinks: list[_TurnSink] = []
        self._queue: EventQueue[int, Never] = EventQueue(
            limit_bytes=context.settings.outbox_bytes,
            overflowed=self._overflow,
            metrics=context.metrics,
            n_separate=MOST_SEPARATE,
        )
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._request_context.listen(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._request_context.forget(self.fail)
        self._end()

    def begin(self, request: Infer, *, note: str = "") -> int:
        """Start a turn and return its index.

        Raises:
            InferenceCenterError: See ``Sessions.infer``.
        """
        traceparent = self._request_context.caller.traceparent
        if request.traceparent is None and traceparent is not None:
            request = request.model_copy(update={"traceparent": traceparent})
        sink = _TurnSink(len(self._sinks), request, self)
        self._context.sessions.infer(self._client, request, sink, note=note)
        self._sinks.append(sink)
        return sink.index

    def fail(self, reason: Exception) -> None:
        """End all turns now; the reader of ``batches`` gets ``reason`` instead of queued events."""
        if self._failure is None:
            self._failure = reason
            self._end()
            self._wake()

    def on_event(self, index: int, event: Event) -> None:
        """Queue an event of a turn, coalesced with queued text if there is much."""
        if self._failure is not None:
            return
        self._queue.put_event(index, event)
        self._wake()

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

    async def _wait(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_at(until, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

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
        sessions = self._context.sessions
        for sink in self._sinks:
            over, sink.over = sink.over, True
            if not over and not self._outlived:
                abort = Abort(op="abort", session_id=sink.request.session_id, discard=self._discard)
                with suppress(InferenceCenterError):  # it has ended, and its end event is queued
                    sessions.abort(self._client, abort)
            sessions.detach(sink)


class NullSink:
    """An event sink that discards events."""

    def send(self, event: Event) -> None:
        """Discard the event."""
