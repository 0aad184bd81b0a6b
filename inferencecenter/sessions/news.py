"""What all sockets of a client hear of its sessions: that one is called otherwise, or is no more."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.session import Session

Reader: TypeAlias = "Callable[[str, Event, tuple[EventSink | None, ...]], None]"
"""Called with a client, an event, and those of its sinks that know already."""


class News:
    """Tells whoever reads it, once what it says is safe. Of stateless sessions there are none: nobody lists them."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def subscribe(self, reader: Reader) -> None:
        """Tell ``reader`` from now on."""
        self._readers.append(reader)

    def described(self, session: Session, *, by: EventSink | None) -> None:
        """Tell what metadata a session has; ``by`` knows."""
        facts = session.facts
        self._tell(session, events.MetadataSet(session_id=facts.session_id, metadata=facts.metadata), by)

    def gone(self, session: Session, *, but: tuple[EventSink | None, ...]) -> None:
        """Tell that a session is no more; those of ``but`` know."""
        self._tell(session, events.SessionClosed(session_id=session.facts.session_id), *but)

    def _tell(self, session: Session, event: Event, *knowing: EventSink | None) -> None:
        if session.facts.stateless:
            return
        for reader in self._readers:
            session.journal.release(partial(reader, session.facts.client_id, event, knowing))
