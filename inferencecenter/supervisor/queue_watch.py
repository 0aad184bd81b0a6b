"""When a long queue is worth a line in the log."""

from __future__ import annotations


class QueueWatch:
    """Says once that the queue has become long, and again only after it has been half as long.

    Args:
        threshold: Waiting turns that make a queue long; 0 for never.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._warned = False

    def warns(self, waiting: int) -> bool:
        """Take note of how many turns wait, and tell whether to warn now."""
        if not self._threshold:
            return False
        if waiting * 2 < self._threshold:
            self._warned = False
        if self._warned or waiting < self._threshold:
            return False
        self._warned = True
        return True
