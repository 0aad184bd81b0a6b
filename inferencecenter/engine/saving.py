"""When the engine saves what its slots hold: once nothing has come in for a moment, and until something does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.inbox import Inbox
    from inferencecenter.engine.scheduler.plan import Park
    from inferencecenter.engine.scheduler.saving import Saving

QUIET_S: Final = 0.2
"""How long nothing is to come in before slots are saved: a copy is worthless with the next turn of a quick client."""


class IdleSaving:
    """Saves one slot after the other, looking at what came in between two of them.

    Args:
        saving: What there is to save.
        park: Saves a slot.
        inbox: What has come in.
        quiet_s: How long nothing is to come in before.
    """

    def __init__(self, saving: Saving, *, park: Callable[[Park], bool], inbox: Inbox, quiet_s: float) -> None:
        self._saving = saving
        self._park = park
        self._inbox = inbox
        self._quiet_s = quiet_s

    @property
    def wait_s(self) -> float | None:
        """Seconds for which nothing is to come in before ``run``; ``None`` when there is nothing to save."""
        return self._quiet_s if self._saving.wanted else None

    def run(self) -> None:
        """Save until something comes in, or all is saved."""
        while self._inbox.empty and (park := self._saving.next()) is not None:
            self._park(park)
