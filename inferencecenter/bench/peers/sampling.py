"""The sampling parameters of every measured turn, equal on all servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencecenter.bench.target import Work

# llama-server's defaults, stated so that nobody's own defaults count.
_SAMPLING: Final = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "ignore_eos": True}


def sampling(work: Work) -> dict[str, float | bool]:
    """Return parameters by the names that all the servers know; the number of tokens has a different name on each."""
    return {**_SAMPLING, "temperature": work.temperature, "seed": work.seed % 2**31}
