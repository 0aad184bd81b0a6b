"""Refuses new turns to a client whose turns have caused too many deaths of engines.

Convicting a turn resets the engine's restart budget, so a client could repeat its poison prompt for ever; and a client
that cancels its turn before it is isolated is never convicted. So deaths are also counted by client. A dead engine
names the turns of its step, most of which are innocent: the death counts against the client of each until that turn is
cleared, by as many further tokens as clear a suspect or by ending on its own. A cancelled turn is not cleared.
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
    """The time of an engine's death in seconds and, by client, the suspected turns that are not cleared yet."""

    at_s: float
    suspected: dict[str, set[str]]


class CrashLimit:
    """Counts deaths of engines within a time window by the clients whose turns may have caused them.

    Args:
        max_deaths: Deaths at which a client's new turns are refused; 0 disables the limit.
        window_s: How long a death counts, in seconds.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(self, *, max_deaths: int, window_s: float, monotonic: Callable[[], float]) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._monotonic = monotonic
        self._deaths: deque[_Death] = deque()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._deaths)} deaths)"

    def engine_died(self, suspects: Mapping[str, str]) -> frozenset[str]:
        """Count a death against the clients of ``suspects``, which maps turns to clients.

        Returns:
            The clients that are refused from now on and were not before.
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
        """Clear a turn of all deaths."""
        if not self._deaths:
            return
        for death in self._deaths:
            for client_id, turn_ids in list(death.suspected.items()):
                turn_ids.discard(turn_id)
                if not turn_ids:
                    del death.suspected[client_id]
        self._deaths = deque(death for death in self._deaths if death.suspected)

    def check(self, client_id: str) -> None:
        """Raise if a client's turns have caused too many deaths.

        Raises:
            InferenceCenterError: ``rate_limited``, with the time after which to retry.
        """
        if (error := self.refusal(client_id)) is not None:
            raise error

    def refusal(self, client_id: str) -> InferenceCenterError | None:
        """Return the error with which a client's new turns are refused, if they are."""
        if not self._deaths:
            return None
        self._expire()
        counted = self._counted(client_id)
        if len(counted) < self._max_deaths:
            return None
        left_s = counted[-self._max_deaths] + self._window_s - self._monotonic()
        return InferenceCenterError(
            ErrorCode.RATE_LIMITED,
            f"turns of this client have crashed {len(counted)} engines within {self._window_s:g} s",
            hint="Do not repeat turns that failed with engine_crashed. Retry after retry_after_ms; "
            "the operator's limit is engine.max_client_crashes.",
            retry_after_ms=max(1, round(1000 * left_s)),
        )

    def _counted(self, client_id: str) -> list[float]:
        return [death.at_s for death in self._deaths if client_id in death.suspected]

    def _expire(self) -> None:
        oldest_s = self._monotonic() - self._window_s
        while self._deaths and self._deaths[0].at_s <= oldest_s:
            self._deaths.popleft()
