"""How many deaths of engines a client's turns may cause before it is refused new ones for a while.

A conviction ends one turn and starts the engine's restart budget anew, so a client could repeat its text for ever; and
one that withdraws its turn before it is tried is never convicted. So deaths are counted by client. A dead engine names
the turns of its step, most of which are innocent: the death counts against the client of each until that turn is
cleared, by as many further tokens as clear a suspect or by an end of its own. A turn that is withdrawn is not cleared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Death:
    """When an engine died, in seconds, and the turns that may have done it, by client, without those cleared since."""

    at_s: float
    suspected: dict[str, set[str]]


class CrashLimit:
    """Deaths of engines within a window of time, by the clients whose turns may have caused them.

    Args:
        max_deaths: Deaths at which a client's new turns are refused; 0 refuses none.
        window_s: How long a death counts, in seconds.
        monotonic: Seconds that only rise.
    """

    def __init__(self, *, max_deaths: int, window_s: float, monotonic: Callable[[], float]) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._monotonic = monotonic
        self._deaths: deque[_Death] = deque()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._deaths)} deaths)"

    def engine_died(self, suspects: Mapping[str, str]) -> frozenset[str]:
        """Count an engine's death against the clients of ``suspects``, which maps turns to clients.

        Returns:
            The clients that are refused from now on, and were not before.
        """
        if not self._max_deaths or not suspects:
            return frozenset()
        self._expire()
        suspected: dict[str, set[str]] = {}
        for turn_id, client_id in suspects.items():
            suspected.setdefault(client_id, set()).add(turn_id)
        self._deaths.append(_Death(self._monotonic(), suspected))
        refused = frozenset(client_id for client_id in suspected if len(self._counted(client_id)) == self._max_deaths)
        for client_id in refused:
            _log.warning("client_refused", client=client_id, engine_deaths=self._max_deaths)
        return refused

    def cleared(self, turn_id: str) -> None:
        """Take note that a turn has ended no engine."""
        if not self._deaths:
            return
        for death in self._deaths:
            for client_id, turn_ids in list(death.suspected.items()):
                turn_ids.discard(turn_id)
                if not turn_ids:
                    del death.suspected[client_id]
        self._deaths = deque(death for death in self._deaths if death.suspected)

    def check(self, client_id: str) -> None:
        """Refuse a new turn of a client that has caused too many deaths.

        Raises:
            InferenceCenterError: ``rate_limited``, with the time until it may ask again.
        """
        if (error := self.refusal(client_id)) is not None:
            raise error

    def refusal(self, client_id: str) -> InferenceCenterError | None:
        """Return why a client's new turns are refused, if they are."""
        if not self._deaths:
            return None
        self._expire()
        counted = self._counted(client_id)
        if len(counted) < self._max_deaths:
            return None
        left_s = counted[-self._max_deaths] + self._window_s - self._monotonic()
        return InferenceCenterError(
            ErrorCode.RATE_LIMITED,
            f"turns of this client have ended {len(counted)} engines within {self._window_s:g} s",
            hint="Leave out what ends them: turns that failed with engine_crashed. Ask again after retry_after_ms; "
            "the operator's limit is engine.max_client_crashes.",
            retry_after_ms=max(1, round(1000 * left_s)),
        )

    def _counted(self, client_id: str) -> list[float]:
        return [death.at_s for death in self._deaths if client_id in death.suspected]

    def _expire(self) -> None:
        oldest_s = self._monotonic() - self._window_s
        while self._deaths and self._deaths[0].at_s <= oldest_s:
            self._deaths.popleft()
