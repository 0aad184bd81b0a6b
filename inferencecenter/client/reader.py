"""Reads one turn: asks for it, as often as it takes, and waits for what its stream is made of."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

from inferencecenter.client.stream import StreamState
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests

if TYPE_CHECKING:
    from inferencecenter.client.exchange import Exchange
    from inferencecenter.client.reconnecting import Backoff
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.stream import TurnStream, TurnStreamEvent
    from inferencecenter.protocol.base import Event


class _Abort(Enum):
    """Whether the turn is to end early, and whether the daemon was told on this socket."""

    UNWANTED = auto()
    WANTED = auto()
    SENT = auto()


class TurnReader:
    """Reads one turn once.

    Args:
        exchange: The connection.
        session: The session, which hands in its events.
        stream: What makes one stream of them.
        infer: What asks for the turn; ``None`` when somebody else did.

    Attributes:
        closed: Whether nothing more comes.
    """

    def __init__(
        self, exchange: Exchange, session: ClientSession, *, stream: TurnStream, infer: requests.Infer | None
    ) -> None:
        self._exchange = exchange
        self._session = session
        self._stream = stream
        self._infer = infer
        self._inbox: asyncio.Queue[Event | InferenceCenterError] = asyncio.Queue()
        self._ready: deque[TurnStreamEvent] = deque()
        self._request_id: str | None = None
        self._backoff: Backoff | None = None
        self._abort = _Abort.UNWANTED
        self.closed = False
        if infer is not None:
            exchange.attach(session)
        session.begin_reading(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._stream} waiting={self._inbox.qsize()} abort={self._abort.name}>"

    def put(self, item: Event | InferenceCenterError) -> None:
        """Take an event of the session, or why there will be no more."""
        self._inbox.put_nowait(item)

    def resumed(self) -> None:
        """Take note that what was sent on the socket before may not have arrived."""
        if self._abort is _Abort.SENT:
            self._abort = _Abort.WANTED

    @property
    def turn_id(self) -> str | None:
        """The turn, once the daemon has named it."""
        return self._stream.turn_id

    @property
    def is_asked(self) -> bool:
        """Whether the daemon may know of the turn."""
        return self._infer is None or self._request_id is not None

    async def next(self) -> TurnStreamEvent | None:
        """Return the turn's next event, the last being ``End``, and then ``None``. If it is cancelled, nothing is lost.

        Raises:
            InferenceCenterError: What the daemon refused, what ended the turn, or why its rest is lost.
        """
        try:
            while not self._ready and not self.closed:
                await self._read()
        except InferenceCenterError as error:
            self.close()
            if error.code is ErrorCode.SESSION_NOT_FOUND:
                self._exchange.detach(self._session)
            raise
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Read no more; the turn is left as it is."""
        self.closed = True
        self._session.end_reading(self)
        self._ignore_answers()

    async def abort(self) -> None:
        """Have the turn end, now or as soon as the daemon can be told."""
        self._abort = _Abort.WANTED
        # Without its name, whatever runs would be aborted: if this is refused, somebody else's.
        if self._stream.turn_id is not None and self._exchange.line.connected:
            await self._send_abort()

    async def repeat_abort(self, running: str | None) -> None:
        """On a new socket, say again that the turn is to end if it still runs."""
        if self._abort is _Abort.WANTED and running is not None and running == self._stream.turn_id:
            await self._send_abort()

    async def _read(self) -> None:
        stream = self._stream
        # What has come already may change what is to be asked.
        if stream.due and self._inbox.empty():
            await self._ask()
            return
        item = await self._inbox.get()
        if isinstance(item, InferenceCenterError):
            raise item
        self._ready.extend(stream.take(item))
        if stream.over:
            self.close()
        elif self._abort is _Abort.WANTED and stream.state is StreamState.RUNNING:
            await self.abort()

    async def _ask(self) -> None:
        """Send ``infer`` again, after a while if the daemon could not take it yet."""
        assert self._infer is not None, "a turn of somebody else is never due"
        if self._stream.refusal is not None:
            self._backoff = self._backoff or self._exchange.new_backoff()
            await self._exchange.pause(self._backoff, self._stream.refusal)
        await self._exchange.line.until_connected()
        if not self._inbox.empty():
            return
        self._ignore_answers()
        request = self._exchange.numbered(self._infer)
        self._request_id = str(request.id)
        self._stream.asked(self._request_id)
        self._exchange.hear_answers(self._request_id, self._session)
        try:
            await self._exchange.line.send(request)
        except BaseException:
            self._stream.due = True  # cancelled: it is not known to have gone out
            raise

    async def _send_abort(self) -> None:
        self._abort = _Abort.SENT
        abort = requests.Abort(op="abort", session_id=self._session.session_id, turn_id=self._stream.turn_id)
        await self._exchange.line.send(self._exchange.numbered(abort))

    def _ignore_answers(self) -> None:
        if self._request_id is not None:
            self._exchange.ignore_answers(self._request_id)
