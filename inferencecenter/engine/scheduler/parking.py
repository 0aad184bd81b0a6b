"""The store of parked KV as the scheduler sees it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX_KEY: Final = "prefix-"


@dataclass(frozen=True, slots=True)
class Match:
    """A parked sequence of ``n_tokens`` whose first ``common_tokens`` are the wanted ones; ``tokens``, packed, are all.

    ``ready``: in RAM, usable now. Not ready: on disk only, to be fetched first; ``in_vain``: that was tried, and there
    was no room in RAM at the time. ``spare``: a copy of what a slot held, which goes first when there is no room.
    """

    key: str
    common_tokens: int
    n_tokens: int
    ready: bool
    tokens: bytes
    spare: bool = False
    in_vain: bool = False


class ParkedKv(Protocol):
    """Finds parked sequences for the scheduler."""

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and of the public scope ``""``, or ``None``.

        The best has the longest common prefix; of equal ones the shortest, which need not be cut.
        """

    def fits(self, n_tokens: int) -> bool:
        """Tell whether a sequence of ``n_tokens`` could be parked at all."""

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Tell whether a spare copy of ``n_tokens`` may be parked now: in place of that of ``key``, and of no other."""


def prefix_key(scope: str, tokens: Sequence[int]) -> str:
    """Return the key under which the KV of a shared prefix is parked; equal for equal ``scope`` and ``tokens``."""
    digest = sha256(scope.encode() + b"\0" + array("i", tokens).tobytes())
    return _PREFIX_KEY + digest.hexdigest()


def is_prefix_key(key: str) -> bool:
    """Tell the key of a shared prefix from that of a session."""
    return key.startswith(_PREFIX_KEY)
