"""Speculative decoding by prompt lookup: drafts are the continuation of an earlier occurrence of the last tokens.

Drafts are decoded together with the turn's last token. The turn's own sampler samples a token at the position of each;
everything after the first mismatch is truncated again. So the answer is the same as without drafts; only the number of
tokens per step differs (Saxena, Prompt Lookup Decoding, 2023).

Nothing here reads a clock: drafts, and so the shapes of what is computed, depend on the tokens alone.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from inferencecenter.engine.scheduler.state import EngineRequest


ROW_COST: Final = 0.25
"""Cost of a further row relative to a step with one row: 0.02 (a GPU) to 0.3 (two cores, short contexts)."""

_ENTRIES_A_TOKEN: Final = 4
_FEWEST_ENTRIES: Final = 1 << 10
_MOST_ENTRIES: Final = 1 << 16
_MOST_NEW_TOKENS: Final = 1024

# Lookup sizes in tokens, and the prior probability that a draft found by them is accepted.
_LIKELIHOODS: Final = ((2, 0.3), (4, 0.7))
# Weight of the prior in tries, and the decay of earlier tries per new try.
_PRIOR_TRIES: Final = 2.0
_OLD: Final = 0.8
# Just worth a single draft.
_PROBE: Final = 1.02 * ROW_COST
_FIRST_PAUSE_TOKENS: Final = 16
_LONGEST_PAUSE_TOKENS: Final = 128


def most_drafts(draft_tokens: int) -> int:
    """Return how many tokens all turns together may draft per step, if one may draft ``draft_tokens``."""
    return 2 * draft_tokens


class TokenIndex:
    """Earlier positions of the last tokens of a growing sequence.

    A table of fixed size per lookup size. An entry is the position after the latest tokens with that hash; a lookup
    compares the tokens, so that it never returns a collision.

    Args:
        sizes: Lookup sizes, ascending: if a size is not found, larger ones are not either.
        n_tokens: Maximum length of the sequence; beyond some length, older positions are overwritten.
    """

    def __init__(self, sizes: Sequence[int], n_tokens: int) -> None:
        entries = _FEWEST_ENTRIES
        while entries < min(_ENTRIES_A_TOKEN * n_tokens, _MOST_ENTRIES):
            entries *= 2
        self._mask = entries - 1
        self._tables = tuple((size, array("i", bytes(4 * entries))) for size in sizes)
        self._known = 0

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Index the added tokens, at most a millisecond's worth at once; ``False`` if more are left."""
        end = min(len(tokens), self._known + _MOST_NEW_TOKENS)
        mask = self._mask
        for size, table in self._tables:
            # The last token has no continuation yet: it is indexed with the next one.
            for position in range(max(self._known, size), end):
                table[hash(tuple(tokens[position - size : position])) & mask] = position
        self._known = end
        return end == len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens at the end were found, and the position after their last occurrence; zeros if none."""
        end, found = len(tokens), (0, 0)
        for size, table in self._tables:
            if end <= size:
                break
            last = tokens[end - size :]
            position = table[hash(tuple(last)) & self._mask]
            if not position or tokens[position - size : position] != last:
                break
            found = size, position
        return found


def continuation(tokens: Sequence[int], position: int, n_tokens: int) -> list[int]:
    """Return ``n_tokens`` from ``position`` on, repeated cyclically if it is near the end."""
    drafts = list(tokens[position : position + n_tokens])
    while len(drafts) < n_tokens:
        drafts += drafts[: n_tokens - len(drafts)]
    return drafts


@dataclass(slots=True)
class _Record:
    """Recent acceptance of drafts of one lookup size; no drafts are made before ``resumes_at`` tokens."""

    prior: float
    right: float = 0.0
    tried: float = 0.0
    pause_tokens: int = _FIRST_PAUSE_TOKENS
    resumes_at: int = 0

    @property
    def likelihood(self) -> float:
        """Probability that a draft is accepted if those before it are."""
        return (self.right + self.prior * _PRIOR_TRIES) / (self.tried + _PRIOR_TRIES)

    def add(self, *, drafted: int, accepted: int, n_tokens: int) -> None:
        """Record the outcome of some drafts; the sequence has ``n_tokens`` by now."""
        self.right = _OLD * self.right + accepted
        # After the first rejected draft nothing was tried.
        self.tried = _OLD * self.tried + accepted + (accepted < drafted)
        if accepted:
            self.pause_tokens = _FIRST_PAUSE_TOKENS
        else:
            self.resumes_at = n_tokens + self.pause_tokens
            self.pause_tokens = min(2 * self.pause_tokens, _LONGEST_PAUSE_TOKENS)


class Drafter:
    """Drafts for one turn, as long as its text repeats itself.

    While drafts are mostly rejected it offers none except an occasional single one, at growing intervals.

    Args:
        n_tokens: Maximum length of the turn's sequence.
    """

    def __init__(self, n_tokens: int) -> None:
        self._index = TokenIndex([size for size, _ in _LIKELIHOODS], n_tokens)
        self._records = {size: _Record(likelihood) for size, likelihood in _LIKELIHOODS}
        self._size = 0
        self._position = 0
        self._drafted = 0

    def look(self, tokens: Sequence[int]) -> float:
        """Return the probability that the first draft for the current tokens is accepted; 0 for no draft."""
        self._drafted = 0
        if not self._index.catch_up(tokens):
            return 0.0
        self._size, self._position = self._index.find(tokens)
        if not self._size:
            return 0.0
        record = self._records[self._size]
        likelihood = record.likelihood
        if likelihood > ROW_COST:
            return likelihood
        return _PROBE if len(tokens) >= record.resumes_at else 0.0

    def draft(self, tokens: Sequence[int], n_tokens: int) -> list[int]:
        """Return drafts for the tokens of the last ``look``."""
        self._drafted = n_tokens
        return continuation(tokens, self._position, n_tokens)

    def observe(self, accepted: int, *, n_tokens: int) -> None:
        """Record that the first ``accepted`` of the last drafts were accepted; the turn has ``n_tokens`` by now."""
        if self._drafted:
            self._records[self._size].add(drafted=self._drafted, accepted=accepted, n_tokens=n_tokens)
            self._drafted = 0


def allot(chances: Sequence[float], *, each: int, together: int) -> list[int]:
    """Return the number of tokens each turn of a step drafts, so that the step yields most tokens per time.

    All drafting turns draft the same number: llama.cpp computes rows of different lengths, and slots that are not
    consecutive, separately. A step yields a token per turn plus the accepted drafts; it costs the rows of each
    computation.

    Args:
        chances: Probability that a turn's draft is accepted if those before it are, by slot; 0 for none.
        each: Most drafts of one turn.
        together: Most drafts of all turns.
    """
    wanting = [index for index, chance in enumerate(chances) if chance > ROW_COST]
    lengths = [0] * len(chances)
    if not wanting:
        return lengths
    alone_s = _cost(len(chances))
    runs = [1]
    for before, index in pairwise(wanting):
        if index == before + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    most, best = 0, len(chances) / alone_s
    gained, right = 0.0, [1.0] * len(wanting)
    for n_tokens in range(1, min(each, together // len(wanting)) + 1):
        right = [share * chances[index] for share, index in zip(right, wanting, strict=True)]
        gained += sum(right)
        if len(wanting) == len(chances):
            cost_s = _cost(len(chances) * (1 + n_tokens))
        else:
            cost_s = alone_s + sum(_cost(run * n_tokens) for run in runs)
        if (len(chances) + gained) / cost_s > best:
            most, best = n_tokens, (len(chances) + gained) / cost_s
    for index in wanting:
        lengths[index] = most
    return lengths


def _cost(rows: int) -> float:
    """Return the cost of a computation of ``rows`` rows, in units of one with a single row."""
    return 1 + ROW_COST * (rows - 1)


class DraftPlanner:
    """Drafts for the turns of a step, as far as the pass has room.

    Args:
        draft_tokens: Most drafts of one turn; 0 to disable drafting.
        n_ctx: Tokens that fit one slot.
        pass_tokens: Most tokens that the backend decodes without splitting the pass.
    """

    def __init__(self, *, draft_tokens: int, n_ctx: int, pass_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._n_ctx = n_ctx
        self._pass_tokens = pass_tokens

    def drafts(self, decoding: Collection[EngineRequest]) -> Mapping[str, list[int]]:
        """Return the drafts of turns that decode one token each, by id."""
        if not self._draft_tokens:
            return {}
        looked = [(self._look(request), request) for request in decoding]
        if not any(chance for chance, _ in looked):
            return {}
        looked.sort(key=lambda each: -1 if each[1].slot is None else each[1].slot)
        lengths = allot(
            [chance for chance, _ in looked],
            each=self._draft_tokens,
            together=min(most_drafts(self._draft_tokens), self._pass_tokens - len(looked)),
        )
        drafts: dict[str, list[int]] = {}
        for length, (_, request) in zip(lengths, looked, strict=True):
            # The last token of a full context is sampled, not decoded.
            n_tokens = min(length, self._n_ctx - 1 - len(request.tokens))
            if n_tokens > 0 and request.drafter is not None:
                drafts[request.turn_id] = request.drafter.draft(request.tokens, n_tokens)
        return drafts

    def _look(self, request: EngineRequest) -> float:
        if request.drafter is None:
            request.drafter = Drafter(self._n_ctx)
        return request.drafter.look(request.tokens)
