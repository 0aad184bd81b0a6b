"""The sampling parameters of every measured turn, equal on all servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.target import Work

# llama-server's defaults, stated explicitly so that no server's own defaults apply.
_SAMPLING: Final = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}


def sampling(work: Work, *, has_form: bool = False) -> dict[str, float | bool]:
    """Return parameters by the names that all the servers know; the number of tokens has a different name on each.

    An answer that ``has_form`` ends when its form is complete; others do not end by themselves.
    """
    ends = {} if has_form else {"ignore_eos": True}
    return {**_SAMPLING, **ends, "temperature": work.temperature, "seed": work.seed % 2**31}
