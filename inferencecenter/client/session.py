"""A session as its client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Unpack

from inferencecenter.client.errors import NotFoundError, SessionTakenOverError, UnreachableError, failure, made
from inferencecenter.client.multiplexer import expect
from inferencecenter.client.options import infer_request, waits
from inferencecenter.client.retry import LOAD_TIMEOUT_S
from inferencecenter.client.stream import TurnStream
from inferencecenter.client.transport import UnknownEvent
from inferencecenter.client.turn import ClientTurn, TurnReader
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.events import (
    Appended,
    Error,
    MetadataSet,
    Reasoning,
    Session,
    SessionClosed,
    SessionCreated,
    SessionDetached,
    SessionExpired,
    SessionResumed,
    SessionRewound,
    Token,
    ToolCall,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from inferencecenter.client.answer import Answer
    from inferencecenter.client.multiplexer import RequestMultiplexer
    from inferencecenter.client.options import InferOptions, Messages
    from inferencecenter.protocol.base import Event


class SequenceStatus(Enum):
    """What the number of an event says about it."""

    NEXT = auto()
    REPEATED = auto()
    AFTER_A_GAP = auto()


class SequenceTracker:
    """The last event that arrived.

    Attributes:
        epoch: Incarnation of the history; ``None`` when it is not known.
        seq: Number of the last event, 0 before the first.
    """

    def __init__(self, epoch: str | None, seq: int = 0) -> None:
        self.epoch = epoch
        self.seq = seq
        self._resumed_after: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.epoch}, {self.seq})"

    def admit(self, event: SessionEvent | Error) -> SequenceStatus:
        """Count an event, unless it was here before or events before it are missing.

        A text may stand for several, of which it has the last number, so nothing is missing before one. Nor is there
        a gap to fill where the history was resumed already: what is not sent again was not for this client.
        """
        assert event.seq is not None, "only numbered events have a position"
        if event.seq <= self.seq:
            return SequenceStatus.REPEATED
        is_text = isinstance(event, Token | Reasoning | ToolCall)
        adjoins = is_text or event.seq == self.seq + 1 or self.seq == self._resumed_after
        if not adjoins:
            return SequenceStatus.AFTER_A_GAP
        self.seq = event.seq
        return SequenceStatus.NEXT

    def note(self, seq: int) -> None:
        """Count an event that is taken whatever its number, as the answer to a request."""
        self.seq = max(self.seq, seq)

    def resume(self, resumed: SessionResumed) -> None:
        """Go on where the daemon goes on: at the same place, or after all that is lost."""
        if not resumed.resumed:
            self.seq = resumed.seq
        self.epoch = resumed.epoch
        self._resumed_after = self.seq

    def forget(self) -> None:
        """Stop counting: the events go elsewhere; whatever comes next is new."""
        self.epoch = None
        self.seq = 0
        self._resumed_after = 0


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

    def __init__(self, exchange: RequestMultiplexer, session_id: str, *, epoch: str | None) -> None:
        self._exchange = exchange
        self.session_id = session_id
        self.created: SessionCreated | None = None
        self._position = SequenceTracker(epoch)
        self._missing = False
        self._readers: list[TurnReader] = []
        self._taking_up = False
        self._following: TurnReader | None = None
        self._winding_up: set[asyncio.Task[None]] = set()

    @classmethod
    def opened(cls, exchange: RequestMultiplexer, created: SessionCreated) -> ClientSession:
        """Return the session that the daemon has just opened for this connection."""
        session = cls(exchange, created.session_id, epoch=created.epoch)
        session.created = created
        exchange.attach(session)
        return session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} {self._position} readers={len(self._readers)}>"

    def infer(
        self, prompt: str | None = None, *, messages: Messages | None = None, **asked: Unpack[InferOptions]
    ) -> ClientTurn:
        """Say something and return the turn that answers it; iterate over it for the text.

        It goes on unbroken when the connection is lost and comes back: nothing is missing, nothing comes twice, though
        text may come in larger pieces. It belongs to the current span of OpenTelemetry, if there is one.

        Args:
            prompt: What the user says.
            messages: What is said, in place of a prompt; as what tools returned, see ``result``.
            asked: What else is asked; see ``Asked``.

        Raises:
            RequestError: What is asked makes no sense.
        """
        infer = infer_request(self.session_id, prompt, messages=messages, asked=asked)

        def begin() -> TurnReader:
            keyed = infer.model_copy(update={"turn_key": uuid.uuid4().hex})
            return TurnReader(self._exchange, self, stream=TurnStream(self.session_id), infer=keyed)

        return ClientTurn(self, begin, self._exchange.patience(**waits(asked)))

    async def ask(
        self, prompt: str | None = None, *, messages: Messages | None = None, **asked: Unpack[InferOptions]
    ) -> Answer:
        """Say something and return the whole answer.

        Args:
            prompt: What the user says.
            messages: What is said, in place of a prompt.
            asked: What else is asked; see ``Asked``.

        Raises:
            InferenceCenterError: What the daemon refused, what ended the turn, or why its rest is lost.
        """
        return await self.infer(prompt, messages=messages, **asked).rest()

    def follow(self) -> ClientTurn:
        """Return the turn that was running when the session was resumed, from its beginning to its end.

        What it had said by then comes as one piece, as does what it thought and what it asked of each tool. Leaving it
        does not end it. Without such a turn nothing comes.
        """
        reader, self._following = self._following, None
        return ClientTurn(self, lambda: reader, None)

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

    async def read(self) -> Session:
        """Return all that the daemon knows of the session: transcript, turns, parameters, tokens.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.GetSession(op="get_session", session_id=self.session_id)
        return expect(await self._exchange.request(request), Session)

    async def append(self, messages: Messages) -> Appended:
        """Add messages without having them answered.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = made(requests.Append, session_id=self.session_id, messages=list(messages))
        await self.settled()
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
        request = made(requests.ForkSession, session_id=self.session_id, turn=turn)
        await self.settled()
        patience = self._exchange.patience(load_timeout_s=load_timeout_s)
        created = await patience.run(lambda: self._exchange.request(request))
        return ClientSession.opened(self._exchange, expect(created, SessionCreated))

    async def rewind(self, turn: str) -> SessionRewound:
        """Forget all that came after a turn, or after ``requests.START``.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = made(requests.RewindSession, session_id=self.session_id, turn=turn)
        await self.settled()
        return expect(await self._exchange.request(request), SessionRewound)

    async def set_metadata(self, metadata: Mapping[str, str]) -> MetadataSet:
        """Give the session other metadata, as a title; a turn that runs goes on.

        Args:
            metadata: Up to 16 strings of the caller's own, in place of those that it had.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = made(requests.SetMetadata, session_id=self.session_id, metadata=dict(metadata))
        return expect(await self._exchange.request(request), MetadataSet)

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
        self._gone("the session was closed")

    async def leave(self, *, failed: bool) -> None:
        """End the session when its block is left; one that is gone already has ended.

        Args:
            failed: Something else is wrong, which waits: where the connection is lost, the session is left as it is.

        Raises:
            InferenceCenterError: What the daemon refused, if nothing else has failed.
        """
        if not failed:
            with contextlib.suppress(NotFoundError, UnreachableError):
                await self.close()
        elif self._exchange.line.connected:
            with contextlib.suppress(InferenceCenterError):
                await self.close()

    # What its turns call.

    def drain(self, turn: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Bring a turn to its end that nobody reads any more; ``None`` where the connection is over."""
        if self._exchange.line.ended is not None:
            turn.close()
            return None
        task = self._exchange.drain(turn)
        self._winding_up.add(task)
        task.add_done_callback(self._winding_up.discard)
        return task

    async def settled(self) -> None:
        """Wait until the turns that were left have ended: a session answers one at a time."""
        if self._winding_up:
            await asyncio.wait(self._winding_up)

    # What the client calls.

    def attach(self) -> None:
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

    def take(self, event: Event | UnknownEvent, *, direct: bool) -> None:
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
            case UnknownEvent():
                if not self._missing:
                    self._position.note(event.seq)
            case SessionEvent() | Error(seq=int()):
                if self._counts(event, direct=direct):
                    self._hand_out(event)
            case _:
                self._hand_out(event)
        if isinstance(event, SessionExpired):
            self._gone("the session was idle for too long")
        elif isinstance(event, SessionClosed) and not direct:
            self._gone("the session was closed elsewhere")

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

    def _gone(self, why: str) -> None:
        self._exchange.detach(self)
        self.fail(failure(ErrorCode.SESSION_NOT_FOUND, why))

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
        if arrival is SequenceStatus.AFTER_A_GAP:
            self._missing = True
            self._exchange.fill_gap(self)
        return arrival is SequenceStatus.NEXT

    def _hand_out(self, item: Event | InferenceCenterError) -> None:
        for reader in self._readers:
            reader.put(item)
