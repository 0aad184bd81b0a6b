"""One response on a socket: hears its turn, as long as the socket is there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.dialects.responses.telling import Telling
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.client import Client
    from inferencecenter.sessions.registry import Sessions

_ENDS: Final = (events.End, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class Voice:
    """Hears one turn; implements ``sessions.client.EventSink``.

    Args:
        session_id: The session.
        store: Whether the response may be asked for later, and so goes on without its socket.
        telling: What makes frames of events.
        told: Called with each event.
        ended: Called when there will be no more.
    """

    def __init__(
        self,
        session_id: str,
        *,
        store: bool,
        telling: Telling,
        told: Callable[[Telling, Event], None],
        ended: Callable[[Voice], None],
    ) -> None:
        self.telling = telling
        self._session_id = session_id
        self._store = store
        self._told = told
        self._ended = ended
        self._over = False

    def send(self, event: Event) -> None:
        """Take an event; what comes after the turn's end belongs to others."""
        if self._over:
            return
        self._told(self.telling, event)
        is_end = isinstance(event, _ENDS) or (isinstance(event, events.Error) and event.turn_id is not None)
        if is_end:
            self._over = True
            self._ended(self)

    def cancel(self, sessions: Sessions, client: Client) -> None:
        """Have the turn end.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` when it has just ended.
        """
        sessions.abort(client, Abort(op="abort", session_id=self._session_id))

    def leave(self, sessions: Sessions, client: Client) -> None:
        """Hear no more; a turn that nobody can ask for later ends, and leaves nothing behind."""
        over, self._over = self._over, True
        if not over and not self._store:
            with suppress(InferenceCenterError):  # it has ended, and its end is on its way
                sessions.abort(client, Abort(op="abort", session_id=self._session_id, discard=True))
        sessions.detach(self)
