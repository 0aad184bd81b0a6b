"""Where the longest prefix of a turn has its KV: its slot, a neighbour's, a parked sequence, a running prefill."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from inferencecenter.engine.scheduler.request import EngineRequest
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable

_FIRST_TOKENS: Final = 64
_PREFIX_KEY: Final = "prefix-"
_LEAST_CELLS: Final = 2
# A reader can lose its slot, or its snapshot, more often than a follower should have to wait for it.
_MOST_FOLLOWS: Final = 2
_MOST_FOLLOWERS: Final = 64


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


@dataclass(frozen=True, slots=True)
class Match:
    """A parked sequence of ``n_tokens`` whose first ``common_tokens`` are the wanted ones; ``tokens``, packed, are all.

    ``ready``: in RAM, usable now. Not ready: on disk only, to be fetched first; ``load_failed``: that was tried, and
    there was no room in RAM at the time. ``spare``: a copy of what a slot held, which goes first when there is no room.
    """

    key: str
    common_tokens: int
    n_tokens: int
    ready: bool
    tokens: bytes
    spare: bool = False
    load_failed: bool = False


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


@dataclass(frozen=True, slots=True)
class KvSource:
    """The first ``n_tokens`` of a turn are in ``slot``, or parked as ``match``; with neither, nowhere."""

    n_tokens: int = 0
    slot: Slot | None = None
    match: Match | None = None


class KvSourceFinder:
    """Finds the longest beginning of a turn's tokens that need not be read again.

    Only what belongs to the turn's client is looked at, and public prefixes, which the store finds in their own scope.

    Args:
        slots: What the slots hold.
        parked: What is parked.
        can_truncate: Whether a sequence can be cut anywhere. Otherwise one that would have to be cut is of no use.
        grid_tokens: One source must spare so many tokens more than another to be worth a move.
    """

    def __init__(self, slots: SlotTable, parked: ParkedKv, *, can_truncate: bool, grid_tokens: int) -> None:
        self._slots = slots
        self._parked = parked
        self._can_rewind = can_truncate
        self._grid_tokens = grid_tokens

    def best(
        self, request: EngineRequest, *, unsettled: Collection[Slot], replaced: Collection[str], fetch: bool
    ) -> KvSource:
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
                    best, gain, needed = KvSource(n_tokens, slot=slot), n_tokens, self._grid_tokens
        if not ready and fetch and parked.n_tokens >= gain + needed:
            best = parked
        return best

    def is_parked(self, scope: str, tokens: Sequence[int], *, spare: bool = False) -> bool:
        """Tell whether exactly these tokens are parked; a spare copy counts if ``spare``."""
        match = self._parked.find(scope, tokens)
        if match is None or (match.spare and not spare):
            return False
        return match.common_tokens == match.n_tokens == len(tokens)

    def _own(self, request: EngineRequest, limit: int) -> tuple[KvSource, int]:
        """Return what the session's slot holds, and how much that counts."""
        slot = self._slots.of_session(request.session_id)
        if slot is None or slot.client_id != request.client_id:
            return KvSource(), 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        # A cut that the backend may refuse counts half, so that what is certain is not passed over for it.
        certain = self._can_rewind or n_tokens == len(slot.tokens)
        return KvSource(n_tokens, slot=slot), n_tokens if certain else n_tokens // 2

    def _find(self, request: EngineRequest, limit: int, replaced: Collection[str]) -> KvSource:
        match = self._parked.find(request.client_id, request.tokens)
        if match is not None and match.key in replaced:
            return KvSource()
        source = self._usable(match, limit)
        if source.match is None and not self._can_rewind and request.prefix_tokens:
            # The longest match has to be cut; the snapshot of the system prompt has not.
            prefix = request.tokens[: request.prefix_tokens]
            source = self._usable(self._parked.find(request.client_id, prefix), limit)
        return source

    def _usable(self, match: Match | None, limit: int) -> KvSource:
        if match is None:
            return KvSource()
        n_tokens = min(match.common_tokens, limit)
        return KvSource(n_tokens, match=match) if self._can_rewind or n_tokens == match.n_tokens else KvSource()

    def _shared(self, slot: Slot, request: EngineRequest, limit: int, *, least: int) -> int:
        """Return how much a neighbour spares, 0 if that is less than ``least``."""
        if least > limit or slot.tokens[least - 1 : least] != request.tokens[least - 1 : least]:
            return 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        return n_tokens if n_tokens >= least and (self._can_rewind or n_tokens == len(slot.tokens)) else 0


@dataclass(frozen=True, slots=True)
class _Following:
    """``request`` waits until ``reader`` has read ``n_tokens``, or has them parked where ``by_snapshot``."""

    request: EngineRequest
    reader: EngineRequest
    n_tokens: int
    by_snapshot: bool

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        reader = self.reader
        if self.by_snapshot:
            return not reader.snapshot or reader.slot is None
        return reader.state is not RequestState.PREFILL or reader.kv_tokens >= self.n_tokens


class PrefixWaiters:
    """Who waits for whose reading.

    Within a client any common prefix is shared, by copying it out of the reader's slot. Across clients only a public
    prefix is, as the snapshot that the reader leaves of it; so it is for models whose sequences cannot be cut.

    Args:
        can_truncate: Whether a sequence can be cut anywhere.
        grid_tokens: Waiting must spare two cells of the grid at least.
    """

    def __init__(self, *, can_truncate: bool, grid_tokens: int) -> None:
        self._can_rewind = can_truncate
        self._least_tokens = _LEAST_CELLS * grid_tokens
        self._followings: dict[str, _Following] = {}

    def __len__(self) -> int:
        return len(self._followings)

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """Those who wait, the first one first."""
        return tuple(following.request for following in self._followings.values())

    def follow(self, request: EngineRequest, running: Iterable[EngineRequest], *, cached_tokens: int) -> str | None:
        """Let a turn wait for a reader that spares it enough; return the reader's turn, or ``None`` where none does."""
        if request.follows >= _MOST_FOLLOWS or len(self) >= _MOST_FOLLOWERS:
            return None
        followings = [
            following
            for reader in running
            if reader.effective_priority <= request.effective_priority
            and (following := self._following(request, reader, least=cached_tokens + self._least_tokens)) is not None
        ]
        best = max(followings, key=lambda following: (following.n_tokens, following.reader.kv_tokens), default=None)
        if best is None:
            return None
        request.follows += 1
        self._followings[request.turn_id] = best
        return best.reader.turn_id

    def discard(self, request: EngineRequest) -> bool:
        """Forget a turn; ``False`` when it follows nobody."""
        return self._followings.pop(request.turn_id, None) is not None

    def release(self) -> list[EngineRequest]:
        """Return those who need not wait any more, and forget them."""
        over = [following.request for following in self._followings.values() if following.over]
        for request in over:
            del self._followings[request.turn_id]
        return over

    def _following(self, request: EngineRequest, reader: EngineRequest, *, least: int) -> _Following | None:
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
