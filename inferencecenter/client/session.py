"""A session as its client sees it."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from inferencecenter.client.exchange import expect
from inferencecenter.client.failures import SessionTakenOverError
from inferencecenter.client.link import Unknown
from inferencecenter.client.loading import LOAD_TIMEOUT_S
from inferencecenter.client.position import Arrival, Position
from inferencecenter.client.reader import TurnReader
from inferencecenter.client.stream import TurnStream
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.events import (
    Appended,
    Error,
    SessionCreated,
    SessionDetached,
    SessionExpired,
    SessionResumed,
    SessionRewound,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from inferencecenter.client.exchange import Exchange
    from inferencecenter.client.stream import TurnStreamEvent
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import ChatMessage, Tool, ToolChoice


class Asked(TypedDict, total=False):
    """What a turn may ask of its answer; see ``requests.Infer``."""

    tools: list[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    json_schema: dict[str, Any] | bool
    regex: str
    grammar: str
    thinking: bool


class ClientSession:
    """An open session; ``Client.create_session`` and ``Client.resume`` make one.

    Args:
        exchange: The connection.
        session_id: Its name.
        epoch: Incarnation of its history of events; ``None`` until it is resumed.

    Attributes:
        session_id: The name the daemon gave it.
        created: What the daemon said when this connection opened it; ``None`` for one that was taken up.
    """

    def __init__(self, exchange: Exchange, session_id: str, *, epoch: str | None) -> None:
        self._exchange = exchange
        self.session_id = session_id
        self.created: SessionCreated | None = None
        self._position = Position(epoch)
        self._missing = False
        self._readers: list[TurnReader] = []
        self._taking_up = False
        self._following: TurnReader | None = None

    @classmethod
    def opened(cls, exchange: Exchange, created: SessionCreated) -> ClientSession:
        """Return the session that the daemon has just opened for this connection."""
        session = cls(exchange, created.session_id, epoch=created.epoch)
        session.created = created
        exchange.attach(session)
        return session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} {self._position} readers={len(self._readers)}>"

    def infer(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        params: dict[str, Any] | None = None,
        **asked: Unpack[Asked],
    ) -> AsyncIterator[TurnStreamEvent]:
        """Say something and yield the turn's events, the last being ``End``; ``collect`` puts an answer together.

        The stream goes on unbroken when the connection is lost and comes back: nothing is missing, nothing comes
        twice, though text may come in larger pieces. Leaving the iterator early does not end the turn: ``abort`` does.

        Args:
            prompt: What the user says.
            messages: What is said, in place of a prompt; as what tools returned, see ``result``.
            params: Parameters of this turn.
            asked: What the answer has to be.

        Raises:
            InferenceCenterError: What the daemon refused, what ended the turn, or why its rest is lost.
            pydantic.ValidationError: What is asked makes no sense.
        """
        infer = requests.Infer(
            op="infer",
            session_id=self.session_id,
            prompt=prompt,
            messages=None if messages is None else list(messages),
            params=params,
            turn_key=uuid.uuid4().hex,
            **asked,
        )
        return TurnReader(self._exchange, self, stream=TurnStream(self.session_id), infer=infer).events()

    async def follow(self) -> AsyncIterator[TurnStreamEvent]:
        """Yield the events of the turn that was running when the session was resumed, from its beginning to its end.

        What it had said by then comes as one ``Token``, as does what it thought and what it asked of each tool. Without
        such a turn nothing is yielded.

        Raises:
            InferenceCenterError: What ended the turn, or why its rest is lost.
        """
        reader, self._following = self._following, None
        if reader is not None:
            async with contextlib.aclosing(reader.events()) as events:
                async for event in events:
                    yield event

    async def abort(self) -> None:
        """Ask for the end of the running turn; its iterator yields ``End``. With nothing running, nothing happens.

        While the connection is lost this is remembered.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        if self._readers:
            for reader in list(self._readers):
                await reader.abort()
            return
        await self._exchange.line.until_connected()
        await self._exchange.line.send(self._exchange.numbered(requests.Abort(op="abort", session_id=self.session_id)))

    async def append(self, messages: Sequence[ChatMessage]) -> Appended:
        """Add messages without having them answered.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.Append(op="append", session_id=self.session_id, messages=list(messages))
        return expect(await self._exchange.request(request), Appended)

    async def fork(self, turn: str | None = None, *, load_timeout_s: float = LOAD_TIMEOUT_S) -> ClientSession:
        """Open another session that begins as this one does; if its model has to be loaded first, wait for that.

        Args:
            turn: Id of the last turn to take over, or ``requests.START``; without it everything is taken over.
            load_timeout_s: Seconds that the model may take to be loaded.

        Raises:
            InferenceCenterError: What the daemon refused, ``model_loading`` when that took too long, or
                ``daemon_unreachable``.
        """
        request = requests.ForkSession(op="fork_session", session_id=self.session_id, turn=turn)
        created = await self._exchange.request_when_loaded(request, timeout_s=load_timeout_s)
        return ClientSession.opened(self._exchange, expect(created, SessionCreated))

    async def rewind(self, turn: str) -> SessionRewound:
        """Forget all that came after a turn, or after ``requests.START``.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.RewindSession(op="rewind_session", session_id=self.session_id, turn=turn)
        return expect(await self._exchange.request(request), SessionRewound)

    async def close(self) -> None:
        """End the session.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        await self._exchange.line.until_connected()
        n_sockets = self._exchange.line.n_sockets
        try:
            await self._exchange.request(requests.CloseSession(op="close_session", session_id=self.session_id))
        except InferenceCenterError as error:
            # Asked again after a cut, it may be gone because it was closed the first time.
            if error.code is not ErrorCode.SESSION_NOT_FOUND or self._exchange.line.n_sockets == n_sockets:
                raise
        self._exchange.detach(self)

    # What the client calls.

    def take_up(self) -> None:
        """Follow the turn that is running when the session is resumed next."""
        self._taking_up = True

    def resumption(self) -> requests.ResumeSession:
        """Return the request for all that comes after what has arrived."""
        epoch, seq = self._position.epoch, self._position.seq
        return requests.ResumeSession(
            op="resume_session", session_id=self.session_id, epoch=epoch, last_seq=seq if epoch is not None else 0
        )

    def cut(self) -> None:
        """Take note that the socket is lost: only what comes after ``session_resumed`` counts."""
        self._missing = True

    def take(self, event: Event | Unknown, *, direct: bool) -> None:
        """Take an event of this session.

        Args:
            event: What came.
            direct: It answers a request of this client, and counts whatever its number.
        """
        match event:
            case SessionResumed():
                self._resumed(event)
            case SessionDetached():
                self._position.forget()
                self._exchange.detach(self)
                self.fail(SessionTakenOverError(self.session_id))
            case Unknown():
                if not self._missing:
                    self._position.note(event.seq)
            case SessionEvent() | Error(seq=int()):
                if self._counts(event, direct=direct):
                    self._hand_out(event)
            case _:
                self._hand_out(event)
        if isinstance(event, SessionExpired):
            self._exchange.detach(self)
            self.fail(InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "the session was idle for too long"))

    def fail(self, error: InferenceCenterError) -> None:
        """Raise the error wherever a turn of this session is read."""
        self._hand_out(error)

    async def repeat_abort(self, running: str | None) -> None:
        """Say again that a turn is to end, if it is still the one that runs."""
        for reader in list(self._readers):
            await reader.repeat_abort(running)

    def begin_reading(self, reader: TurnReader) -> None:
        """Hand out events to an iterator."""
        if reader not in self._readers:
            self._readers.append(reader)

    def end_reading(self, reader: TurnReader) -> None:
        """Hand out no more events to an iterator."""
        if reader in self._readers:
            self._readers.remove(reader)

    def _resumed(self, resumed: SessionResumed) -> None:
        self._position.resume(resumed)
        self._missing = False
        for reader in self._readers:
            reader.resumed()
        if self._taking_up:
            self._taking_up = False
            self._follow(resumed.turn_id)
        self._hand_out(resumed)

    def _follow(self, turn_id: str | None) -> None:
        """Keep the events of a turn for ``follow``, in place of those of the turn before."""
        if self._following is not None:
            self.end_reading(self._following)
            self._following = None
        if turn_id is not None:
            stream = TurnStream.following(self.session_id, turn_id)
            self._following = TurnReader(self._exchange, self, stream=stream, infer=None)
            self.begin_reading(self._following)

    def _counts(self, event: SessionEvent | Error, *, direct: bool) -> bool:
        """Return whether the event is new; if others are missing before it, have them sent."""
        if direct:
            if not self._missing and event.seq is not None:
                self._position.note(event.seq)
            return True
        if self._missing:
            return False
        arrival = self._position.admit(event)
        if arrival is Arrival.AFTER_A_GAP:
            self._missing = True
            self._exchange.fill_gap(self)
        return arrival is Arrival.NEXT

    def _hand_out(self, item: Event | InferenceCenterError) -> None:
        for reader in self._readers:
            reader.put(item)
