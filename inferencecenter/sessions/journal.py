"""Sessions are written down before clients hear of it: the interface that the store implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.sessions.records import Record

RETRY_SOON_MS: Final = 1000
"""When to try again where a fault may pass by itself."""
RETRY_LATER_MS: Final = 60_000
"""When to try again where an operator has to act first."""


@dataclass(frozen=True, slots=True)
class StorageFault:
    """Why sessions cannot be written at the moment.

    ``message`` is told to clients: it has no path and quotes no library. ``retry_after_ms`` is the earliest useful
    retry.
    """

    message: str
    retry_after_ms: int = RETRY_SOON_MS


class Journal(Protocol):
    """Takes records, and holds back what clients are told until they are safe. On the event loop; never blocks."""

    @property
    def fault(self) -> StorageFault | None:
        """Why nothing can be written at the moment; ``None`` when all is well."""

    @property
    def n_pending(self) -> int:
        """How many records and calls wait."""

    def of_client(self, client_id: str) -> Journal:
        """Return the journal of one client, whose records and calls keep their order and wait for no other client's."""

    def write(self, record: Record, *, flush: bool) -> None:
        """Have a record written, after all earlier ones.

        With ``flush`` it survives a power cut once what is released after it goes out, without it the end of the
        process.
        """

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` on the event loop once everything written so far is safe, in the order of these calls.

        At once when there is nothing to wait for. While the store cannot write, what is held back waits for it.
        """


class Unwritten:
    """The journal of a daemon that keeps no sessions: nothing is written and nothing waits."""

    fault: StorageFault | None = None
    n_pending: int = 0

    def of_client(self, client_id: str) -> Journal:
        """Return itself."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Forget the record."""

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at once."""
        tell()
