"""How often an engine is started again, and with how much on the GPU. Pure."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencecenter.supervisor.backoff import RestartPolicy

_ASSUMED_LAYERS: Final = 64
"""What "all" is taken for before the model is known; more than most models have."""
_LACKS_MEMORY: Final = re.compile(r"alloc|out.?of.?(device)?.?memory", re.IGNORECASE)


class RestartBudget:
    """Counts restarts within a window of time."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()

    def take(self, *, now: float) -> bool:
        """Count a restart at ``now``, in seconds that only rise; ``False`` if it is one too many."""
        while self._restarts and now - self._restarts[0] > self._policy.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return False
        self._restarts.append(now)
        return True

    def give_back(self) -> None:
        """Forget the last restart: what it was needed for was no fault of an engine."""
        if self._restarts:
            self._restarts.pop()

    def clear(self) -> None:
        """Forget all restarts: what made them necessary is gone."""
        self._restarts.clear()


def fewer_layers(current: int, known_layers: int | None) -> int:
    """Return how many layers to put on the GPU after an engine died when it loaded ``current``: half, down to none.

    Args:
        current: What was tried; -1 is all layers.
        known_layers: How many the model has, if it was ever loaded.
    """
    if current < 0:
        current = _ASSUMED_LAYERS if known_layers is None else known_layers
    elif known_layers is not None:
        current = min(current, known_layers)
    return current // 2


def lacks_memory(reason: str) -> bool:
    """Tell whether llama.cpp refuses a model because it does not fit, by what it says."""
    return bool(_LACKS_MEMORY.search(reason))
