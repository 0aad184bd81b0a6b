"""Turns that wait until another has read the prefix they share, so that it is read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.prefix import common_prefix_tokens
from inferencecenter.engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.engine.scheduler.request import Request

_LEAST_CELLS: Final = 2
# A reader can lose its slot, or its snapshot, more often than a follower should have to wait for it.
_MOST_FOLLOWS: Final = 2
_MOST_FOLLOWERS: Final = 64


@dataclass(frozen=True, slots=True)
class _Following:
    """``request`` waits until ``reader`` has read ``n_tokens``, or has them parked where ``by_snapshot``."""

    request: Request
    reader: Request
    n_tokens: int
    by_snapshot: bool

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        reader = self.reader
        if self.by_snapshot:
            return not reader.snapshot or reader.slot is None
        return reader.state is not RequestState.PREFILL or reader.kv_tokens >= self.n_tokens


class Followers:
    """Who waits for whose reading.

    Within a client any common prefix is shared, by copying it out of the reader's slot. Across clients only a public
    prefix is, as the snapshot that the reader leaves of it; so it is for models whose sequences cannot be cut.

    Args:
        can_rewind: Whether a sequence can be cut anywhere.
        grid_tokens: Waiting must spare two cells of the grid at least.
    """

    def __init__(self, *, can_rewind: bool, grid_tokens: int) -> None:
        self._can_rewind = can_rewind
        self._least_tokens = _LEAST_CELLS * grid_tokens
        self._followings: dict[str, _Following] = {}

    def __len__(self) -> int:
        return len(self._followings)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those who wait, the first one first."""
        return tuple(following.request for following in self._followings.values())

    def follow(self, request: Request, running: Iterable[Request], *, cached_tokens: int) -> str | None:
        """Let a turn wait for a reader that spares it enough; return the reader's turn, or ``None`` where none does."""
        if request.follows >= _MOST_FOLLOWS or len(self) >= _MOST_FOLLOWERS:
            return None
        followings = [
            following
            for reader in running
            if reader.rank <= request.rank
            and (following := self._following(request, reader, least=cached_tokens + self._least_tokens)) is not None
        ]
        best = max(followings, key=lambda following: (following.n_tokens, following.reader.kv_tokens), default=None)
        if best is None:
            return None
        request.follows += 1
        self._followings[request.turn_id] = best
        return best.reader.turn_id

    def discard(self, request: Request) -> bool:
        """Forget a turn; ``False`` when it follows nobody."""
        return self._followings.pop(request.turn_id, None) is not None

    def release(self) -> list[Request]:
        """Return those who need not wait any more, and forget them."""
        over = [following.request for following in self._followings.values() if following.over]
        for request in over:
            del self._followings[request.turn_id]
        return over

    def _following(self, request: Request, reader: Request, *, least: int) -> _Following | None:
        """Return what waiting for a reader would be, ``None`` if it spares less than ``least`` tokens."""
        own = request.client_id == reader.client_id
        if reader.state is RequestState.PREFILL and own and self._can_rewind:
            n_tokens = _common(request.tokens[:-1], reader.tokens, least)
            by_snapshot = False
        elif reader.snapshot and (own or (request.public and reader.public)):
            shared = (
                request.tokens[:-1] if own else request.tokens[: min(request.prefix_tokens, request.prompt_tokens - 1)]
            )
            n_tokens = _common(shared, reader.tokens[: reader.cut_tokens], least)
            by_snapshot = True
            if n_tokens < reader.cut_tokens and not self._can_rewind:
                return None
        else:
            return None
        if n_tokens < least or reader.kv_tokens >= n_tokens:
            return None
        return _Following(request, reader, n_tokens, by_snapshot=by_snapshot)


def _common(a: list[int], b: list[int], least: int) -> int:
    """Return the length of the common prefix, 0 when it is less than ``least``."""
    return common_prefix_tokens(a, b) if a[least - 1 : least] == b[least - 1 : least] else 0
