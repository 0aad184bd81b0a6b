"""How long a turn keeps its slot while others wait."""

from __future__ import annotations

from math import ceil
from typing import Final

from inferencecenter.engine.scheduler.average import moved

_FIRST_TOKENS: Final = 32
_LEAST_TOKENS: Final = 16
_MOST_TOKENS: Final = 512
_PARKING_SHARE: Final = 0.03
# Saving and restoring: what an exchange of turns consists of.
_MOVES_AN_EXCHANGE: Final = 2
# Weight of the newest step: moves are few, and the first ones into fresh memory take ten times as long as later ones.
_NEWEST: Final = 0.2


class Quantum:
    """How many tokens a turn generates before one that waits gets its slot.

    As given, or so many that exchanging turns takes less than 3 % of the time: where ``s`` slots generate, each step
    makes ``s`` tokens in ``d`` seconds, and in the ``q`` steps of a quantum each slot changes hands once at ``e``
    seconds. ``s·e <= 0.03·q·d`` holds from ``q = e / (0.03·d/s)`` on: what counts is the time for one token, ``d/s``.

    Args:
        tokens: The quantum; 0 to learn it.
    """

    def __init__(self, tokens: int) -> None:
        self._given_tokens = tokens
        self._move_s = 0.0
        self._token_s = 0.0

    @property
    def tokens(self) -> int:
        """The quantum of the next step."""
        if self._given_tokens:
            return self._given_tokens
        if not (self._move_s and self._token_s):
            return _FIRST_TOKENS
        needed = ceil(_MOVES_AN_EXCHANGE * self._move_s / (_PARKING_SHARE * self._token_s))
        return min(max(needed, _LEAST_TOKENS), _MOST_TOKENS)

    def observe(self, *, moves: int, moves_s: float, generated_tokens: int, decode_s: float) -> None:
        """Learn from a step; zero stands for a part that it did not have."""
        if moves and moves_s > 0:
            self._move_s = moved(self._move_s, moves_s / moves, weight=_NEWEST)
        if generated_tokens and decode_s > 0:
            self._token_s = moved(self._token_s, decode_s / generated_tokens, weight=_NEWEST)
