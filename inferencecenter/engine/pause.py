"""The time after a step in which nothing is computed, so that a GPU cools."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.inbox import Command, Inbox


class Pause:
    """Waits after each step, heeding what comes in.

    Args:
        inbox: Where commands come from.
        clock: Monotonic seconds.
    """

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._clock = clock
        self._length_s = 0.0
        self._until_s = -math.inf

    @property
    def is_set(self) -> bool:
        """Whether there is to be a pause after each step."""
        return self._length_s > 0

    def change(self, length_s: float) -> None:
        """Let pauses be so long from the next step on, and end the one that is."""
        self._length_s, self._until_s = length_s, -math.inf

    def begin(self) -> None:
        """Take note that a step has ended."""
        if self._length_s:
            self._until_s = self._clock() + self._length_s

    def command(self) -> Command | None:
        """Return the next command that comes in during the pause, ``None`` when it is over."""
        if self._until_s == -math.inf:
            return None
        left_s = self._until_s - self._clock()
        command = self._inbox.get(timeout_s=left_s) if left_s > 0 else None
        if command is None:
            self._until_s = -math.inf
        return command
