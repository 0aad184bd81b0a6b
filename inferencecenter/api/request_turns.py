"""The turns of one request: a stream of their events, coalesced for a slow reader, and their end."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.server.context import ServerContext


Text: TypeAlias = events.Token | events.Reasoning | events.ToolCall
"""Events that carry text."""

_EVENT_BYTES: Final = 64
_LOGPROB_BYTES: Final = 96


class TextRun:
    """Queued text of one turn, delivered as one event."""

    __slots__ = ("first", "last", "parts")

    def __init__(self, event: Text) -> None:
        self.first = self.last = event
        self.parts = [text_of(event)]

    def add(self, event: Text) -> bool:
        """Append text; ``False`` for an event of another kind, or one with more than text."""
        first = self.first
        if type(event) is not type(first) or event.logprobs is not None or first.logprobs is not None:
            return False
        if isinstance(event, events.ToolCall) and (event.name is not None or not _same_call(event, first)):
            return False
        self.parts.append(text_of(event))
        self.last = event
        return True

    def joined(self) -> Text:
        """Return all of it as one event, with the sequence number of the last."""
        name = "arguments" if isinstance(self.first, events.ToolCall) else "content"
        return self.first.model_copy(update={"seq": self.last.seq, name: "".join(self.parts)})


def size_of(event: Text) -> int:
    """Return the approximate size of an event in bytes."""
    logprobs = sum(1 + len(each.top) for each in event.logprobs or ())
    return _EVENT_BYTES + len(text_of(event)) + _LOGPROB_BYTES * logprobs


def text_of(event: Text) -> str:
    """Return the text of an event."""
    return event.arguments if isinstance(event, events.ToolCall) else event.content


def _same_call(event: events.ToolCall, other: Text) -> bool:
    return isinstance(other, events.ToolCall) and other.index == event.index


MOST_SEPARATE: Final = 32
"""Number of queued events from which text is coalesced: a reader that keeps up gets one event per token."""

_ENDS: Final = (events.End, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class _TurnSink:
    """Receives the events of one turn; implements ``sessions.client.EventSink``.

    Args:
        index: Index of the turn within the request.
        request: The turn's request.
        turns: Receives the events.
    """

    __slots__ = ("_turns", "index", "over", "request", "turn_id")

    def __init__(self, index: int, request: Infer, turns: RequestTurns) -> None:
        self.index = index
        self.request = request
        self.turn_id: str | None = None
        self.over = False
        self._turns = turns

    def send(self, event: Event) -> None:
        """Forward an event; events after the turn's end belong to other turns."""
        if self.over:
            return
        kind = type(event)
        if kind is events.Queued:
            self.turn_id = event.turn_id  # type: ignore[attr-defined]  # mypy does not narrow by `kind`
        elif kind in _ENDS or kind is events.Error:
            self.over = True
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
        self._visit = request_context
        self._client = request_context.caller.client
        self._discard = discard
        self._outlived = outlived
        self._sinks: list[_TurnSink] = []
        self._queue: deque[tuple[int, Event | TextRun]] = deque()
        self._bytes = 0
        self._said = False
        self._overflowed = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._visit.listen(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._visit.forget(self.fail)
        self._end()

    def begin(self, request: Infer, *, note: str = "") -> int:
        """Start a turn and return its index.

        Raises:
            InferenceCenterError: See ``Sessions.infer``.
        """
        traceparent = self._visit.caller.traceparent
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
            self._queue.clear()
            self._end()
            self._wake()

    def on_event(self, index: int, event: Event) -> None:
        """Queue an event of a turn, coalesced with queued text if there is much."""
        if self._failure is not None:
            return
        queue = self._queue
        if isinstance(event, Text):
            self._said = True
            if len(queue) >= MOST_SEPARATE and self._join(index, event):
                self._bytes += len(text_of(event))
            else:
                queue.append((index, event))
                self._bytes += size_of(event)
            if self._bytes > self._context.settings.outbox_bytes and not self._overflowed:
                self._overflow()
        else:
            queue.append((index, event))
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
            said, self._said = self._said, False
            if taken := self._taken():
                yield taken
            if self._failure is None and not self._queue and all(sink.over for sink in self._sinks):
                return
            if not said and clock() >= quiet_until:
                yield []
                said = True
            if said:
                quiet_until = clock() + keepalive_s

    def _join(self, index: int, event: Text) -> bool:
        """Append text to the turn's last queued entry, unless another event of the turn came after it."""
        for place in range(len(self._queue) - 1, max(-1, len(self._queue) - 1 - len(self._sinks)), -1):
            other, waiting = self._queue[place]
            if other != index:
                continue
            if isinstance(waiting, TextRun):
                return waiting.add(event)
            if not isinstance(waiting, Text):
                return False
            run = TextRun(waiting)
            if run.add(event):
                self._queue[place] = index, run
                return True
            return False
        return False

    def _taken(self) -> list[tuple[int, Event]]:
        queue = self._queue
        taken = [(index, each.joined() if type(each) is TextRun else each) for index, each in queue]
        queue.clear()
        self._bytes = 0
        return taken  # type: ignore[return-value]  # what is no run is an event

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
        self._overflowed = True
        self._context.metrics.outbox_overflows.inc()
        # Not at once: a session may be in the middle of publishing.
        error = InferenceCenterError(ErrorCode.OVERLOADED, "the response was not read fast enough")
        asyncio.get_running_loop().call_soon(self.fail, error)

    def _end(self) -> None:
        """Abort unfinished turns, or detach from them."""
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
