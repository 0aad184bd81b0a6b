"""How long a client waits that goes on asking after refusals.

A refusal is cheap for the one who asks and never free for the one who answers, and no bucket bounds it: what is left of
it when a bucket is empty is a refusal again. So the task that reads a socket, and the one that answers an HTTP request,
waits a little after a refusal, longer with each one that follows, up to a second. A frame that is accepted is never
delayed and halves what has been counted, so that a client which errs now and then, or whose sessions have all gone,
waits for nothing, while one that mixes a few accepted frames into its refusals is still slowed down. A socket counts
for itself, so that one program does not slow down another of the same account; HTTP requests have no such place, and
count by account.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

FREE_REFUSALS: Final = 16
"""Refusals in a row that cost no time."""
MAX_DELAY_S: Final = 1.0
_STEP_S: Final = 0.01
_MAX_REFUSALS: Final = FREE_REFUSALS + round(MAX_DELAY_S / _STEP_S)
_MAX_CLIENTS: Final = 1000


class Pace:
    """Counts the refusals of one that asks."""

    def __init__(self) -> None:
        self._n_refused = 0

    def accepted(self) -> None:
        """Take note that something was done."""
        self._n_refused //= 2

    def refused(self) -> float:
        """Take note that something was refused, and return the seconds to wait before more is heard."""
        self._n_refused = min(self._n_refused + 1, _MAX_REFUSALS)
        return max(0, self._n_refused - FREE_REFUSALS) * _STEP_S


class Paces:
    """The pace of each client; of very many, those that were refused something last."""

    def __init__(self) -> None:
        self._paces: OrderedDict[str, Pace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paces)

    def accepted(self, client_id: str) -> None:
        """Take note that something was done for a client."""
        if (pace := self._paces.get(client_id)) is not None:
            pace.accepted()

    def refused(self, client_id: str) -> float:
        """Take note that something was refused, and return the seconds to wait before the client is told."""
        pace = self._paces.setdefault(client_id, Pace())
        self._paces.move_to_end(client_id)
        if len(self._paces) > _MAX_CLIENTS:
            self._paces.popitem(last=False)
        return pace.refused()
