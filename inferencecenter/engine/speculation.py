"""Prompt lookup: what a turn says next is guessed from where it, or its prompt, said the like before.

The guesses, its drafts, are decoded together with the turn's last token. The turn's own sampler chooses a token in the
place of each, and what follows the first draft that is another one is cut off again. So the answer is the one that
would have been given without them; only how many tokens a step gives is another (Saxena, Prompt Lookup Decoding, 2023).

Nothing here reads a clock: what is drafted follows from the tokens alone, and so does the shape of what is computed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.scheduler.request import EngineRequest
    from inferencecenter.ipc.messages import EngineOptions


ROW_COST: Final = 0.25
"""What a row adds to a step with one row, as a share of it: 0.02 (a GPU) to 0.3 (two cores, short contexts)."""

_ENTRIES_A_TOKEN: Final = 4
_FEWEST_ENTRIES: Final = 1 << 10
_MOST_ENTRIES: Final = 1 << 16
_MOST_NEW_TOKENS: Final = 1024

# How many tokens are looked up, and how likely a draft found by them is right before any was tried.
_LIKELIHOODS: Final = ((2, 0.3), (4, 0.7))
# So many tries is that worth, and what was tried earlier counts less with each new try.
_PRIOR_TRIES: Final = 2.0
_OLD: Final = 0.8
# Just worth a single draft.
_PROBE: Final = 1.02 * ROW_COST
_FIRST_PAUSE_TOKENS: Final = 16
_LONGEST_PAUSE_TOKENS: Final = 128


def draft_tokens(options: EngineOptions, backend: Backend, *, on_log: Callable[[str, str], None]) -> int:
    """Return how many tokens a turn may draft in a step; 0 where it is not wanted, or the model cannot go back."""
    if options.speculative != "lookup":
        return 0
    if not backend.can_truncate:
        on_log("warning", "nothing is drafted: this model's memory cannot be cut where a draft turns out wrong")
        return 0
    return options.draft_tokens


def most_drafts(draft_tokens: int) -> int:
    """Return how many tokens all turns together may draft in a step, of which one may draft ``draft_tokens``."""
    return 2 * draft_tokens


class TokenIndex:
    """Where the last tokens of a growing sequence stood before.

    A table of fixed size for each number of tokens that is looked up. An entry is the position behind the latest such
    tokens that fell on it; a look-up compares them, so that it never takes others for them.

    Args:
        sizes: How many tokens are looked up, the fewest first: where these are not found, more of them are not either.
        n_tokens: How long the sequence may become; beyond some length of it, older places are forgotten.
    """

    def __init__(self, sizes: Sequence[int], n_tokens: int) -> None:
        entries = _FEWEST_ENTRIES
        while entries < min(_ENTRIES_A_TOKEN * n_tokens, _MOST_ENTRIES):
            entries *= 2
        self._mask = entries - 1
        self._tables = tuple((size, array("i", bytes(4 * entries))) for size in sizes)
        self._known = 0

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Take in what the sequence has grown by, so much at once as takes a millisecond; ``False`` if more is left."""
        end = min(len(tokens), self._known + _MOST_NEW_TOKENS)
        mask = self._mask
        for size, table in self._tables:
            # What ends with the last token has no continuation yet: it is taken in with the next one.
            for position in range(max(self._known, size), end):
                table[hash(tuple(tokens[position - size : position])) & mask] = position
        self._known = end
        return end == len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens at the end were found, and where they went on the last time; zeros for nowhere."""
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
    """Return how a sequence goes on if it does as it did at ``position``, over and over where that is near its end."""
    drafts = list(tokens[position : position + n_tokens])
    while len(drafts) < n_tokens:
        drafts += drafts[: n_tokens - len(drafts)]
    return drafts


@dataclass(slots=True)
class _Record:
    """How drafts fared that were found in one way, lately; none is to be made before ``resumes_at`` tokens."""

    prior: float
    right: float = 0.0
    tried: float = 0.0
    pause_tokens: int = _FIRST_PAUSE_TOKENS
    resumes_at: int = 0

    @property
    def likelihood(self) -> float:
        """How likely a draft is right if those before it are."""
        return (self.right + self.prior * _PRIOR_TRIES) / (self.tried + _PRIOR_TRIES)

    def add(self, *, drafted: int, accepted: int, n_tokens: int) -> None:
        """Take in what became of some drafts; the sequence has ``n_tokens`` by now."""
        self.right = _OLD * self.right + accepted
        # Behind the first wrong one nothing was tried.
        self.tried = _OLD * self.tried + accepted + (accepted < drafted)
        if accepted:
            self.pause_tokens = _FIRST_PAUSE_TOKENS
        else:
            self.resumes_at = n_tokens + self.pause_tokens
            self.pause_tokens = min(2 * self.pause_tokens, _LONGEST_PAUSE_TOKENS)


class Drafter:
    """Drafts for one turn, as long as its text repeats itself.

    Where drafts are mostly wrong it offers none, but for a single one now and then, the more seldom the longer.

    Args:
        n_tokens: How long the turn's sequence may become.
    """

    def __init__(self, n_tokens: int) -> None:
        self._index = TokenIndex([size for size, _ in _LIKELIHOODS], n_tokens)
        self._records = {size: _Record(likelihood) for size, likelihood in _LIKELIHOODS}
        self._size = 0
        self._position = 0
        self._drafted = 0

    def look(self, tokens: Sequence[int]) -> float:
        """Return how likely the first draft for what the turn holds now is right; 0 for none to be had."""
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
        """Return the first drafts for what was looked at last."""
        self._drafted = n_tokens
        return continuation(tokens, self._position, n_tokens)

    def observe(self, accepted: int, *, n_tokens: int) -> None:
        """Learn that of the drafts made last the first ``accepted`` were right; the turn has ``n_tokens`` by now."""
        if self._drafted:
            self._records[self._size].add(drafted=self._drafted, accepted=accepted, n_tokens=n_tokens)
            self._drafted = 0


def allot(chances: Sequence[float], *, each: int, together: int) -> list[int]:
    """Return how many tokens each of the turns that a step decodes drafts, so that the step gives most for its time.

    All that draft do so alike: llama.cpp computes what differs in length apart, and what does not lie together. What a
    step gives is a token for each turn and the drafts that are right, what it costs the rows of each computation.

    Args:
        chances: How likely a turn's draft is right if those before it are, by slot; 0 for a turn that has none.
        each: Most drafts of one turn.
        together: Most drafts of all.
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
    """Return what a computation of so many rows costs, in units of one with a single row."""
    return 1 + ROW_COST * (rows - 1)


class DraftPlanner:
    """Drafts for the turns of a step, as far as it has room.

    Args:
        draft_tokens: Most drafts of one turn; 0 for none at all.
        n_ctx: Tokens that fit one slot.
        pass_tokens: Most tokens that the backend decodes without cutting them again.
    """

    def __init__(self, *, draft_tokens: int, n_ctx: int, pass_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._n_ctx = n_ctx
        self._pass_tokens = pass_tokens

    def drafts(self, decoding: Collection[EngineRequest]) -> Mapping[str, list[int]]:
        """Return what is drafted for turns that decode one token each, by id."""
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
