"""Sessions are written down before clients hear of it: the interface that the store implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.sessions.records import Record


class Journal(Protocol):
    """Takes records, and holds back what clients are told until they are safe. On the event loop; never blocks."""

    @property
    def fault(self) -> str | None:
        """Why nothing can be written at the moment, in words; ``None`` when all is well."""

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

    fault: str | None = None

    def write(self, record: Record, *, flush: bool) -> None:
        """Forget the record."""

    def release(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` at once."""
        tell()
