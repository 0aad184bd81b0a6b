"""Client side of one turn: an iterator over its text or events, and the answer received so far."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from inferencecenter.client.answer import Answer, AnswerProperties, StreamState
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.events import Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from inferencecenter.client.answer import TurnStream, TurnStreamEvent
    from inferencecenter.client.connection import DaemonConnection
    from inferencecenter.client.retry import ReconnectBackoff, RetryPolicy
    from inferencecenter.client.session import ClientSession
    from inferencecenter.protocol.base import Event


class _Abort(Enum):
    """Whether the turn is to be aborted, and whether ``abort`` was sent on the current socket."""

    UNWANTED = auto()
    WANTED = auto()
    SENT = auto()


class TurnReader:
    """Reads the events of one turn, once.

    Args:
        connection: The connection.
        session: The session, which passes its events to ``put``.
        stream: Filters them into the turn's events.
        infer: The request that starts the turn; ``None`` for a turn that another connection started.

    Attributes:
        closed: Whether no more events follow.
    """

    def __init__(
        self, connection: DaemonConnection, session: ClientSession, *, stream: TurnStream, infer: requests.Infer | None
    ) -> None:
        self._connection = connection
        self._session = session
        self._stream = stream
        self._infer = infer
        self._inbox: asyncio.Queue[Event | InferenceCenterError] = asyncio.Queue()
        self._ready: deque[TurnStreamEvent] = deque()
        self._request_id: str | None = None
        self._backoff: ReconnectBackoff | None = None
        self._abort = _Abort.UNWANTED
        self.closed = False
        if infer is not None:
            connection.attach(session)
        session.begin_reading(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._stream} waiting={self._inbox.qsize()} abort={self._abort.name}>"

    def put(self, item: Event | InferenceCenterError) -> None:
        """Queue an event of the session, or the error that ends it."""
        self._inbox.put_nowait(item)

    def resumed(self) -> None:
        """Handle a reconnect: an abort sent on the previous socket may be lost."""
        if self._abort is _Abort.SENT:
            self._abort = _Abort.WANTED

    @property
    def turn_id(self) -> str | None:
        """Id of the turn, once the daemon has assigned it."""
        return self._stream.turn_id

    @property
    def is_requested(self) -> bool:
        """Whether the daemon may have received the turn."""
        return self._infer is None or self._request_id is not None

    async def next(self) -> TurnStreamEvent | None:
        """Return the turn's next event, the last being ``End``, and then ``None``. Safe to cancel: no event is lost.

        Raises:
            InferenceCenterError: The daemon's refusal, the failure of the turn, or why its remainder is lost.
        """
        try:
            while not self._ready and not self.closed:
                await self._read()
        except InferenceCenterError as error:
            self.close()
            if error.code is ErrorCode.SESSION_NOT_FOUND:
                self._connection.detach(self._session)
            raise
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Stop reading; the turn itself is not aborted."""
        self.closed = True
        self._session.end_reading(self)
        self._ignore_answers()

    async def abort(self) -> None:
        """Abort the turn, now or as soon as the connection is restored."""
        self._abort = _Abort.WANTED
        # Without a turn id the daemon would abort the running turn, which is another one if this one is refused.
        if self._stream.turn_id is not None and self._connection.connected:
            await self._send_abort()

    async def resend_abort(self, running: str | None) -> None:
        """After a reconnect, send the abort again if the turn is still running."""
        if self._abort is _Abort.WANTED and running is not None and running == self._stream.turn_id:
            await self._send_abort()

    async def _read(self) -> None:
        stream = self._stream
        # Queued events come first: they may change whether and what to send.
        if stream.must_send and self._inbox.empty():
            await self._send_infer()
            return
        item = await self._inbox.get()
        if isinstance(item, InferenceCenterError):
            raise item
        self._ready.extend(stream.apply(item))
        if stream.is_over:
            self.close()
        elif self._abort is _Abort.WANTED and stream.state is StreamState.RUNNING:
            await self.abort()

    async def _send_infer(self) -> None:
        """Send ``infer`` (again), after a delay if the daemon refused it temporarily."""
        assert self._infer is not None, "a followed turn sends no request"
        if self._stream.refusal is not None:
            self._backoff = self._backoff or self._connection.new_backoff()
            await self._connection.pause(self._backoff, self._stream.refusal)
        await self._connection.wait_connected()
        if not self._inbox.empty():
            return
        self._ignore_answers()
        request = self._connection.with_new_id(self._infer)
        self._request_id = str(request.id)
        self._stream.requested(self._request_id)
        self._connection.register_listener(self._request_id, self._session)
        try:
            await self._connection.send(request)
        except BaseException:
            self._stream.must_send = True  # cancelled: it may not have been sent
            raise

    async def _send_abort(self) -> None:
        self._abort = _Abort.SENT
        abort = requests.Abort(op="abort", session_id=self._session.session_id, turn_id=self._stream.turn_id)
        await self._connection.send(self._connection.with_new_id(abort))

    def _ignore_answers(self) -> None:
        if self._request_id is not None:
            self._connection.unregister_listener(self._request_id)


T_co = TypeVar("T_co", covariant=True)


class ClientTurn(AnswerProperties):
    """One turn, to be read once, made by ``ClientSession.infer`` or ``ClientSession.follow``.

    Iterating yields the answer's text as it arrives. The request is sent when the first piece is read. Leaving the loop
    before the end, by ``break``, an exception or cancellation, aborts the turn: the text generated by then stays part
    of the conversation, and the session's next turn waits until the abort has completed.

    Args:
        session: The session.
        begin: Returns a reader for the turn, also for each retry after a refusal; ``None`` when there is no turn.
        retry: Retry policy; ``None`` for a turn that another connection started.
    """

    def __init__(
        self, session: ClientSession, begin: Callable[[], TurnReader | None], retry: RetryPolicy | None
    ) -> None:
        self.answer = Answer()
        self._session = session
        self._begin = begin
        self._retry = retry
        self._ends_when_left = retry is not None
        self._is_aborted = False
        self._reader: TurnReader | None = None
        self._over = False
        self._drain: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()

    def __repr__(self) -> str:
        how = "over" if self._over else "left" if self._drain else "open"
        return f"<{type(self).__name__} {self.turn_id} {how} {self.finish_reason}>"

    @property
    def turn_id(self) -> str | None:
        """Id of the turn, once the daemon has assigned it."""
        return None if self._reader is None else self._reader.turn_id

    def __aiter__(self) -> TurnEventIterator[str]:
        return TurnEventIterator(self, self.next_text)

    def events(self) -> TurnEventIterator[TurnStreamEvent]:
        """Return an iterator over all events of the turn, not only its text; the last is ``End``.

        Leaving it early aborts the turn.
        """
        return TurnEventIterator(self, self.next_event)

    async def __aenter__(self) -> ClientTurn:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    async def result(self) -> Answer:
        """Read the turn to its end, even after leaving it, and return the whole answer.

        Raises:
            InferenceCenterError: See ``next_event``.
        """
        async for _ in self.events():
            pass
        return self.answer

    rest = result  # former name

    async def next_event(self) -> TurnStreamEvent | None:
        """Return the next event, ``None`` after the end.

        Raises:
            InferenceCenterError: The daemon's refusal, the failure of the turn, or why its remainder is lost.
        """
        if self._drain is not None:
            await asyncio.wait((self._drain,))
        async with self._reading:
            return None if self._over else await self._next_event()

    async def next_text(self) -> str | None:
        """Return the next piece of text, ``None`` after the end.

        Raises:
            InferenceCenterError: See ``next_event``.
        """
        while (event := await self.next_event()) is not None:
            if isinstance(event, Token):
                return event.content
        return None

    async def abort(self) -> None:
        """Abort the turn, also while the connection is lost; its reader still receives the events up to ``End``."""
        self._is_aborted = True
        if self._reader is not None:
            await self._reader.abort()

    def detach(self) -> None:
        """Let the turn continue on the daemon when it is left, so that a later resume of the session can follow it."""
        self._ends_when_left = False

    let_run = detach  # former name

    def leave(self) -> None:
        """Stop reading, and abort the turn in the background if it has not ended."""
        if self._over or self._drain is not None:
            return
        reader = self._reader
        if self._ends_when_left and reader is not None and reader.is_requested and not reader.closed:
            self._drain = self._session.drain(self._read_to_end(reader))
        if self._drain is None:
            self._over = True
            if reader is not None:
                reader.close()

    async def _next_event(self) -> TurnStreamEvent | None:
        while not self._over:
            if self._reader is None:
                await self._session.wait_settled()
                self._reader = self._begin()
            try:
                event = None if self._reader is None else await self._reader.next()
            except InferenceCenterError as error:
                await self._begin_again(error)
                continue
            if event is None:
                self._over = True
            else:
                self.answer.apply(event)
            return event
        return None

    async def _begin_again(self, error: InferenceCenterError) -> None:
        """Prepare a retry, after the delay of the policy.

        Raises:
            InferenceCenterError: The error, if it is not to be retried.
        """
        try:
            if self._retry is None or self._is_aborted or self._drain or self.answer.has_begun:
                raise error
            await self._retry.wait(error)
        except InferenceCenterError:
            self._over = True
            raise
        self._reader = None

    async def _read_to_end(self, reader: TurnReader) -> None:
        await reader.abort()
        # The caller has left the turn and does not handle its failure.
        with contextlib.suppress(InferenceCenterError):
            async with self._reading:
                while await self._next_event() is not None:
                    pass


class TurnEventIterator(Generic[T_co]):
    """An iterator over a turn. When it is garbage collected before the end, the turn is left.

    Args:
        turn: The turn.
        advance: Returns the next item, and ``None`` after the last.
    """

    def __init__(self, turn: ClientTurn, advance: Callable[[], Awaitable[T_co | None]]) -> None:
        self._turn = turn
        self._advance = advance
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> TurnEventIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        self._loop = asyncio.get_running_loop()
        try:
            item = await self._advance()
        except BaseException:
            # The exception keeps this frame alive, so `__del__` may run much later.
            self._turn.leave()
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    def __del__(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if _runs_here(loop):
            self._turn.leave()
        else:  # collected in another thread, or between two runs of the loop
            loop.call_soon_threadsafe(self._turn.leave)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
