"""When an engine that nobody asks anything is to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.supervisor.watch import Timer


class Sleep:
    """Counts how long nothing was asked: one timer while the engine is idle, none while it works or sleeps.

    Args:
        after_s: Idle seconds after which ``on_tired`` is called; ``None`` for never.
        on_tired: Called once for each time of idleness that lasts so long.
        call_later: Arranges for a call after some seconds.
    """

    def __init__(
        self,
        after_s: float | None,
        *,
        on_tired: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._after_s = after_s
        self._on_tired = on_tired
        self._call_later = call_later
        self._timer: Timer | None = None

    def keep(self, *, idle: bool) -> None:
        """Begin to count, or end it; counting goes on where it is if nothing has changed."""
        if idle and self._timer is None and self._after_s is not None:
            self._timer = self._call_later(self._after_s, self._tire)
        elif not idle and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tire(self) -> None:
        self._timer = None
        self._on_tired()
