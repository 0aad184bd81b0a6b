"""The store of parked KV as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """A parked sequence of ``n_tokens`` whose first ``common_tokens`` are the wanted ones.

    ``ready``: in RAM, usable now. Not ready: on disk only, to be fetched first.
    """

    key: str
    common_tokens: int
    n_tokens: int
    ready: bool


class ParkedKv(Protocol):
    """Finds parked sequences for the scheduler."""

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and of the public scope ``""``, or ``None``."""

    def fits(self, n_tokens: int) -> bool:
        """Tell whether a sequence of ``n_tokens`` could be parked at all."""
