"""Turns that kill engines (poison turns): their identification, the clients that send them, and the file of suspects.

The turns that a dead engine was busy with are suspects. A suspect that generates ``PROVEN_TOKENS`` more tokens is
cleared, alone or among others. One that is suspected a second time before that is isolated: it runs with no other turn
in the engine. If an engine dies that was busy with the isolated turn only, the turn is quarantined: it fails. An engine
that was killed from outside, by an operator or the OOM killer, need not have died of the turn, so only the second such
death counts.

The death of a daemon counts as a death of its engines. The turns that the next daemon resumes are suspected of it, or
only the isolated one; so a turn that kills daemon and engine together is identified by the fifth death. A turn that
made progress between two deaths of daemons is not suspected of the first. For this the suspicions are written to
``suspects.json`` when they change, which is only after an engine's death and while suspects run in isolation.

The replicas of a model share their suspicions, and each isolates only turns of its own. A suspect of an engine's own
crash is confined to its replica, so that a poison turn does not kill one replica after the other.

Quarantining a turn resets the engine's restart budget, so a client could repeat its poison prompt for ever; and a
client that cancels its turn before it is isolated is never quarantined. So deaths are also counted by client
(``CrashLimit``). A dead engine names the turns of its step, most of which did not cause it: the death counts against
the client of each until that turn is cleared, by as many further tokens as clear a suspect or by ending on its own. A
cancelled turn is not cleared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.json_file import JsonFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


PROVEN_TOKENS: Final = 16
ISOLATED_AFTER: Final = 2
"""Suspicions after which a turn is isolated."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A turn was suspected ``times`` times and is cleared at ``clear_at_tokens`` generated tokens.

    ``crashed``: at least one of the engines was not killed from outside.
    """

    times: int
    clear_at_tokens: int
    crashed: bool = False


class PoisonTurnDetector:
    """The suspected turns, and which of them is isolated.

    Args:
        suspicions: Shared with the detectors of other replicas; ``None`` for own ones.

    Attributes:
        isolated: The turn of this queue that must run alone; ``None`` while all may run together. It changes only at
            the death of an engine, when this turn is cleared, ends or leaves, and when a suspect joins. Read for each
            turn that is submitted, so it is kept.
    """

    def __init__(self, suspicions: dict[str, Suspicion] | None = None) -> None:
        self.suspicions: dict[str, Suspicion] = {} if suspicions is None else suspicions
        self.isolated: str | None = None
        # The suspects that are turns of this queue.
        self._own: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.times}, isolated={self.isolated})"

    @property
    def times(self) -> dict[str, int]:
        """How often each suspect was named."""
        return {turn_id: suspicion.times for turn_id, suspicion in self.suspicions.items()}

    @property
    def n_tokens(self) -> dict[str, int]:
        """The generated tokens of each suspect when it was last named."""
        return {name: suspicion.clear_at_tokens - PROVEN_TOKENS for name, suspicion in self.suspicions.items()}

    def restore(self, turn_id: str, *, times: int, n_tokens: int) -> None:
        """Restore a suspicion that an earlier daemon stored."""
        self.suspicions[turn_id] = Suspicion(times, n_tokens + PROVEN_TOKENS, crashed=True)
        self._own.add(turn_id)
        self._isolate()

    def join(self, turn_id: str) -> bool:
        """Add a turn of another replica to this queue; return whether it is a suspect."""
        if turn_id not in self.suspicions:
            return False
        self._own.add(turn_id)
        self._isolate()
        return True

    def leave(self, turn_id: str) -> None:
        """Remove a turn that continues on another replica, and keep the suspicion."""
        self._own.discard(turn_id)
        self._isolate()

    def confines(self, turn_id: str) -> bool:
        """Return whether a turn has to stay on its replica: it may have crashed an engine, or is isolated."""
        suspicion = self.suspicions.get(turn_id)
        return suspicion is not None and (suspicion.crashed or suspicion.times >= ISOLATED_AFTER)

    def lost(self, named: Mapping[str, int], *, from_outside: bool = False) -> str | None:
        """Record the death of an engine; return the turn that is quarantined for it, if any.

        Args:
            named: The turns that the engine was busy with, and the tokens that each had generated.
            from_outside: Whether the engine was killed by something that may be unrelated to them.
        """
        isolated = self.isolated
        if isolated is not None and named.keys() == {isolated}:
            died_alone_before = self.suspicions[isolated].times > ISOLATED_AFTER
            if not from_outside or died_alone_before:
                self.forget(isolated)
                return isolated
        for turn_id, n_tokens in named.items():
            before = self.suspicions.get(turn_id)
            times = before.times + 1 if before else 1
            crashed = not from_outside or (before is not None and before.crashed)
            self.suspicions[turn_id] = Suspicion(times, n_tokens + PROVEN_TOKENS, crashed)
            self._own.add(turn_id)
        self._isolate()
        return None

    def clears(self, turn_id: str, n_tokens: int) -> bool:
        """Return whether a turn is cleared by the tokens it has generated, and if so drop the suspicion."""
        suspicion = self.suspicions.get(turn_id)
        if suspicion is None or n_tokens < suspicion.clear_at_tokens:
            return False
        self.forget(turn_id)
        return True

    def forget(self, turn_id: str) -> None:
        """Drop a turn that has ended."""
        if self.suspicions.pop(turn_id, None) is not None:
            self._own.discard(turn_id)
            self._isolate()

    def _isolate(self) -> None:
        suspects = self.suspicions.items()
        self.isolated = next(
            (each for each, suspicion in suspects if suspicion.times >= ISOLATED_AFTER and each in self._own), None
        )


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


class SuspectedTurns(msgspec.Struct, frozen=True):
    """By turn of a model: the deaths it was suspected of, and the tokens it had generated at the last one.

    ``alone`` is the turn that ran in isolation.
    """

    times: dict[str, int] = {}
    n_tokens: dict[str, int] = {}
    alone: str | None = None


class PoisonTurnStore:
    """The suspected turns by model. A file that cannot be read or written only loses the suspicions."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, SuspectedTurns], name="suspects")
        self._models = self._file.read() or {}

    def of(self, model: str) -> SuspectedTurns:
        """Return the suspicions stored for a model."""
        return self._models.get(model, SuspectedTurns())

    def put(self, model: str, suspected: SuspectedTurns) -> None:
        """Store a model's suspicions if they have changed.

        A replica without an isolated turn leaves that of another, while it is suspected.
        """
        before = self.of(model)
        if suspected.alone is None and before.alone in suspected.times:
            suspected = msgspec.structs.replace(suspected, alone=before.alone)
        if suspected == before:
            return
        self._models[model] = suspected
        self._models = {name: each for name, each in self._models.items() if each.times}
        self._file.write(self._models)
