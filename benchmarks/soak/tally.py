"""Counts of what clients observed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchmarks.observed_turn import difference
from benchmarks.soak.actions import Kind

if TYPE_CHECKING:
    from benchmarks.observed_turn import ObservedTurn

EXPECTED: Final = frozenset({(Kind.ABORT, "nothing_to_abort"), (Kind.DAWDLE, "daemon_unreachable")})
"""An answer that ends before its abort arrives, and a slow reader that lost its socket."""
ENDINGS: Final = frozenset({"stop", "length", "context_full"})
"""Terminal events of turns that went well; ``aborted`` is another for those that were aborted."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A delay, and when it began."""

    at_s: float
    ms: float


@dataclass(slots=True)
class Tally:
    """All clients' actions, errors, texts and delays."""

    actions: Counter[Kind] = field(default_factory=Counter)
    errors: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    resumed: int = 0
    not_ended_once: int = 0
    unlike_transcript: int = 0
    lost_chars: int = 0
    extra_chars: int = 0
    misnumbered: int = 0
    ttft: list[Timed] = field(default_factory=list)
    itl: list[Timed] = field(default_factory=list)

    def error(self, kind: Kind, code: str) -> None:
        """Count an error of an action."""
        self.errors[(kind, code)] += 1

    def unexplained(self) -> Counter[tuple[Kind, str]]:
        """Return the errors that only the daemon can have caused."""
        return Counter({met: count for met, count in self.errors.items() if met not in EXPECTED})

    def turn(self, kind: Kind, turn: ObservedTurn, *, transcript: str) -> None:
        """Count a turn that is over, whose answer the session holds as ``transcript``.

        Delays are noted only of turns whose client read all the time.
        """
        endings = ENDINGS | {"aborted"} if kind is Kind.ABORT else ENDINGS
        for finish in turn.finishes[:1]:
            if finish not in endings:
                self.error(kind, finish)
        found = difference(transcript, turn.text)
        self.not_ended_once += len(turn.finishes) != 1
        self.unlike_transcript += found.first is not None
        self.lost_chars += found.lost_chars
        self.extra_chars += found.extra_chars
        self.misnumbered += turn.misnumbered
        if kind in (Kind.TALK, Kind.ABORT) and turn.times_s:
            self.ttft.append(Timed(turn.started_s, (turn.times_s[0] - turn.started_s) * 1000))
            self.itl += [Timed(earlier, (later - earlier) * 1000) for earlier, later in pairwise(turn.times_s)]


def thirds(delays: list[Timed], *, start_s: float, end_s: float) -> tuple[list[float], list[float]]:
    """Return the milliseconds of delays that began in the first third of a stretch of time, and in its last."""
    length_s = (end_s - start_s) / 3
    return (
        [delay.ms for delay in delays if delay.at_s < start_s + length_s],
        [delay.ms for delay in delays if delay.at_s >= end_s - length_s],
    )
