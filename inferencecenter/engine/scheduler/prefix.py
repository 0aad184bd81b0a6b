"""How much of a new prompt a slot's KV already holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIRST_TOKENS: Final = 64


def common_prefix_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Compares slices, in C, each twice as long as the one before, and bisects the first that differs: the cost goes with
    what is equal, about a millisecond for 100k tokens, and with next to nothing where the beginnings differ.
    """
    equal, size, limit = 0, _FIRST_TOKENS, min(len(a), len(b))
    while equal < limit:
        end = min(equal + size, limit)
        if a[equal:end] != b[equal:end]:
            break
        equal, size = end, 2 * size
    limit = min(equal + size, limit)
    while equal < limit:
        middle = (equal + limit + 1) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            limit = middle - 1
    return equal
