"""Whether two servers may be compared, and the differences that prevent it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from benchmarks.target import TargetFacts

COMPARED: Final[Mapping[str, str]] = {
    "model_bytes": "size of the weights",
    "n_params": "number of parameters",
    "library": "llama.cpp version",
    "threads": "threads",
    "slots": "slots",
    "n_ctx": "context of a slot",
}
"""The facts that must agree, with their display names."""

_COMMIT: Final = re.compile(r"\b[0-9a-f]{7,40}\b")
_RELEASE: Final = re.compile(r"\bb(\d+)\b")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether ratios may be printed: not with ``refusals``, each a sentence; ``assumed`` names facts taken as equal."""

    refusals: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def fair(self) -> bool:
        """Whether ratios may be printed."""
        return not self.refusals


def compare(ours: TargetFacts, theirs: TargetFacts, *, assume_same: Collection[str]) -> Comparison:
    """Compare the facts of two servers; a fact that a side does not report may be assumed, a difference may not."""
    refusals, assumed = [], []
    for field, words in COMPARED.items():
        our, their = getattr(ours, field), getattr(theirs, field)
        same = _same(field, our, their)
        if same is True:
            continue
        if same is False:
            refusals.append(f"the {words} differs: {our} here, {their} at {theirs.name}")
        elif field in assume_same:
            assumed.append(field)
        else:
            refusals.append(
                f"the {words} cannot be compared: {_shown(our)} here, {_shown(their)} at {theirs.name};"
                f" --assume-same {field} takes it on trust"
            )
    return Comparison(tuple(refusals), tuple(assumed))


def _same(field: str, ours: int | str | None, theirs: int | str | None) -> bool | None:
    """Return whether two facts are equal; ``None`` if unknown."""
    if ours in (None, "") or theirs in (None, ""):
        return None
    if ours == theirs:
        return True
    return _same_version(str(ours), str(theirs)) if field == "library" else False


def _same_version(ours: str, theirs: str) -> bool | None:
    """Compare versions by the commit, else by the build number, if both report it."""
    our_commit, their_commit = _COMMIT.search(ours), _COMMIT.search(theirs)
    if our_commit and their_commit:
        shorter, longer = sorted((our_commit[0], their_commit[0]), key=len)
        return longer.startswith(shorter)
    our_release, their_release = _RELEASE.search(ours), _RELEASE.search(theirs)
    if our_release and their_release:
        return our_release[1] == their_release[1]
    return None


def _shown(fact: int | str | None) -> str:
    return "unknown" if fact in (None, "") else str(fact)
