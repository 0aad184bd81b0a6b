"""A turn's sampler chain in llama.cpp, built from the plan of ``engine.sampling.chain``.

llama.cpp's samplers that draw (``dist``, ``xtc``) consume one sequence of random numbers whose position cannot be set:
some tokens take a number and some do not. A turn that resumes in another engine would draw different numbers from there
on. So before each token these samplers are recreated with a seed derived from the turn's seed and the token's position
in its answer; the part of the chain after the first of them is removed and added again, which takes 20 µs. Mirostat and
adaptive-p keep their learned state, and are seeded once, with the position at which they begin.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Sampled
from inferencecenter.engine.sampling import chain as plan
from inferencecenter.ipc.messages import SampledLogprobs, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from inferencecenter.engine.sampling.chain import SamplerSpec
    from inferencecenter.engine.sampling.constraint import Constraint

# ``llama_token_data`` of llama.h.
_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MOST_ROWS: Final = 256
_LEAST_ROWS: Final = 16
"""With fewer there are so many columns that finding their largest maxima takes as long as finding the logits."""
_COLUMNS_PER_KEPT: Final = 4
"""With fewer columns many share one with another of the likeliest, and more than twice as many are selected."""
_LEAST_VOCAB: Final = 16384
_LEAST_SHARE: Final = 1e-30
"""Relative to the likeliest token's probability: less is never drawn, and underflows to 0."""


class Candidates:
    """A buffer for the candidate tokens of one turn's steps.

    A chain that begins by keeping the k likeliest tokens gets few others: those whose logit is at least the k-th
    largest maximum of a column, if the logits are written as the rows of a matrix. At least k logits are, and finding
    them takes one pass without a sort: for 152,000 tokens a step of the chain takes 0.13 ms instead of 0.46 ms.

    Where all tokens are needed and few of them are excluded, as within a text, all stay and the excluded ones get a
    logit of minus infinity, as in llama.cpp's own constrained sampling: 0.2 ms instead of 0.6 ms to select the others.

    Args:
        n_vocab: Tokens in the vocabulary.
        n_kept: How many of the likeliest tokens are needed; 0 stands for all.
        biased: Tokens that are needed in any case.
    """

    def __init__(self, n_vocab: int, *, n_kept: int = 0, biased: Sequence[int] = ()) -> None:
        entries = np.zeros(n_vocab, dtype=_ENTRY)
        self._ids, self._logits, self._shares = entries["id"], entries["logit"], entries["p"]
        self._data = entries.ctypes.data_as(lib.llama_token_data_p)
        self._mask = np.empty(n_vocab if n_kept else 0, dtype=np.bool_)
        self._n_kept = n_kept
        self._biased = np.array(biased, dtype=np.intp)

    def fill(
        self, logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None = None
    ) -> lib.llama_token_data_array:
        """Return the ``allowed`` tokens that are needed, at least one, in order with their logits.

        The array is valid until the next call; the chain may modify it.
        """
        selected = self._selected(logits, allowed)
        if selected is not None:
            size = len(selected)
            self._ids[:size] = selected
            self._logits[:size] = logits[selected]
        else:
            size = len(logits)
            self._ids[:] = _all_ids(size)
            self._logits[:] = logits
            if allowed is not None:
                self._logits[np.flatnonzero(~allowed)] = -np.inf
        self._shares[:size] = 0
        return lib.llama_token_data_array(data=self._data, size=size, selected=-1, sorted=False)

    def _selected(
        self, logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.intp] | None:
        """Return the ids of a selection that is faster to make than to do without; ``None`` stands for all tokens."""
        if allowed is not None and 2 * np.count_nonzero(allowed) < len(logits):
            return np.flatnonzero(allowed)
        if not self._n_kept:
            return None
        possible = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
        needed = _likeliest(possible, self._n_kept, out=self._mask)
        if len(self._biased):
            needed[self._biased] = True
        if allowed is not None:
            needed &= allowed
        return needed.nonzero()[0]


@functools.cache
def _all_ids(n_vocab: int) -> npt.NDArray[np.int32]:
    return np.arange(n_vocab, dtype=np.int32)


def n_selectable(specs: Sequence[SamplerSpec], *, n_vocab: int) -> int:
    """Return how many of the likeliest tokens, before any bias, can be drawn; 0 if that is unknown or saves nothing.

    A token that is among the ``k`` likeliest after ``b`` tokens were biased is one of those or was among the ``k + b``
    likeliest.
    """
    n_biased = 0
    for spec in specs:
        match spec:
            case plan.LogitBias(biases):
                n_biased = len(biases)
            case plan.TopK(k):
                break
            case plan.Greedy():
                k = 1
                break
            case _:
                return 0
    else:
        return 0
    n_kept = k + n_biased
    return n_kept if n_vocab >= _LEAST_VOCAB and _n_rows(n_vocab, n_kept) >= _LEAST_ROWS else 0


def _n_rows(n_vocab: int, n_kept: int) -> int:
    return min(_MOST_ROWS, n_vocab // (_COLUMNS_PER_KEPT * n_kept))


def _likeliest(logits: npt.NDArray[np.float32], count: int, *, out: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mask the ``count`` largest logits and few others in ``out``; one that is not a number counts as large.

    A decode evicts all this from the CPU's caches, so each function called costs several times what it does in a loop:
    these are the ones that NumPy's shorter ways to write them call.
    """
    n_rows = _n_rows(len(logits), count)
    n_columns = len(logits) // n_rows
    largest = np.maximum.reduce(logits[: n_rows * n_columns].reshape(n_rows, n_columns), axis=0)
    largest.partition(n_columns - count)
    np.less(logits, largest[n_columns - count], out=out)
    return np.logical_not(out, out=out)


@functools.lru_cache(maxsize=1024)
def _logits_at(address: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """Return a view of the logits at an address that llama.cpp has just returned."""
    return np.ctypeslib.as_array((ctypes.c_float * n_vocab).from_address(address))


def chosen(array: lib.llama_token_data_array) -> int:
    """Return the token that a chain has selected.

    Raises:
        ValueError: It has selected none.
    """
    if not 0 <= array.selected < array.size:
        raise ValueError("the sampler chain chose no token")
    return int(array.data[array.selected].id)


class NativeSampler:
    """Samples one turn's tokens. Different samplers may run concurrently on different threads; ctypes releases the GIL.

    Args:
        context: ``llama_context`` pointer; it must outlive the calls of ``sample``.
        batch_index: Returns the position in the last batch of one of its tokens with logits, as
            ``llama_get_logits_ith`` counts; a negative one counts the rows with logits from the end.
        vocab: ``llama_vocab`` pointer.
        specs: Result of ``plan_chain``; the last one chooses the token.
        n_vocab: Tokens in the vocabulary.
        n_probs: How many of the likeliest tokens to report with each; 0 reports none.
        prompt: Token ids before the first sampled one, whose tail feeds the penalties and DRY.
        position: How many of these are the start of the answer.
        token_text: Returns a token's text, for the report.
        constraint: Restricts the tokens and is advanced with each one; without it all are allowed.
    """

    wait_s = 0.0

    def __init__(  # noqa: PLR0913 - keyword-only, and each a different thing
        self,
        *,
        context: int,
        batch_index: Callable[[int], int],
        vocab: int,
        specs: Sequence[SamplerSpec],
        n_vocab: int,
        token_text: Callable[[int], str],
        n_probs: int = 0,
        prompt: Sequence[int] = (),
        position: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self._context = context
        self._batch_index = batch_index
        self._vocab = vocab
        self._position = position
        self._n_vocab = n_vocab
        self._n_probs = n_probs
        self._token_text = token_text
        self._constraint = constraint
        self._banned = _banned(specs) if constraint is not None else []
        self._candidates = self._new_candidates(specs)
        settings = lib.llama_sampler_chain_default_params()
        settings.no_perf = True
        self._chain = lib.llama_sampler_chain_init(settings)
        # The first sampler that is recreated for each token, and those after it; before them stay ``n_head`` others.
        self._tail: list[tuple[SamplerSpec, lib.llama_sampler_p]] = []
        self._n_head = 0
        for spec in specs:
            native = self._build(spec)
            if isinstance(spec, plan.TypicalP):
                # llama.cpp's entropy is NaN where a token has no probability, and its selection is then undefined.
                self._add(spec, lib.llama_sampler_init_min_p(_LEAST_SHARE, 0))
            if isinstance(spec, plan.Penalties | plan.Dry):
                for token in prompt[-spec.last_n :]:
                    lib.llama_sampler_accept(native, token)
            self._add(spec, native)

    def sample(self, row: int) -> Sampled:
        """Sample and accept a token; ``row`` indexes the tokens with logits of the last decode.

        The thread that decoded reads the logits once (``llama_get_logits``) before any sampler runs, because the first
        read reorders them.
        """
        if self._chain is None:
            raise RuntimeError("this sampler is closed")
        batch_index = self._batch_index(row)
        # llama_sampler_sample aborts the process if this returns a null pointer.
        pointer = lib.llama_get_logits_ith(self._context, batch_index)
        if not pointer:
            raise IndexError(f"token {batch_index} of the last batch has no logits")
        logits = _logits_at(ctypes.addressof(pointer.contents), self._n_vocab)
        self._reseed()
        if self._candidates is None:
            token = int(lib.llama_sampler_sample(self._chain, self._context, batch_index))
        else:
            token = self._sample_among(self._candidates, logits)
        self._position += 1
        return Sampled(token, self._logprobs(logits, token) if self._n_probs else None)

    def close(self) -> None:
        """Free the chain; further calls do nothing."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, spec: SamplerSpec, native: lib.llama_sampler_p) -> None:
        """Add a sampler to the chain, which owns it from here on and frees it."""
        if self._tail or _draws_anew(spec):
            self._tail.append((spec, native))
        else:
            self._n_head += 1
        lib.llama_sampler_chain_add(self._chain, native)

    def _reseed(self) -> None:
        """Recreate the samplers that draw, seeded for the position of the next token."""
        for _ in self._tail:
            lib.llama_sampler_chain_remove(self._chain, self._n_head)
        for index, (spec, native) in enumerate(self._tail):
            sampler = native
            if _draws_anew(spec):
                lib.llama_sampler_free(native)
                sampler = self._build(spec)
                self._tail[index] = spec, sampler
            lib.llama_sampler_chain_add(self._chain, sampler)

    def _build(self, spec: SamplerSpec) -> lib.llama_sampler_p:
        """Return a new sampler for the next token, owned by the caller."""
        return _build(spec, position=self._position, vocab=self._vocab, n_vocab=self._n_vocab)

    def _new_candidates(self, specs: Sequence[SamplerSpec]) -> Candidates | None:
        """Return a buffer for a chain that gets a selection of the tokens; ``None`` if llama.cpp passes it all."""
        n_kept = n_selectable(specs, n_vocab=self._n_vocab)
        if self._constraint is None and not n_kept:
            return None
        return Candidates(self._n_vocab, n_kept=n_kept, biased=[token for token, _ in _biases(specs)])

    def _sample_among(self, candidates: Candidates, logits: npt.NDArray[np.float32]) -> int:
        """Do as ``llama_sampler_sample`` does, with only the tokens that the constraint allows and the chain needs."""
        constraint, allowed = self._constraint, None
        if constraint is not None:
            allowed = constraint.allowed(self._n_vocab)
            allowed[self._banned] = False
            if not allowed.any():
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST,
                    "logit_bias bans every token that the grammar allows next.",
                    field="params.logit_bias",
                )
        array = candidates.fill(logits, allowed)
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = chosen(array)
        lib.llama_sampler_accept(self._chain, token)
        if constraint is not None:
            constraint.accept(token)
        return token

    def _logprobs(self, logits: npt.NDArray[np.float32], token: int) -> SampledLogprobs:
        largest = logits.max()
        log_total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))

        def report(index: int) -> TokenLogprob:
            return TokenLogprob(self._token_text(index), index, float(logits[index]) - log_total)

        count = min(self._n_probs, self._n_vocab)
        top = np.argpartition(logits, -count)[-count:]
        top = top[np.lexsort((top, -logits[top]))]
        return SampledLogprobs(report(token), tuple(report(int(index)) for index in top))


def _draws_anew(spec: SamplerSpec) -> bool:
    """Return whether a sampler is recreated for each token: it draws by a seed and learns nothing."""
    return isinstance(spec, plan.Dist | plan.Xtc) and spec.seed != plan.RANDOM_SEED


def _biases(specs: Sequence[SamplerSpec]) -> list[tuple[int, float]]:
    return [bias for spec in specs if isinstance(spec, plan.LogitBias) for bias in spec.biases]


def _banned(specs: Sequence[SamplerSpec]) -> list[int]:
    """Return the tokens that a bias excludes."""
    return [token for token, bias in _biases(specs) if bias == -np.inf]


def _build(  # noqa: C901, PLR0911, PLR0912 - one case per sampler: splitting the table would hide that it is complete
    spec: SamplerSpec, *, position: int, vocab: int, n_vocab: int
) -> lib.llama_sampler_p:
    """Return a new ``llama_sampler`` for the token at a ``position`` of the answer, owned by the caller."""
    match spec:
        case plan.Dist():  # built for each token
            return lib.llama_sampler_init_dist(plan.seed_at(spec, position))
        case plan.LogitBias(biases):
            array = (lib.llama_logit_bias * len(biases))(*biases)
            return lib.llama_sampler_init_logit_bias(n_vocab, len(biases), array)
        case plan.Penalties(last_n, repeat, frequency, presence):
            return lib.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence)
        case plan.Dry(multiplier, base, allowed_length, last_n, breakers):
            texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
            return lib.llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, texts, len(breakers))
        case plan.TopNSigma(n):
            return lib.llama_sampler_init_top_n_sigma(n)
        case plan.TopK(k):
            return lib.llama_sampler_init_top_k(k)
        case plan.TypicalP(p, min_keep):
            return lib.llama_sampler_init_typical(p, min_keep)
        case plan.TopP(p, min_keep):
            return lib.llama_sampler_init_top_p(p, min_keep)
        case plan.MinP(p, min_keep):
            return lib.llama_sampler_init_min_p(p, min_keep)
        case plan.Xtc(probability, threshold, min_keep):
            return lib.llama_sampler_init_xtc(probability, threshold, min_keep, plan.seed_at(spec, position))
        case plan.Temperature(temperature, dynamic_range, exponent):
            return lib.llama_sampler_init_temp_ext(temperature, dynamic_range, exponent)
        case plan.Greedy():
            return lib.llama_sampler_init_greedy()
        case plan.Mirostat(1, tau, eta):
            seed = plan.seed_at(spec, position)
            return lib.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, plan.MIROSTAT_CANDIDATES)
        case plan.Mirostat(_, tau, eta):
            return lib.llama_sampler_init_mirostat_v2(plan.seed_at(spec, position), tau, eta)
        case plan.AdaptiveP(target, decay):
            return lib.llama_sampler_init_adaptive_p(target, decay, plan.seed_at(spec, position))
