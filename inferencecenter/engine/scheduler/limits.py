"""How far turns are held back while the machine is to do less than it could."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.request import LOWEST_CLASS

if TYPE_CHECKING:
    from inferencecenter.engine.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may run.

    Attributes:
        active_slots: Most turns that have a slot at once. Those above it go on for their quantum.
        prefill_share: The part of a step's prompt tokens that is read.
        lowest_class: Turns of a lower class get no slot, however long they wait.
    """

    active_slots: int
    prefill_share: float = 1.0
    lowest_class: int = LOWEST_CLASS

    def __post_init__(self) -> None:
        if self.active_slots < 1:
            raise ValueError(f"nothing runs in {self.active_slots} slots")
        if not 0 < self.prefill_share <= 1:
            raise ValueError(f"{self.prefill_share} is no share of a step")
        if self.lowest_class < 0:
            raise ValueError(f"there is no class {self.lowest_class}")

    def bars(self, request: Request) -> bool:
        """Tell whether a turn may not run now."""
        return request.base_class > self.lowest_class
