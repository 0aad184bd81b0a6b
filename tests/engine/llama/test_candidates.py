"""A chain that keeps few tokens gets few, and draws what it would draw from all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from benchmarks.model import SHAPES, write_model
from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama import sampler as module
from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.engine.llama.sampler import Candidates, NativeSampler, n_selectable
from inferencecenter.engine.sampling.chain import plan_chain
from inferencecenter.protocol.params import parse_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from inferencecenter.ipc.engine_options import EngineOptions

N_VOCAB = 20_000
SELECTING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 7, "typical_p": 0.7},
    {"temperature": 3, "top_p": 1, "min_p": 0, "top_k": 19},
    {"top_k": 15, "logit_bias": {"300": 9, "301": -9, "302": False, "303": 9}, "temperature": 3},
    {"temperature": 0, "logit_bias": {"300": 9}},
    {"top_k": 10, "adaptive_target": 0.4},
    {"top_k": 10, "xtc_probability": 0.5, "xtc_threshold": 0.05},
)
NOT_SELECTING: tuple[dict[str, Any], ...] = (
    {"top_k": 0},
    {"top_k": 1000},
    {"mirostat": 1},
    {"repeat_penalty": 1.5},
    {"temperature": 0, "presence_penalty": 1},
    {"dry_multiplier": 1},
    {"top_n_sigma": 1},
    {"samplers": ["temperature", "top_k"], "temperature": 0.5},
)


@pytest.fixture(scope="module")
def backend(options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    """A model with more tokens than a selection pays for."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_model(path, replace(SHAPES["tiny"], vocabulary=N_VOCAB), name="wide")
    loaded = LlamaBackend.load(
        options.replace(model_path=str(path), slots=1, n_ctx=256),
        on_progress=lambda _fraction: None,
        on_log=lambda _level, _line: None,
    )
    yield loaded
    loaded.close()


def specs_of(raw: dict[str, Any]) -> tuple[Any, ...]:
    """Return the chain for parameters as a client writes them."""
    return plan_chain(parse_params({"seed": 7, **raw}), n_vocab=N_VOCAB, n_ctx=256)


def draws(backend: LlamaBackend, raw: dict[str, Any], constraint: object = None) -> list[int]:
    """Sample 30 tokens, all from the last decoded row."""
    sampler = NativeSampler(
        context=backend._context.handle,
        batch_index=lambda row: row,
        vocab=backend._model.vocab.handle,
        specs=specs_of(raw),
        n_vocab=N_VOCAB,
        token_text=backend._model.vocab.token_text,
        constraint=constraint,  # type: ignore[arg-type]
    )
    index = backend._context.batch_index(0)
    drawn = [sampler.sample(index).token for _ in range(30)]
    sampler.close()
    return drawn


class Mask:
    """Allows the same tokens at every position."""

    def __init__(self, allowed: npt.NDArray[np.bool_]) -> None:
        self._allowed = allowed

    def allowed(self, _n_tokens: int) -> npt.NDArray[np.bool_]:
        """Return the tokens; the caller may change the array."""
        return self._allowed.copy()

    def accept(self, token: int) -> None:
        """Accept any token."""


def row_of(backend: LlamaBackend) -> npt.NDArray[np.float32]:
    """Return the writable logits of a prompt's last token."""
    backend.truncate(0, 0)
    backend.decode([Chunk(0, 0, [5, 6, 7], sample=True)])
    pointer = lib.llama_get_logits_ith(backend._context.handle, backend._context.batch_index(0))
    return np.ctypeslib.as_array(pointer, (N_VOCAB,))


def peaked(random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return logits whose likelihood falls with a power of the rank."""
    return (-1.5 * np.log(random.permutation(N_VOCAB) + 1)).astype(np.float32)


def beside_each_other(_random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return logits whose largest are neighbors, all of them in the vocabulary's last part."""
    return np.linspace(-60, 0, N_VOCAB, dtype=np.float32)


def mostly_impossible(random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return logits of which all but five are minus infinity."""
    logits = np.full(N_VOCAB, -np.inf, dtype=np.float32)
    logits[random.choice(N_VOCAB, 5, replace=False)] = random.normal(size=5)
    return logits


@pytest.mark.parametrize("make", [peaked, beside_each_other, mostly_impossible])
@pytest.mark.parametrize("raw", SELECTING, ids=str)
def test_selection_draws_as_llama_cpp_from_all_tokens(
    backend: LlamaBackend,
    raw: dict[str, Any],
    make: Callable[[np.random.Generator], npt.NDArray[np.float32]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is ``llama_sampler_sample``."""
    row_of(backend)[:] = make(np.random.default_rng(3))
    selected = draws(backend, raw)
    monkeypatch.setattr(module, "n_selectable", lambda *_args, **_options: 0)
    assert draws(backend, raw) == selected


@pytest.mark.parametrize("raw", SELECTING, ids=str)
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_constrained_selection_draws_as_from_all_allowed_tokens(
    backend: LlamaBackend, raw: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint and the first sampler of the chain may both exclude tokens."""
    random = np.random.default_rng(4)
    row = row_of(backend)
    row[:] = peaked(random)
    allowed = random.random(N_VOCAB) < share
    selected = draws(backend, raw, Mask(allowed))
    assert allowed[selected].all()
    monkeypatch.setattr(module, "n_selectable", lambda *_args, **_options: 0)
    row[~allowed] = -np.inf
    assert draws(backend, raw) == selected


@pytest.mark.parametrize("raw", SELECTING, ids=str)
def test_selection_is_small(raw: dict[str, Any]) -> None:
    """It holds the likeliest tokens and at most twice as many others."""
    n_kept = n_selectable(specs_of(raw), n_vocab=N_VOCAB)
    random, candidates = np.random.default_rng(5), Candidates(N_VOCAB, n_kept=n_kept)
    for _ in range(20):
        logits = random.normal(size=N_VOCAB).astype(np.float32)
        array = candidates.fill(logits)
        ids = [array.data[at].id for at in range(array.size)]
        assert ids == sorted(ids)
        assert set(np.argsort(-logits)[:n_kept]) <= set(ids)
        assert len(ids) <= 3 * n_kept


@pytest.mark.parametrize("raw", NOT_SELECTING, ids=str)
def test_other_chains_get_all_tokens(raw: dict[str, Any]) -> None:
    """A sampler before the selecting one may change the order, or the chain keeps many tokens."""
    assert n_selectable(specs_of(raw), n_vocab=N_VOCAB) == 0


def test_small_vocabulary_is_passed_whole() -> None:
    """Selecting from it takes longer than sampling from it."""
    assert n_selectable(specs_of({"temperature": 0}), n_vocab=4096) == 0


def test_logits_that_are_not_numbers_are_kept() -> None:
    """llama.cpp decides about them, as without a selection."""
    logits = np.zeros(N_VOCAB, dtype=np.float32)
    logits[[3, 12_345]] = np.nan
    candidates = Candidates(N_VOCAB, n_kept=4)
    array = candidates.fill(logits)
    assert {3, 12_345} <= {array.data[at].id for at in range(array.size)}
    logits[:] = np.nan
    assert candidates.fill(logits).size == N_VOCAB
