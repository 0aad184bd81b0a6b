"""A session as its client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.events import (
    Appended,
    ContextShifted,
    End,
    Progress,
    Queued,
    SessionCreated,
    SessionRewound,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from inferencecenter.client.connection import Client
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import ChatMessage

E = TypeVar("E", bound="Event")

TurnStreamEvent: TypeAlias = Queued | Progress | ContextShifted | Token | End


class ClientSession:
    """An open session; ``Client.create_session`` makes one."""

    def __init__(self, client: Client, created: SessionCreated) -> None:
        self._client = client
        self.created = created

    @property
    def session_id(self) -> str:
        """The name the daemon gave it."""
        return self.created.session_id

    async def infer(self, prompt: str, *, params: dict[str, Any] | None = None) -> AsyncIterator[TurnStreamEvent]:
        """Say something and yield the turn's events, the last being ``End``.

        Leaving the iterator early does not end the turn: ``abort`` does.

        Raises:
            InferenceCenterError: What the daemon refused, what ended the turn, or ``daemon_unreachable``.
        """
        request = self._client.numbered(
            requests.Infer(op="infer", session_id=self.session_id, prompt=prompt, params=params)
        )
        with self._client.mailbox(str(request.id), self.session_id) as mailbox:
            await self._client.send(request)
            while True:
                event = await self._client.receive(mailbox)
                if isinstance(event, TurnStreamEvent):
                    yield event
                if isinstance(event, End):
                    return

    async def abort(self) -> None:
        """Ask for the end of the running turn; its iterator yields ``End``. With nothing running, nothing happens.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        abort = requests.Abort(op="abort", session_id=self.session_id)
        await self._client.send(self._client.numbered(abort))

    async def append(self, messages: Sequence[ChatMessage]) -> Appended:
        """Add messages without having them answered.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.Append(op="append", session_id=self.session_id, messages=list(messages))
        return expect(await self._client.request(request), Appended)

    async def fork(self, turn: str | None = None) -> ClientSession:
        """Open another session that begins as this one does.

        Args:
            turn: Id of the last turn to take over, or ``requests.START``; without it everything is taken over.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.ForkSession(op="fork_session", session_id=self.session_id, turn=turn)
        return ClientSession(self._client, expect(await self._client.request(request), SessionCreated))

    async def rewind(self, turn: str) -> SessionRewound:
        """Forget all that came after a turn, or after ``requests.START``.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        request = requests.RewindSession(op="rewind_session", session_id=self.session_id, turn=turn)
        return expect(await self._client.request(request), SessionRewound)

    async def close(self) -> None:
        """End the session.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        await self._client.request(requests.CloseSession(op="close_session", session_id=self.session_id))


def expect(event: Event, kind: type[E]) -> E:
    """Return the event, which is of this kind.

    Raises:
        InferenceCenterError: ``internal`` when it is not.
    """
    if isinstance(event, kind):
        return event
    raise InferenceCenterError(ErrorCode.INTERNAL, f"the daemon answered with an unexpected op, {event.op}")
