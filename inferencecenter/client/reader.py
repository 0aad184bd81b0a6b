"""Reads one turn: asks for it, as often as it takes, and waits for what its stream is made of."""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING

from inferencecenter.client.stream import StreamState
from inferencecenter.errors import InferenceCenterError
from inferencecenter.protocol import requests

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

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
    """One iterator over one turn.

    Args:
        exchange: The connection.
        session: The session, which hands in its events.
        stream: What makes one stream of them.
        infer: What asks for the turn; ``None`` when somebody else did.
    """

    def __init__(
        self, exchange: Exchange, session: ClientSession, *, stream: TurnStream, infer: requests.Infer | None
    ) -> None:
        self._exchange = exchange
        self._session = session
        self._stream = stream
        self._infer = infer
        self._inbox: asyncio.Queue[Event | InferenceCenterError] = asyncio.Queue()
        self._request_id: str | None = None
        self._backoff: Backoff | None = None
        self._abort = _Abort.UNWANTED

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._stream} waiting={self._inbox.qsize()} abort={self._abort.name}>"

    def put(self, item: Event | InferenceCenterError) -> None:
        """Take an event of the session, or why there will be no more."""
        self._inbox.put_nowait(item)

    def resumed(self) -> None:
        """Take note that what was sent on the socket before may not have arrived."""
        if self._abort is _Abort.SENT:
            self._abort = _Abort.WANTED

    async def events(self) -> AsyncGenerator[TurnStreamEvent, None]:
        """Yield the turn's events, the last being ``End``.

        Raises:
            InferenceCenterError: What the daemon refused, what ended the turn, or why its rest is lost.
        """
        stream = self._stream
        if self._infer is not None:
            self._exchange.attach(self._session)
        self._session.begin_reading(self)
        try:
            while not stream.over:
                # What has come already may change what is to be asked.
                if stream.due and self._inbox.empty():
                    await self._ask()
                    continue
                item = await self._inbox.get()
                if isinstance(item, InferenceCenterError):
                    raise item
                for event in stream.take(item):
                    yield event
                if self._abort is _Abort.WANTED and stream.state is StreamState.RUNNING:
                    await self.abort()
        finally:
            self._session.end_reading(self)
            self._ignore_answers()

    async def abort(self) -> None:
        """Have the turn end, now or as soon as the daemon can be told."""
        self._abort = _Abort.WANTED
        if not self._stream.due and self._exchange.line.connected:
            await self._send_abort()

    async def repeat_abort(self, running: str | None) -> None:
        """On a new socket, say again that the turn is to end if it still runs."""
        if self._abort is _Abort.WANTED and running is not None and running == self._stream.turn_id:
            await self._send_abort()

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
        await self._exchange.line.send(request)

    async def _send_abort(self) -> None:
        self._abort = _Abort.SENT
        abort = requests.Abort(op="abort", session_id=self._session.session_id, turn_id=self._stream.turn_id)
        await self._exchange.line.send(self._exchange.numbered(abort))

    def _ignore_answers(self) -> None:
        if self._request_id is not None:
            self._exchange.ignore_answers(self._request_id)
