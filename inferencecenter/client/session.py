"""Client side of a session."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Unpack

from inferencecenter.client.answer import TurnStream
from inferencecenter.client.connection import expect
from inferencecenter.client.errors import NotFoundError, SessionTakenOverError, UnreachableError, failure, new_request
from inferencecenter.client.options import infer_request, retry_options
from inferencecenter.client.retry import LOAD_TIMEOUT_S
from inferencecenter.client.turn import ClientTurn, TurnReader
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.events import (
    Appended,
    Error,
    McpCall,
    MetadataSet,
    ModelSet,
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
    from inferencecenter.client.connection import DaemonConnection
    from inferencecenter.client.options import InferOptions, Messages
    from inferencecenter.protocol.base import Event


class SequenceStatus(Enum):
    """What an event's sequence number means for its receiver."""

    NEXT = auto()
    REPEATED = auto()
    AFTER_A_GAP = auto()


class SequenceTracker:
    """Sequence number of the last received event.

    Attributes:
        epoch: Incarnation of the event history; ``None`` if unknown.
        seq: Sequence number of the last event, 0 before the first.
    """

    def __init__(self, epoch: str | None, seq: int = 0) -> None:
        self.epoch = epoch
        self.seq = seq
        self._resumed_after: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.epoch}, {self.seq})"

    def admit(self, event: SessionEvent | Error) -> SequenceStatus:
        """Record an event, unless it is a duplicate or events before it are missing.

        A text event, and perhaps one of a later protocol version, may have been coalesced from several and carries the
        last one's number, so it never indicates a gap. Nor does a gap directly after a resume: events that are not
        replayed were not meant for this client.
        """
        assert event.seq is not None, "only numbered events have a position"
        if event.seq <= self.seq:
            return SequenceStatus.REPEATED
        may_be_coalesced = isinstance(event, Token | Reasoning | ToolCall) or type(event) is SessionEvent
        adjoins = may_be_coalesced or event.seq == self.seq + 1 or self.seq == self._resumed_after
        if not adjoins:
            return SequenceStatus.AFTER_A_GAP
        self.seq = event.seq
        return SequenceStatus.NEXT

    def record(self, seq: int) -> None:
        """Record the number of an event that is accepted in any case, such as a direct reply."""
        self.seq = max(self.seq, seq)

    def resume(self, resumed: SessionResumed) -> None:
        """Continue at the daemon's position, which is later than this one if events were lost."""
        if not resumed.resumed:
            self.seq = resumed.seq
        self.epoch = resumed.epoch
        self._resumed_after = self.seq

    def reset(self) -> None:
        """Forget the position, because another connection receives the events; any next event is accepted."""
        self.epoch = None
        self.seq = 0
        self._resumed_after = 0


class ClientSession:
    """An open session, made by ``Client.create_session`` or ``Client.resume``.

    Args:
        connection: The connection.
        session_id: Id of the session.
        epoch: Incarnation of its event history; ``None`` until it is resumed.

    Attributes:
        session_id: Id of the session, assigned by the daemon.
        created: The daemon's reply to the creation of the session; ``None`` for a resumed one.
    """

    def __init__(self, connection: DaemonConnection, session_id: str, *, epoch: str | None) -> None:
        self._connection = connection
        self.session_id = session_id
        self.created: SessionCreated | None = None
        self._position = SequenceTracker(epoch)
        self._missing = False
        self._readers: list[TurnReader] = []
        self._follows_next = False
        self._following: TurnReader | None = None
        self._drains: set[asyncio.Task[None]] = set()

    @classmethod
    def opened(cls, connection: DaemonConnection, created: SessionCreated) -> ClientSession:
        """Return the session that the daemon has just created for this connection."""
        session = cls(connection, created.session_id, epoch=created.epoch)
        session.created = created
        connection.attach(session)
        return session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} {self._position} readers={len(self._readers)}>"

    def infer(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Unpack[InferOptions]
    ) -> ClientTurn:
        """Send a prompt or messages and return the turn that answers; iterate over it for the text.

        The turn survives a lost connection: after the reconnect nothing is missing or repeated, though text may arrive
        in larger pieces. It belongs to the current OpenTelemetry span, if there is one.

        Args:
            prompt: The user's message.
            messages: Messages instead of a prompt; for tool results see ``result``.
            options: Further options; see ``InferOptions``.

        Raises:
            RequestError: An option is unknown or invalid.
        """
        infer = infer_request(self.session_id, prompt, messages=messages, options=options)

        def begin() -> TurnReader:
            keyed = infer.model_copy(update={"turn_key": uuid.uuid4().hex})
            return TurnReader(self._connection, self, stream=TurnStream(self.session_id), infer=keyed)

        return ClientTurn(self, begin, self._connection.retry_policy(**retry_options(options)))

    async def ask(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Unpack[InferOptions]
    ) -> Answer:
        """Send a prompt or messages and return the whole answer.

        Args:
            prompt: The user's message.
            messages: Messages instead of a prompt.
            options: Further options; see ``InferOptions``.

        Raises:
            InferenceCenterError: The daemon's refusal, the failure of the turn, or why its remainder is lost.
        """
        return await self.infer(prompt, messages=messages, **options).result()

    def follow(self) -> ClientTurn:
        """Return the turn that was running when the session was resumed, from its start to its end.

        Text, reasoning and tool calls generated before the resume arrive as one piece each. Leaving this turn early
        does not abort it. Without a running turn it yields nothing.
        """
        reader, self._following = self._following, None
        return ClientTurn(self, lambda: reader, None)

    async def abort(self) -> None:
        """Abort the running turn; its iterator yields ``End``. Without a running turn, do nothing.

        While the connection is lost, the abort is remembered and sent after the reconnect.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        if self._readers:
            for reader in list(self._readers):
                await reader.abort()
            return
        await self._connection.wait_connected()
        await self._connection.send(
            self._connection.with_new_id(requests.Abort(op="abort", session_id=self.session_id))
        )

    async def read(self) -> Session:
        """Return the daemon's full record of the session: transcript, turns, parameters, tokens.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = requests.GetSession(op="get_session", session_id=self.session_id)
        return expect(await self._connection.request(request), Session)

    async def call_mcp_tool(self, call_id: str, server: str, *, tool: str | None = None) -> McpCall:
        """Run a tool call of the latest answer on an MCP server, and return its outcome.

        This approves the call. Once all calls of the answer have results, ``infer`` without a message continues.

        Args:
            call_id: Id of the call in the answer.
            server: The server, as ``Client.mcp_servers`` lists it.
            tool: Name of the tool there; by default the name in the call.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``: ``read`` then returns the outcome.
        """
        request = new_request(
            requests.CallMcpTool, session_id=self.session_id, call_id=call_id, server=server, tool=tool
        )
        await self.wait_settled()
        answer = await self._connection.request(
            request, is_interim=lambda event: isinstance(event, McpCall) and event.call_state == "running"
        )
        return expect(answer, McpCall)

    async def append(self, messages: Messages) -> Appended:
        """Append messages without starting a turn.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = new_request(requests.Append, session_id=self.session_id, messages=list(messages))
        await self.wait_settled()
        return expect(await self._connection.request(request), Appended)

    async def fork(self, turn: str | None = None, *, load_timeout_s: float = LOAD_TIMEOUT_S) -> ClientSession:
        """Open a session that starts with this one's history, waiting for its model to load if necessary.

        Args:
            turn: Id of the last turn to copy, or ``requests.START``; without it everything is copied.
            load_timeout_s: Seconds to wait for the model to load.

        Raises:
            InferenceCenterError: The daemon's refusal, ``model_loading`` when loading exceeds its timeout, or
                ``daemon_unreachable``.
        """
        request = new_request(requests.ForkSession, session_id=self.session_id, turn=turn)
        await self.wait_settled()
        retry = self._connection.retry_policy(load_timeout_s=load_timeout_s)
        created = await retry.run(lambda: self._connection.request(request))
        return ClientSession.opened(self._connection, expect(created, SessionCreated))

    async def rewind(self, turn: str) -> SessionRewound:
        """Discard everything after a turn, or after ``requests.START``.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = new_request(requests.RewindSession, session_id=self.session_id, turn=turn)
        await self.wait_settled()
        return expect(await self._connection.request(request), SessionRewound)

    async def set_metadata(self, metadata: Mapping[str, str]) -> MetadataSet:
        """Replace the session's metadata, such as a title; does not affect a running turn.

        Args:
            metadata: Up to 16 strings for the caller's own use.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = new_request(requests.SetMetadata, session_id=self.session_id, metadata=dict(metadata))
        return expect(await self._connection.request(request), MetadataSet)

    async def set_model(self, model: str | None) -> ModelSet:
        """Answer with another model from the next turn on; ``None`` follows the default model.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        request = new_request(requests.SetModel, session_id=self.session_id, model=model)
        await self.wait_settled()
        return expect(await self._connection.request(request), ModelSet)

    async def close(self) -> None:
        """Close the session.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        await self._connection.wait_connected()
        n_sockets = self._connection.n_sockets
        try:
            await self._connection.request(requests.CloseSession(op="close_session", session_id=self.session_id))
        except InferenceCenterError as error:
            # A close repeated after a reconnect may find the session closed by the first attempt.
            if error.code is not ErrorCode.SESSION_NOT_FOUND or self._connection.n_sockets == n_sockets:
                raise
        self._end("the session was closed")

    async def leave(self, *, failed: bool) -> None:
        """Close the session at the end of its block; ignored if it no longer exists.

        Args:
            failed: Whether the block raised an error, which takes precedence over one of the connection.

        Raises:
            InferenceCenterError: The daemon's refusal, if the block did not fail.
        """
        if not failed:
            with contextlib.suppress(NotFoundError, UnreachableError):
                await self.close()
        elif self._connection.connected:
            with contextlib.suppress(InferenceCenterError):
                await self.close()

    # Interface for turns.

    def drain(self, turn: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Read an abandoned turn to its end in the background; ``None`` if the connection has ended."""
        if self._connection.ended is not None:
            turn.close()
            return None
        task = self._connection.drain(turn)
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return task

    async def wait_settled(self) -> None:
        """Wait until abandoned turns have ended: a session runs one turn at a time."""
        if self._drains:
            await asyncio.wait(self._drains)

    # Interface for the client.

    def attach(self) -> None:
        """Prepare ``follow`` for the turn that the next resume reports as running."""
        self._follows_next = True

    def resumption(self) -> requests.ResumeSession:
        """Return the request that resumes the session after the last received event."""
        epoch, seq = self._position.epoch, self._position.seq
        return requests.ResumeSession(
            op="resume_session", session_id=self.session_id, epoch=epoch, last_seq=seq if epoch is not None else 0
        )

    def on_disconnect(self) -> None:
        """Handle the loss of the socket: ignore events until ``session_resumed``."""
        self._missing = True

    def apply(self, event: Event, *, direct: bool) -> None:
        """Apply an event of this session.

        Args:
            event: The event.
            direct: Whether it replies to a request of this client; it is then accepted with any number.
        """
        match event:
            case SessionResumed():
                self._resumed(event)
            case SessionDetached():
                self._position.reset()
                self._connection.detach(self)
                self.fail(SessionTakenOverError(self.session_id))
            case SessionEvent() | Error(seq=int()):
                if self._is_new(event, direct=direct):
                    self._deliver(event)
            case _:
                self._deliver(event)
        if isinstance(event, SessionExpired):
            self._end("the session was idle for too long")
        elif isinstance(event, SessionClosed) and not direct:
            self._end("the session was closed elsewhere")

    def fail(self, error: InferenceCenterError) -> None:
        """Fail every reader of a turn of this session with the error."""
        self._deliver(error)

    async def resend_abort(self, running: str | None) -> None:
        """Send a pending abort again if its turn is still the running one."""
        for reader in list(self._readers):
            await reader.resend_abort(running)

    def begin_reading(self, reader: TurnReader) -> None:
        """Route events to a turn reader."""
        if reader not in self._readers:
            self._readers.append(reader)

    def end_reading(self, reader: TurnReader) -> None:
        """Stop routing events to a turn reader."""
        if reader in self._readers:
            self._readers.remove(reader)

    def _end(self, why: str) -> None:
        self._connection.detach(self)
        self.fail(failure(ErrorCode.SESSION_NOT_FOUND, why))

    def _resumed(self, resumed: SessionResumed) -> None:
        self._position.resume(resumed)
        self._missing = False
        for reader in self._readers:
            reader.resumed()
        if self._follows_next:
            self._follows_next = False
            self._follow(resumed.turn_id)
        self._deliver(resumed)

    def _follow(self, turn_id: str | None) -> None:
        """Buffer the events of a turn for ``follow``, in place of those of the previous turn."""
        if self._following is not None:
            self.end_reading(self._following)
            self._following = None
        if turn_id is not None:
            stream = TurnStream.following(self.session_id, turn_id)
            self._following = TurnReader(self._connection, self, stream=stream, infer=None)
            self.begin_reading(self._following)

    def _is_new(self, event: SessionEvent | Error, *, direct: bool) -> bool:
        """Return whether the event is new; request the replay of missing events before it."""
        if direct:
            if not self._missing and event.seq is not None:
                self._position.record(event.seq)
            return True
        if self._missing:
            return False
        arrival = self._position.admit(event)
        if arrival is SequenceStatus.AFTER_A_GAP:
            self._missing = True
            self._connection.fill_gap(self)
        return arrival is SequenceStatus.NEXT

    def _deliver(self, item: Event | InferenceCenterError) -> None:
        for reader in self._readers:
            reader.put(item)
