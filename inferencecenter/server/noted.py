"""What logins leave to be written later: in memory, added up, bounded. Pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.server.audit import Entry

MAX_NOTED: Final = 10_000
"""Different entries that may wait; of what comes beyond, only the kind and the number are kept."""


class Tally(NamedTuple):
    """How often the same happened, and when first and last (Unix seconds)."""

    first_at: float
    last_at: float
    times: int = 1

    def plus(self, other: Tally) -> Tally:
        """Return both together."""
        return Tally(
            min(self.first_at, other.first_at), max(self.last_at, other.last_at), times=self.times + other.times
        )


@dataclass(frozen=True, slots=True)
class Taken:
    """All that was noted up to now; ``last_uses`` has Unix seconds by token id."""

    tallies: Mapping[Entry, Tally] = field(default_factory=dict)
    last_uses: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tallies or self.last_uses)


class Noted:
    """Notes of logins; may be used from any thread, and nobody waits for longer than a dictionary takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[Entry, Tally] = {}
        self._last_uses: dict[str, float] = {}

    def use(self, token_id: str, *, at: float) -> None:
        """Note that a token let somebody in."""
        with self._lock:
            self._last_uses[token_id] = at

    def note(self, entry: Entry, *, at: float) -> None:
        """Note an entry for the audit log."""
        with self._lock:
            self._add(entry, Tally(at, at))

    def take(self) -> Taken:
        """Return what was noted, and have it no longer."""
        with self._lock:
            taken = Taken(self._tallies, self._last_uses)
            self._tallies, self._last_uses = {}, {}
        return taken

    def put_back(self, taken: Taken) -> None:
        """Note again what could not be written."""
        with self._lock:
            self._last_uses = {**taken.last_uses, **self._last_uses}
            for entry, tally in taken.tallies.items():
                self._add(entry, tally)

    def _add(self, entry: Entry, tally: Tally) -> None:
        if entry not in self._tallies and len(self._tallies) >= MAX_NOTED:
            entry = entry._replace(client_id=None, token_id=None, address=None, detail="")
        known = self._tallies.get(entry)
        self._tallies[entry] = tally if known is None else known.plus(tally)
