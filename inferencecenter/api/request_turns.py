"""Turns that run for one request: their events as they come, joined where a reader is behind, and their end."""

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
"""Events that text is told with."""

_EVENT_BYTES: Final = 64
_LOGPROB_BYTES: Final = 96


class TextRun:
    """Text of one turn that waits to be taken as one event."""

    __slots__ = ("first", "last", "parts")

    def __init__(self, event: Text) -> None:
        self.first = self.last = event
        self.parts = [text_of(event)]

    def add(self, event: Text) -> bool:
        """Take further text; ``False`` if it is of another kind, or has more to it than text."""
        first = self.first
        if type(event) is not type(first) or event.logprobs is not None or first.logprobs is not None:
            return False
        if isinstance(event, events.ToolCall) and (event.name is not None or not _same_call(event, first)):
            return False
        self.parts.append(text_of(event))
        self.last = event
        return True

    def joined(self) -> Text:
        """Return all of it as one event, with the number of the last."""
        name = "arguments" if isinstance(self.first, events.ToolCall) else "content"
        return self.first.model_copy(update={"seq": self.last.seq, name: "".join(self.parts)})


def size_of(event: Text) -> int:
    """Return about how many bytes text takes while it waits."""
    logprobs = sum(1 + len(each.top) for each in event.logprobs or ())
    return _EVENT_BYTES + len(text_of(event)) + _LOGPROB_BYTES * logprobs


def text_of(event: Text) -> str:
    """Return the text that an event tells."""
    return event.arguments if isinstance(event, events.ToolCall) else event.content


def _same_call(event: events.ToolCall, other: Text) -> bool:
    return isinstance(other, events.ToolCall) and other.index == event.index


MOST_SEPARATE: Final = 32
"""Events that wait before text is joined: a reader that keeps up gets one event for each token."""

_ENDS: Final = (events.End, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class _TurnSink:
    """Hears one turn; implements ``sessions.client.EventSink``.

    Args:
        index: Which one of the request's turns it is.
        request: What was asked.
        turns: Where its events go.
    """

    __slots__ = ("_turns", "index", "over", "request", "turn_id")

    def __init__(self, index: int, request: Infer, turns: RequestTurns) -> None:
        self.index = index
        self.request = request
        self.turn_id: str | None = None
        self.over = False
        self._turns = turns

    def send(self, event: Event) -> None:
        """Take an event; what comes after the turn's end belongs to others."""
        if self.over:
            return
        kind = type(event)
        if kind is events.Queued:
            self.turn_id = event.turn_id  # type: ignore[attr-defined]  # mypy does not narrow by `kind`
        elif kind in _ENDS or kind is events.Error:
            self.over = True
        self._turns.on_event(self.index, event)


class RequestTurns:
    """The turns that one request has begun, until the block that this is the context manager of is left.

    Turns that have not ended by then are aborted, and leave nothing behind. So it is as soon as ``fail`` is called, or
    when more waits for a slow reader than may.

    Args:
        context: The rest of the daemon.
        request_context: The request.
        discard: Whether what aborted turns have said is forgotten.
        outlived: Whether turns go on without the request in place of being aborted.
    """

    def __init__(
        self, context: ServerContext, request_context: RequestContext, *, discard: bool = True, outlived: bool = False
    ) -> None:
        self._context = context
        self._visit = request_context
        self._client = request_context.caller.client
        self._discard = discard
        self._outlived = outlived
        self._ears: list[_TurnSink] = []
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
        """Start a turn and return its number, which counts from 0.

        Raises:
            InferenceCenterError: See ``Sessions.infer``.
        """
        traceparent = self._visit.caller.traceparent
        if request.traceparent is None and traceparent is not None:
            request = request.model_copy(update={"traceparent": traceparent})
        ear = _TurnSink(len(self._ears), request, self)
        self._context.sessions.infer(self._client, request, ear, note=note)
        self._ears.append(ear)
        return ear.index

    def fail(self, reason: Exception) -> None:
        """End all turns now; whoever reads ``batches`` gets ``reason`` in place of what waits."""
        if self._failure is None:
            self._failure = reason
            self._queue.clear()
            self._end()
            self._wake()

    def on_event(self, index: int, event: Event) -> None:
        """Take an event of a turn; joined to what waits, if that is much."""
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
        """Yield what has come, each with the number of its turn, until all turns have ended.

        An empty list says that nothing was said for ``server.sse_keepalive_s``, whatever else came.

        Raises:
            InferenceCenterError: The request was ended, or its reader is too slow.
            GoneError: Nobody listens.
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
            if self._failure is None and not self._queue and all(ear.over for ear in self._ears):
                return
            if not said and clock() >= quiet_until:
                yield []
                said = True
            if said:
                quiet_until = clock() + keepalive_s

    def _join(self, index: int, event: Text) -> bool:
        """Add text to the entry of its turn that waits last, if nothing else of it came after that."""
        for place in range(len(self._queue) - 1, max(-1, len(self._queue) - 1 - len(self._ears)), -1):
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
        # Not at once: a session may be halfway through telling something.
        error = InferenceCenterError(ErrorCode.OVERLOADED, "the answer was not read while it came")
        asyncio.get_running_loop().call_soon(self.fail, error)

    def _end(self) -> None:
        """Abort what has not ended, and have sessions go on without this request."""
        sessions = self._context.sessions
        for ear in self._ears:
            over, ear.over = ear.over, True
            if not over and not self._outlived:
                abort = Abort(op="abort", session_id=ear.request.session_id, discard=self._discard)
                with suppress(InferenceCenterError):  # it has ended, and its end is on its way
                    sessions.abort(self._client, abort)
            sessions.detach(ear)


class NullSink:
    """An event sink that discards events."""

    def send(self, event: Event) -> None:
        """Pass over the event."""
