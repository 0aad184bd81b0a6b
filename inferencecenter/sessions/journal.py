"""Sessions are written down before clients hear of it: the interface that the store implements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.sessions.records import Record

MAX_PENDING: Final = 20_000
"""Records and calls of one client that may wait before what would bring more is refused."""
MAX_RESUMING: Final = 1000
"""Resumes of one client that may wait for the store before another is refused."""
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

    @property
    def n_set_aside(self) -> int:
        """Records that could not be written because of a defect, and were left out."""

    def lacks(self, session_id: str) -> bool:
        """Tell whether a record of this session was left out."""

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
    n_set_aside: int = 0

    def lacks(self, session_id: str) -> bool:
        """Nothing is left out where nothing is written."""
        return False

    def of_client(self, client_id: str) -> Journal:
        """Return itself."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Forget the record."""

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at once."""
        tell()


def check_writable(journal: Journal) -> None:
    """Refuse what would have to be written down while nothing can be, or while its client has too much waiting.

    Raises:
        InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
    """
    if journal.fault is not None or journal.n_pending > MAX_PENDING:
        raise _refusal(journal)


class Resuming:
    """Counts the resumes that journals hold back, by client: each keeps what it is to tell, and its socket."""

    def __init__(self) -> None:
        self._n_held: Counter[str] = Counter()

    def check(self, journal: Journal, client_id: str) -> None:
        """Refuse a resume that would have to wait while too many of its client do.

        Raises:
            InferenceCenterError: ``storage_unavailable`` or ``overloaded``.
        """
        if journal.n_pending and self._n_held.get(client_id, 0) >= MAX_RESUMING:
            raise _refusal(journal)

    def begun(self, journal: Journal, client_id: str) -> None:
        """Take note of a resume, which waits until the journal releases it."""
        self._n_held[client_id] += 1
        journal.release(partial(self._told, client_id))

    def _told(self, client_id: str) -> None:
        self._n_held[client_id] -= 1
        if not self._n_held[client_id]:
            del self._n_held[client_id]


def _refusal(journal: Journal) -> InferenceCenterError:
    """Return why no more is taken that has to be written down, or told once something is."""
    if (fault := journal.fault) is not None:
        return InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            fault.message,
            hint="Try again when the operator has mended it; a session opened with store false works meanwhile.",
            retry_after_ms=fault.retry_after_ms,
        )
    return InferenceCenterError(
        ErrorCode.OVERLOADED,
        "the store is behind with what this client has asked for",
        hint="Ask again later, and for less at once.",
        retry_after_ms=RETRY_SOON_MS,
    )
