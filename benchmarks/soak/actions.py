"""Random actions of a client. Pure: equal seeds give equal actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random


class Kind(StrEnum):
    """The kinds of actions; all but the last three are turns."""

    TALK = "turn"
    ABORT = "abort"
    DROP = "disconnect"
    DAWDLE = "slow reader"
    FORK = "fork"
    REWIND = "rewind"
    LEAVE = "new session"


TURNS: Final = frozenset({Kind.TALK, Kind.ABORT, Kind.DROP, Kind.DAWDLE})
"""Actions that generate."""
_WEIGHTS: Final = {
    Kind.TALK: 8,
    Kind.ABORT: 3,
    Kind.DROP: 3,
    Kind.DAWDLE: 2,
    Kind.FORK: 1,
    Kind.REWIND: 1,
    Kind.LEAVE: 1,
}
_SHORTEST_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a client.

    In a turn it happens after ``after_pieces`` pieces of text, and a pause takes ``pause_s``. ``choice`` from 0 to 1
    selects the turn to which a client forks or rewinds.
    """

    kind: Kind
    prompt_tokens: int
    max_tokens: int
    after_pieces: int
    pause_s: float
    choice: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The longest of what is drawn; the shortest prompts have ``least_prompt_tokens``."""

    least_prompt_tokens: int
    prompt_tokens: int
    max_tokens: int
    pause_s: float


def actions(chance: Random, bounds: Bounds) -> Iterator[Action]:
    """Yield actions without end; lengths are spread evenly over their orders of magnitude."""
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    while True:
        max_tokens = _length(chance, 1, bounds.max_tokens)
        yield Action(
            kind=chance.choices(kinds, weights)[0],
            prompt_tokens=_length(chance, bounds.least_prompt_tokens, bounds.prompt_tokens),
            max_tokens=max_tokens,
            after_pieces=chance.randint(1, max_tokens),
            pause_s=chance.uniform(min(_SHORTEST_PAUSE_S, bounds.pause_s), bounds.pause_s),
            choice=chance.random(),
        )


def _length(chance: Random, least: int, most: int) -> int:
    return min(most, round(math.exp(chance.uniform(math.log(least), math.log(max(least, most))))))
