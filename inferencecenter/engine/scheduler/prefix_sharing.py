"""Finds existing KV for a turn's prefix: in its own slot, another slot, a parked sequence, a running prefill."""

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
# A reader can lose its slot or its snapshot more often than a waiting turn should have to wait for it.
_MOST_FOLLOWS: Final = 2
_MOST_FOLLOWERS: Final = 64


def common_prefix_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Compares slices, in C, each twice as long as the one before, and bisects the first that differs: the cost is
    proportional to the common part, about a millisecond for 100k tokens and almost nothing where the first tokens
    differ.
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
    """A parked sequence of ``n_tokens`` (``tokens``, packed) that shares ``common_tokens`` with the wanted ones.

    ``ready``: in RAM, usable now; otherwise on disk, to be loaded first. ``load_failed``: loading was tried while RAM
    had no room. ``spare``: a copy of a slot's content, evicted first.
    """

    key: str
    common_tokens: int
    n_tokens: int
    ready: bool
    tokens: bytes
    spare: bool = False
    load_failed: bool = False


class ParkedKv(Protocol):
    """Lookup of parked sequences, as the scheduler needs it."""

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and of the public scope ``""``, or ``None``.

        The best has the longest common prefix; among equal ones the shortest entry, which need not be cut.
        """

    def fits(self, n_tokens: int) -> bool:
        """Return whether a sequence of ``n_tokens`` could be parked at all."""

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Return whether a spare copy of ``n_tokens`` fits now in place of ``key``, evicting no other entry."""


def prefix_key(scope: str, tokens: Sequence[int]) -> str:
    """Return the key of a shared prefix's KV; equal for equal ``scope`` and ``tokens``."""
    digest = sha256(scope.encode() + b"\0" + array("i", tokens).tobytes())
    return _PREFIX_KEY + digest.hexdigest()


def is_prefix_key(key: str) -> bool:
    """Return whether a key is that of a shared prefix, not of a session."""
    return key.startswith(_PREFIX_KEY)


@dataclass(frozen=True, slots=True)
class KvSource:
    """The first ``n_tokens`` of a turn are in ``slot`` or parked as ``match``; with neither, there is no KV."""

    n_tokens: int = 0
    slot: Slot | None = None
    match: Match | None = None


class KvSourceFinder:
    """Finds the longest prefix of a turn's tokens that need not be prefilled.

    Considers only KV of the turn's client, and public prefixes, which the store finds in their own scope.

    Args:
        slots: Content of the slots.
        parked: The store of parked KV.
        can_truncate: Whether a sequence can be cut at any position. Otherwise one that must be cut is unusable.
        grid_tokens: A source must save this many tokens more than another to be worth a move.
    """

    def __init__(self, slots: SlotTable, parked: ParkedKv, *, can_truncate: bool, grid_tokens: int) -> None:
        self._slots = slots
        self._parked = parked
        self._can_truncate = can_truncate
        self._grid_tokens = grid_tokens

    def best(
        self, request: EngineRequest, *, unsettled: Collection[Slot], replaced: Collection[str], fetch: bool
    ) -> KvSource:
        """Return the source of a turn's KV.

        A gain of less than a grid cell is not worth a move, except for a preempted turn, which resumes at its exact
        position. The last token is always decoded: its logits are what sampling starts from.

        Args:
            request: The turn.
            unsettled: Slots whose content is uncertain until the plan has run.
            replaced: Keys whose entries the plan overwrites.
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
        """Return whether exactly these tokens are parked; a spare copy counts if ``spare``."""
        match = self._parked.find(scope, tokens)
        if match is None or (match.spare and not spare):
            return False
        return match.common_tokens == match.n_tokens == len(tokens)

    def _own(self, request: EngineRequest, limit: int) -> tuple[KvSource, int]:
        """Return the session's slot as a source, and the tokens it counts for."""
        slot = self._slots.of_session(request.session_id)
        if slot is None or slot.client_id != request.client_id:
            return KvSource(), 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        # A cut that the backend may refuse counts half, so that a certain source is preferred to it.
        certain = self._can_truncate or n_tokens == len(slot.tokens)
        return KvSource(n_tokens, slot=slot), n_tokens if certain else n_tokens // 2

    def _find(self, request: EngineRequest, limit: int, replaced: Collection[str]) -> KvSource:
        match = self._parked.find(request.client_id, request.tokens)
        if match is not None and match.key in replaced:
            return KvSource()
        source = self._usable(match, limit)
        if source.match is None and not self._can_truncate and request.prefix_tokens:
            # The longest match would have to be cut; the snapshot of the system prompt would not.
            prefix = request.tokens[: request.prefix_tokens]
            source = self._usable(self._parked.find(request.client_id, prefix), limit)
        return source

    def _usable(self, match: Match | None, limit: int) -> KvSource:
        if match is None:
            return KvSource()
        n_tokens = min(match.common_tokens, limit)
        return KvSource(n_tokens, match=match) if self._can_truncate or n_tokens == match.n_tokens else KvSource()

    def _shared(self, slot: Slot, request: EngineRequest, limit: int, *, least: int) -> int:
        """Return the tokens another session's slot saves, 0 if fewer than ``least``."""
        if least > limit or slot.tokens[least - 1 : least] != request.tokens[least - 1 : least]:
            return 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        return n_tokens if n_tokens >= least and (self._can_truncate or n_tokens == len(slot.tokens)) else 0


@dataclass(frozen=True, slots=True)
class _Following:
    """``request`` waits until ``reader`` has prefilled ``n_tokens`` or, with ``by_snapshot``, parked them."""

    request: EngineRequest
    reader: EngineRequest
    n_tokens: int
    by_snapshot: bool

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        reader = self.reader
        if self.by_snapshot:
            return not reader.snapshot or reader.slot is None
        return reader.state is not RequestState.PREFILL or reader.kv_tokens >= self.n_tokens


class PrefixWaiters:
    """Turns that wait for another turn to prefill a prefix they share.

    Within a client any common prefix is shared, by copying it out of the reader's slot. Across clients only a public
    prefix is, as the snapshot that the reader leaves of it; the same holds for models whose sequences cannot be cut.

    Args:
        can_truncate: Whether a sequence can be cut at any position.
        grid_tokens: Waiting must save at least two cells of the grid.
    """

    def __init__(self, *, can_truncate: bool, grid_tokens: int) -> None:
        self._can_truncate = can_truncate
        self._least_tokens = _LEAST_CELLS * grid_tokens
        self._followings: dict[str, _Following] = {}

    def __len__(self) -> int:
        return len(self._followings)

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """The waiting turns, oldest first."""
        return tuple(following.request for following in self._followings.values())

    def follow(self, request: EngineRequest, running: Iterable[EngineRequest], *, cached_tokens: int) -> str | None:
        """Let a turn wait for a reader that saves it enough; return the reader's turn id, or ``None``."""
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
        """Remove a turn; ``False`` when it does not wait here."""
        return self._followings.pop(request.turn_id, None) is not None

    def release(self) -> list[EngineRequest]:
        """Remove and return the turns with nothing left to wait for."""
        over = [following.request for following in self._followings.values() if following.over]
        for request in over:
            del self._followings[request.turn_id]
        return over

    def _following(self, request: EngineRequest, reader: EngineRequest, *, least: int) -> _Following | None:
        """Return what waiting for a reader would give, ``None`` if it saves less than ``least`` tokens."""
        own = request.client_id == reader.client_id
        if reader.state is RequestState.PREFILL and own and self._can_truncate:
            n_tokens = _common(request.tokens[:-1], reader.tokens, least)
            by_snapshot = False
        elif reader.snapshot and (own or (request.public and reader.public)):
            shared = (
                request.tokens[:-1] if own else request.tokens[: min(request.prefix_tokens, request.prompt_tokens - 1)]
            )
            n_tokens = _common(shared, reader.tokens[: reader.cut_tokens], least)
            by_snapshot = True
            if n_tokens < reader.cut_tokens and not self._can_truncate:
                return None
        else:
            return None
        if n_tokens < least or reader.kv_tokens >= n_tokens:
            return None
        return _Following(request, reader, n_tokens, by_snapshot=by_snapshot)


def _common(a: list[int], b: list[int], least: int) -> int:
    """Return the length of the common prefix, 0 when it is less than ``least``."""
    return common_prefix_tokens(a, b) if a[least - 1 : least] == b[least - 1 : least] else 0
