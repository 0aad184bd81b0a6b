"""A session as its client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from inferencecenter.protocol import requests
from inferencecenter.protocol.events import End, Progress, Queued, SessionCreated, Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from inferencecenter.client.connection import Client

TurnStreamEvent: TypeAlias = Queued | Progress | Token | End


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

    async def close(self) -> None:
        """End the session.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        await self._client.request(requests.CloseSession(op="close_session", session_id=self.session_id))
