"""What a session remembers of its turns that have ended."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from inferencecenter.protocol.values import TranscriptTurn, Usage

if TYPE_CHECKING:
    from inferencecenter.protocol.events import End

MAX_TURNS: Final = 1000
"""Turns that are listed; older ones count in the sum only."""
MAX_TURN_KEYS: Final = 64
"""Turns that a repeated ``turn_key`` finds."""


class Ledger:
    """The last turns, the sum of all turns, and the ends that a repeated ``turn_key`` is answered with."""

    def __init__(self) -> None:
        self.usage = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        self._turns: deque[TranscriptTurn] = deque(maxlen=MAX_TURNS)
        self._ends: OrderedDict[str, End] = OrderedDict()

    @property
    def turns(self) -> tuple[TranscriptTurn, ...]:
        """The last turns, oldest first."""
        return tuple(self._turns)

    def record(self, turn_key: str | None, end: End) -> None:
        """Take note of a turn that did not fail."""
        self._turns.append(TranscriptTurn(turn_id=end.turn_id, finish_reason=end.finish_reason, usage=end.usage))
        self.usage = Usage(
            prompt_tokens=self.usage.prompt_tokens + end.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens + end.usage.cached_tokens,
            completion_tokens=self.usage.completion_tokens + end.usage.completion_tokens,
        )
        if turn_key is not None:
            self._ends[turn_key] = end
            if len(self._ends) > MAX_TURN_KEYS:
                self._ends.popitem(last=False)

    def find(self, turn_key: str | None) -> End | None:
        """Return how the turn with this key ended, if it is still known."""
        return None if turn_key is None else self._ends.get(turn_key)
