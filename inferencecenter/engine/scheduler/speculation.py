"""Speculative decoding: drafts come from earlier occurrences of the last tokens (prompt lookup) or a small model.

Drafts are decoded together with the turn's last token. The turn's own sampler samples a token at the position of each;
everything after the first mismatch is truncated again. So the answer is the same as without drafts; only the number of
tokens per step differs (Saxena, Prompt Lookup Decoding, 2023).

Nothing here reads a clock. The cost of drafts is learned from the durations of steps (``DecodeCosts``).
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.backend import DraftRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from inferencecenter.engine.scheduler.state import EngineRequest


ROW_COST: Final = 0.25
"""Assumed cost of a further row relative to a step with one row: 0.02 (a GPU) to 3 (a small model of many tokens)."""

_ENTRIES_A_TOKEN: Final = 4
_FEWEST_ENTRIES: Final = 1 << 10
_MOST_ENTRIES: Final = 1 << 16
_MOST_NEW_TOKENS: Final = 1024

# Lookup sizes in tokens, and the prior probability that a draft found by them is accepted.
_LIKELIHOODS: Final = ((2, 0.3), (4, 0.7))
_MODEL_LIKELIHOOD: Final = 0.7
# Weight of the prior in tries, and the decay of earlier tries per new try.
_PRIOR_TRIES: Final = 2.0
_OLD: Final = 0.8
# A draft model is about as good in all of a text, so that more of it counts.
_OLD_OF_MODEL: Final = 0.9
# The acceptance at which a single draft is just worth its cost.
_PROBE: Final = 1.02
_FIRST_PAUSE_TOKENS: Final = 16
# Steps of which the median counts as a cost, the bounds of a cost, and how much of an excess a step without drafts
# forgets.
_COST_STEPS: Final = 5
_LEAST_COST: Final = 0.01
_MOST_COST: Final = 4.0
_COST_FORGOTTEN: Final = 0.005
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


class _RecentMedian:
    """Median of the last values; ``assumed`` stands for the first ones, so that one outlier never counts alone."""

    def __init__(self, assumed: float | None = None) -> None:
        self._values = deque([] if assumed is None else [assumed] * (_COST_STEPS // 2), _COST_STEPS)

    def add(self, value: float) -> float:
        """Add a value and return the median, the lower one of two."""
        self._values.append(value)
        return sorted(self._values)[(len(self._values) - 1) // 2]


class DecodeCosts:
    """What a draft costs a lone turn, in units of a decode of one row: ``row`` to verify it, ``draft`` to make it.

    Learned from the last steps of one turn, as a median: a step takes several times as long if another program has the
    processor meanwhile. More turns have the assumed cost of a row, which is above what it takes there. A cost above the
    assumed one is slowly forgotten while nothing is drafted, so that it is measured again.

    Args:
        draft: Assumed cost of a decode of the draft model.
    """

    def __init__(self, draft: float = 0.0) -> None:
        self.row = ROW_COST
        self.draft = draft
        self._assumed = (ROW_COST, draft)
        self._plain_s = 0.0
        self._plain = _RecentMedian()
        self._rows = _RecentMedian(ROW_COST)
        self._drafts = _RecentMedian(draft)

    def row_of(self, n_turns: int) -> float:
        """Return the cost of a further row in a step of ``n_turns``."""
        return self.row if n_turns == 1 else ROW_COST

    def observe(self, *, n_drafts: int, decode_s: float, draft_s: float) -> None:
        """Learn from a step of a lone turn; making its ``n_drafts`` took ``draft_s`` of ``decode_s``."""
        model_s = decode_s - draft_s
        if not n_drafts:
            self._plain_s = self._plain.add(model_s)
            row, draft = self._assumed
            self.row -= _COST_FORGOTTEN * max(0.0, self.row - row)
            self.draft -= _COST_FORGOTTEN * max(0.0, self.draft - draft)
        elif self._plain_s > 0:
            row = (model_s / self._plain_s - 1) / n_drafts
            self.row = self._rows.add(min(max(row, _LEAST_COST), _MOST_COST))
            if draft_s:
                self.draft = self._drafts.add(min(draft_s / n_drafts / self._plain_s, _MOST_COST))


@dataclass(slots=True)
class _Record:
    """Recent acceptance of drafts of one kind."""

    prior: float
    old: float = _OLD
    right: float = 0.0
    tried: float = 0.0
    pause_tokens: int = _FIRST_PAUSE_TOKENS
    resumes_at: int = 0

    @property
    def likelihood(self) -> float:
        """Probability that a draft is accepted if those before it are."""
        return (self.right + self.prior * _PRIOR_TRIES) / (self.tried + _PRIOR_TRIES)

    def chance(self, n_tokens: int, cost: float) -> float:
        """Return the likelihood for a sequence of ``n_tokens`` if a draft of ``cost`` is worth it, else 0.

        From ``resumes_at`` tokens on it is the likelihood at which a single draft is just worth its cost.
        """
        if self.likelihood > cost:
            return self.likelihood
        probes = n_tokens >= self.resumes_at and _PROBE * cost < 1
        return _PROBE * cost if probes else 0.0

    def add(self, *, drafted: int, accepted: int, n_tokens: int) -> None:
        """Record the outcome of some drafts; the sequence has ``n_tokens`` by now."""
        self.right = self.old * self.right + accepted
        # After the first rejected draft nothing was tried.
        self.tried = self.old * self.tried + accepted + (accepted < drafted)
        if accepted:
            self.pause_tokens = _FIRST_PAUSE_TOKENS
        else:
            self.pause(n_tokens)

    def pause(self, n_tokens: int) -> None:
        """Try no draft for some time, and for twice as long the next time."""
        self.resumes_at = n_tokens + self.pause_tokens
        self.pause_tokens = min(2 * self.pause_tokens, _LONGEST_PAUSE_TOKENS)


class ModelOdds:
    """Recent acceptance of a draft model's tokens in all turns, the initial estimate for a new turn."""

    def __init__(self) -> None:
        self._record = _Record(_MODEL_LIKELIHOOD, _OLD_OF_MODEL)

    def new_record(self, n_tokens: int, cost: float) -> _Record:
        """Return the record of a turn of ``n_tokens``; where drafts were rejected too often it begins with a pause."""
        record = _Record(self._record.likelihood, self._record.old)
        if record.likelihood <= cost:
            record.pause(n_tokens)
        return record

    def add(self, *, drafted: int, accepted: int) -> None:
        """Record the outcome of some drafts of a turn."""
        self._record.add(drafted=drafted, accepted=accepted, n_tokens=0)


class Drafter:
    """Drafts for one turn: from its own text where that repeats itself, else from the draft model.

    While drafts of a kind are mostly rejected it offers none except an occasional single one, at growing intervals.

    Args:
        n_tokens: Maximum length of the turn's sequence.
        costs: What drafts cost.
        lookup: Whether to draft from the turn's text.
        odds: Those of the draft model, if there is one.
    """

    def __init__(
        self, n_tokens: int, *, costs: DecodeCosts, lookup: bool = True, odds: ModelOdds | None = None
    ) -> None:
        self._costs = costs
        self._index = TokenIndex([size for size, _ in _LIKELIHOODS], n_tokens) if lookup else None
        self._records = {size: _Record(likelihood) for size, likelihood in _LIKELIHOODS}
        self._odds = odds
        self._of_model: _Record | None = None
        self._size = 0
        self._position = 0
        self._drafted = 0
        self._model_cost = 0.0
        self.by_model = False

    def look(self, tokens: Sequence[int], *, n_turns: int) -> float:
        """Return the probability that the first draft for the current tokens is accepted; 0 for no draft.

        ``by_model`` tells whether the draft model should make it, which it should if the gain exceeds the cost.
        ``n_turns`` decode in the step.
        """
        self._drafted = 0
        cost = self._costs.row_of(n_turns)
        chance, self.by_model = self._look_back(tokens, cost), False
        if self._odds is not None:
            self._model_cost = cost + self._costs.draft
            if self._of_model is None:
                self._of_model = self._odds.new_record(len(tokens), self._model_cost)
            of_model = self._of_model.chance(len(tokens), self._model_cost)
            self.by_model = of_model > chance + self._costs.draft
            chance = of_model if self.by_model else chance
        return chance

    def draft(self, tokens: Sequence[int], n_tokens: int) -> list[int]:
        """Return drafts from the text for the tokens of the last ``look``."""
        self._drafted = n_tokens
        return continuation(tokens, self._position, n_tokens)

    def request(self, tokens: Sequence[int], n_tokens: int, *, slot: int, client_id: str) -> DraftRequest:
        """Return the request to the draft model for the tokens of the last ``look``."""
        self._drafted = n_tokens
        return DraftRequest(slot, tokens, n_tokens, client_id)

    def observe(self, accepted: int, *, n_tokens: int) -> None:
        """Record that the first ``accepted`` of the last drafts were accepted; the turn has ``n_tokens`` by now."""
        if not self._drafted:
            return
        if self.by_model:
            assert self._of_model is not None
            assert self._odds is not None
            self._of_model.add(drafted=self._drafted, accepted=accepted, n_tokens=n_tokens)
            if accepted and self._of_model.likelihood <= self._model_cost:
                # Still rare: unlike a draft from the text, a probe may cost most of its gain.
                self._of_model.pause(n_tokens)
            self._odds.add(drafted=self._drafted, accepted=accepted)
        else:
            self._records[self._size].add(drafted=self._drafted, accepted=accepted, n_tokens=n_tokens)
        self._drafted = 0

    def _look_back(self, tokens: Sequence[int], cost: float) -> float:
        if self._index is None or not self._index.catch_up(tokens):
            return 0.0
        self._size, self._position = self._index.find(tokens)
        return self._records[self._size].chance(len(tokens), cost) if self._size else 0.0


def allot(
    chances: Sequence[float],
    *,
    each: int,
    together: int,
    costs: DecodeCosts,
    by_model: Collection[int] = (),
) -> list[int]:
    """Return the number of tokens each turn of a step drafts, so that the step yields most tokens per time.

    All drafting turns draft the same number: llama.cpp computes rows of different lengths, and slots that are not
    consecutive, separately. A step yields a token per turn plus the accepted drafts; it costs the rows of each
    computation, and a decode of the draft model for each of its drafts, which all its turns share. If that exceeds the
    gain, only turns that need no model draft.

    Args:
        chances: Probability that a turn's draft is accepted if those before it are, by slot; 0 for none.
        each: Most drafts of one turn.
        together: Most drafts of all turns.
        costs: What drafts cost.
        by_model: Turns whose drafts the draft model makes.
    """
    row_cost = costs.row_of(len(chances))
    worthwhile = [index for index, chance in enumerate(chances) if chance > row_cost]
    free = [index for index in worthwhile if index not in by_model]
    lengths = [0] * len(chances)
    best = len(chances) / _cost(len(chances), row_cost)
    for drafting in (free, worthwhile) if len(free) < len(worthwhile) else (free,):
        if not drafting:
            continue
        n_modelled = len(drafting) - len(free)
        pass_s = costs.draft * _cost(n_modelled, row_cost) if n_modelled else 0.0
        gains = _gains([chances[index] for index in drafting], most=min(each, together // len(drafting)))
        for n_tokens, gained in enumerate(gains, start=1):
            cost_s = _step_cost(drafting, n_tokens, len(chances), row_cost) + n_tokens * pass_s
            if (len(chances) + gained) / cost_s > best:
                best = (len(chances) + gained) / cost_s
                lengths = [n_tokens if index in drafting else 0 for index in range(len(chances))]
    return lengths


def _gains(chances: Sequence[float], *, most: int) -> Iterator[float]:
    """Yield the expected number of accepted drafts with 1, 2, … ``most`` a turn."""
    gained, right = 0.0, [1.0] * len(chances)
    for _ in range(most):
        right = [share * chance for share, chance in zip(right, chances, strict=True)]
        gained += sum(right)
        yield gained


def _step_cost(drafting: Sequence[int], n_tokens: int, n_turns: int, row_cost: float) -> float:
    """Return the cost of a step in which some of its turns draft ``n_tokens`` each."""
    if len(drafting) == n_turns:
        return _cost(n_turns * (1 + n_tokens), row_cost)
    runs = [1]
    for before, index in pairwise(drafting):
        if index == before + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    return _cost(n_turns, row_cost) + sum(_cost(run * n_tokens, row_cost) for run in runs)


def _cost(rows: int, row_cost: float) -> float:
    """Return the cost of a computation of ``rows`` rows, in units of one with a single row."""
    return 1 + row_cost * (rows - 1)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a step by turn id: ``tokens`` from texts, and ``requests`` to the draft model."""

    tokens: Mapping[str, list[int]] = field(default_factory=dict)
    requests: Mapping[str, DraftRequest] = field(default_factory=dict)


class DraftPlanner:
    """Drafts for the turns of a step, as far as the pass has room.

    Args:
        draft_tokens: Most drafts of one turn; 0 to disable drafting.
        n_ctx: Tokens that fit one slot.
        pass_tokens: Most tokens that the backend decodes without splitting the pass.
        lookup: Whether turns draft from their own text.
        draft_cost: Cost of a decode of the draft model, in units of one of the model; ``None`` without a draft model.
    """

    def __init__(
        self,
        *,
        draft_tokens: int,
        n_ctx: int,
        pass_tokens: int,
        lookup: bool = True,
        draft_cost: float | None = None,
    ) -> None:
        self._draft_tokens = draft_tokens
        self._lookup = lookup
        self._costs = DecodeCosts(draft_cost or 0.0)
        # A draft brings one token at most: a draft model that costs more is of no use.
        self._odds = None if draft_cost is None or ROW_COST + draft_cost >= 1 else ModelOdds()
        self._n_ctx = n_ctx
        self._pass_tokens = pass_tokens

    def drafts(self, decoding: Collection[EngineRequest]) -> Drafts:
        """Return the drafts of turns that decode one token each."""
        if not self._draft_tokens:
            return Drafts()
        looked = [(self._look(request, n_turns=len(decoding)), request) for request in decoding]
        if not any(chance for chance, _ in looked):
            return Drafts()
        looked.sort(key=lambda each: -1 if each[1].slot is None else each[1].slot)
        lengths = allot(
            [chance for chance, _ in looked],
            each=self._draft_tokens,
            together=min(most_drafts(self._draft_tokens), self._pass_tokens - len(looked)),
            costs=self._costs,
            by_model=[index for index, (_, each) in enumerate(looked) if each.drafter and each.drafter.by_model],
        )
        tokens: dict[str, list[int]] = {}
        requests: dict[str, DraftRequest] = {}
        for length, (_, request) in zip(lengths, looked, strict=True):
            # The last token of a full context is sampled, not decoded.
            n_tokens = min(length, self._n_ctx - 1 - len(request.tokens))
            drafter, slot = request.drafter, request.slot
            if n_tokens <= 0 or drafter is None or slot is None:
                continue
            if drafter.by_model:
                requests[request.turn_id] = drafter.request(
                    request.tokens, n_tokens, slot=slot, client_id=request.client_id
                )
            else:
                tokens[request.turn_id] = drafter.draft(request.tokens, n_tokens)
        return Drafts(tokens, requests)

    def observe(self, *, n_turns: int, n_drafts: int, decode_s: float, draft_s: float) -> None:
        """Learn what drafts cost from a step in which ``n_turns`` decoded with ``n_drafts`` in ``decode_s``.

        The draft model took ``draft_s`` of it.
        """
        if self._draft_tokens and n_turns == 1 and decode_s > 0:
            self._costs.observe(n_drafts=n_drafts, decode_s=decode_s, draft_s=draft_s)

    def _look(self, request: EngineRequest, *, n_turns: int) -> float:
        if request.spans:
            return 0.0  # neither a lookup nor the draft model knows what the rows of an image mean
        if request.drafter is None:
            request.drafter = Drafter(self._n_ctx, costs=self._costs, lookup=self._lookup, odds=self._odds)
        return request.drafter.look(request.tokens, n_turns=n_turns)
