"""Where the KV of a turn comes from: its session's slot, a neighbour's, a parked sequence, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.prefix import common_prefix_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from inferencecenter.engine.scheduler.parking import Match, ParkedKv
    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable


@dataclass(frozen=True, slots=True)
class Source:
    """The first ``n_tokens`` of a turn are in ``slot``, or parked as ``match``; with neither, nowhere."""

    n_tokens: int = 0
    slot: Slot | None = None
    match: Match | None = None


class Sources:
    """Finds the longest beginning of a turn's tokens that need not be read again.

    Only what belongs to the turn's client is looked at, and public prefixes, which the store finds in their own scope.

    Args:
        slots: What the slots hold.
        parked: What is parked.
        can_rewind: Whether a sequence can be cut anywhere. Otherwise one that would have to be cut is of no use.
        grid_tokens: One source must spare so many tokens more than another to be worth a move.
    """

    def __init__(self, slots: SlotTable, parked: ParkedKv, *, can_rewind: bool, grid_tokens: int) -> None:
        self._slots = slots
        self._parked = parked
        self._can_rewind = can_rewind
        self._grid_tokens = grid_tokens

    def best(self, request: Request, *, unsettled: Collection[Slot], replaced: Collection[str], fetch: bool) -> Source:
        """Return where to take a turn's KV from.

        What makes no difference of a cell of the grid is not moved, except for a turn that comes back, which goes on
        where it was. The last token is always decoded: its logits are what the answer starts from.

        Args:
            request: The turn.
            unsettled: Slots whose content is not certain before the plan is carried out.
            replaced: Keys under which something else will be parked by then.
            fetch: Whether a sequence may come from disk.
        """
        limit = len(request.tokens) - 1
        best, gain = self._own(request, limit)
        parked = self._find(request, limit, replaced)
        needed = 1 if request.started and best.n_tokens == 0 else self._grid_tokens
        ready = parked.match is None or parked.match.ready
        if ready and parked.n_tokens >= gain + needed:
            best, gain, needed = parked, parked.n_tokens, self._grid_tokens
        for slot in self._slots:
            if slot.client_id == request.client_id and slot.session_id != request.session_id and slot not in unsettled:
                n_tokens = self._shared(slot, request, limit, least=gain + needed)
                if n_tokens:
                    best, gain, needed = Source(n_tokens, slot=slot), n_tokens, self._grid_tokens
        if not ready and fetch and parked.n_tokens >= gain + needed:
            best = parked
        return best

    def is_parked(self, scope: str, tokens: Sequence[int], *, spare: bool = False) -> bool:
        """Tell whether exactly these tokens are parked; a spare copy counts if ``spare``."""
        match = self._parked.find(scope, tokens)
        if match is None or (match.spare and not spare):
            return False
        return match.common_tokens == match.n_tokens == len(tokens)

    def _own(self, request: Request, limit: int) -> tuple[Source, int]:
        """Return what the session's slot holds, and how much that counts."""
        slot = self._slots.of_session(request.session_id)
        if slot is None or slot.client_id != request.client_id:
            return Source(), 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        # A cut that the backend may refuse counts half, so that what is certain is not passed over for it.
        certain = self._can_rewind or n_tokens == len(slot.tokens)
        return Source(n_tokens, slot=slot), n_tokens if certain else n_tokens // 2

    def _find(self, request: Request, limit: int, replaced: Collection[str]) -> Source:
        match = self._parked.find(request.client_id, request.tokens)
        if match is not None and match.key in replaced:
            return Source()
        source = self._usable(match, limit)
        if source.match is None and not self._can_rewind and request.prefix_tokens:
            # The longest match has to be cut; the snapshot of the system prompt has not.
            prefix = request.tokens[: request.prefix_tokens]
            source = self._usable(self._parked.find(request.client_id, prefix), limit)
        return source

    def _usable(self, match: Match | None, limit: int) -> Source:
        if match is None:
            return Source()
        n_tokens = min(match.common_tokens, limit)
        return Source(n_tokens, match=match) if self._can_rewind or n_tokens == match.n_tokens else Source()

    def _shared(self, slot: Slot, request: Request, limit: int, *, least: int) -> int:
        """Return how much a neighbour spares, 0 if that is less than ``least``."""
        if least > limit or slot.tokens[least - 1 : least] != request.tokens[least - 1 : least]:
            return 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        return n_tokens if n_tokens >= least and (self._can_rewind or n_tokens == len(slot.tokens)) else 0
