"""Native sampler chains on the demo model: every parameter has an effect."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.sampler import NativeSampler
from inferencecenter.engine.sampling.chain import plan_chain
from inferencecenter.protocol.params import Params, parse_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from inferencecenter.engine.backend import Sampled

N_CTX = 256
DRAWS = 120


# llama.cpp keeps a bare pointer to it.
_silent = lib.llama_log_callback(lambda _level, _text, _data: None)


class Rig:
    """A loaded model whose last decoded row is sampled repeatedly."""

    def __init__(self, path: Path) -> None:
        lib.llama_log_set(_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), settings)
        context_settings = lib.llama_context_default_params()
        context_settings.n_ctx = N_CTX
        context_settings.n_batch = N_CTX
        context_settings.n_threads = context_settings.n_threads_batch = 1
        self.context = lib.llama_init_from_model(self.model, context_settings)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.end_tokens = [token for token in range(self.n_vocab) if lib.llama_vocab_is_eog(self.vocab, token)]
        self.prompt: list[int] = []

    def close(self) -> None:
        """Free what was loaded."""
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def tokens(self, text: str) -> list[int]:
        """Tokenize template text."""
        data = text.encode()
        buffer = (lib.llama_token * 256)()
        count = lib.llama_tokenize(self.vocab, data, len(data), buffer, 256, False, True)
        return list(buffer[:count])

    def text(self, token: int) -> str:
        """Return a token's text."""
        buffer = ctypes.create_string_buffer(64)
        count = lib.llama_token_to_piece(self.vocab, token, buffer, 64, 0, True)
        return buffer.raw[:count].decode(errors="replace")

    def read(self, text: str) -> int:
        """Decode a prompt in an empty context and return the batch index of its last token."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        self.prompt = self.tokens(text)
        return self.decode(self.prompt)

    def spread(self) -> None:
        """Replace the last row's logits by the same ones for every model: likelihood falls with a power of the rank.

        The tests must not depend on the model's own confidence.
        """
        ranks = np.random.default_rng(0).permutation(self.n_vocab)
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, -1), shape=(self.n_vocab,))
        row[:] = -2 * np.log(ranks + 1)

    def decode(self, tokens: Sequence[int]) -> int:
        """Decode tokens after what the context holds and return the batch index of the last one."""
        buffer = (lib.llama_token * len(tokens))(*tokens)
        assert lib.llama_decode(self.context, lib.llama_batch_get_one(buffer, len(tokens))) == 0
        lib.llama_get_logits(self.context)
        return len(tokens) - 1

    def sampler(self, raw: dict[str, Any], prompt: Sequence[int] | None = None) -> NativeSampler:
        """Build the chain for parameters as a client writes them."""
        params = parse_params(raw)
        specs = plan_chain(params, n_vocab=self.n_vocab, n_ctx=N_CTX, end_tokens=self.end_tokens)
        return NativeSampler(
            context=self.context,
            batch_index=lambda row: row,
            vocab=self.vocab,
            specs=specs,
            n_vocab=self.n_vocab,
            n_probs=params.n_probs,
            prompt=self.prompt if prompt is None else prompt,
            token_text=self.text,
        )

    def draws(self, raw: dict[str, Any], *, prompt: Sequence[int] | None = None, count: int = DRAWS) -> list[int]:
        """Sample ``count`` tokens, all from the last decoded row."""
        sampler = self.sampler({"seed": 42, **raw}, prompt)
        tokens = [sampler.sample(-1).token for _ in range(count)]
        sampler.close()
        return tokens

    def generate(self, raw: dict[str, Any], text: str, *, count: int = 24) -> list[int]:
        """Generate tokens after a prompt."""
        index = self.read(text)
        sampler = self.sampler(raw)
        tokens = []
        for _ in range(count):
            tokens.append(sampler.sample(index).token)
            index = self.decode(tokens[-1:])
        sampler.close()
        return tokens


OPENING = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded(demo_model_path: Path) -> Iterator[Rig]:
    """The demo model, loaded once."""
    rig = Rig(demo_model_path)
    yield rig
    rig.close()


@pytest.fixture
def rig(loaded: Rig) -> Rig:
    """The demo model before its answer, with logits that give every token a chance."""
    loaded.read(OPENING)
    loaded.spread()
    return loaded


# No truncation and a high temperature: nearly every token has a chance, so each sampler has an effect.
WIDE: dict[str, Any] = {"temperature": 3, "top_k": 0, "top_p": 1, "min_p": 0}
COOL: dict[str, Any] = {**WIDE, "temperature": 1.5}

# Base and change: each pair differs in the value of one parameter, whose name is the key.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (WIDE, {"temperature": 1.5}),
    "dynatemp_range": (WIDE, {"dynatemp_range": 2}),
    "dynatemp_exponent": ({**WIDE, "dynatemp_range": 2}, {"dynatemp_exponent": 3}),
    "top_k": (WIDE, {"top_k": 3}),
    "top_p": (WIDE, {"top_p": 0.5}),
    "min_p": (WIDE, {"min_p": 0.5}),
    "typical_p": (WIDE, {"typical_p": 0.3}),
    "top_n_sigma": (WIDE, {"top_n_sigma": 1}),
    "xtc_probability": ({**WIDE, "xtc_threshold": 0.001}, {"xtc_probability": 1}),
    "xtc_threshold": ({**COOL, "xtc_probability": 1, "xtc_threshold": 0.001}, {"xtc_threshold": 0.4}),
    "repeat_penalty": (WIDE, {"repeat_penalty": 3}),
    "repeat_last_n": ({**WIDE, "presence_penalty": 10}, {"repeat_last_n": 2}),
    "presence_penalty": (WIDE, {"presence_penalty": 10}),
    "frequency_penalty": (WIDE, {"frequency_penalty": 10}),
    "mirostat": (COOL, {"mirostat": 1}),
    "mirostat_tau": ({**WIDE, "mirostat": 2}, {"mirostat_tau": 1}),
    "mirostat_eta": ({**WIDE, "mirostat": 2}, {"mirostat_eta": 1}),
    "adaptive_target": (COOL, {"adaptive_target": 0.02}),
    "adaptive_decay": ({**COOL, "adaptive_target": 0.05}, {"adaptive_decay": 0.1}),
    "min_keep": ({**WIDE, "top_p": 0.01}, {"min_keep": 20}),
    "seed": (WIDE, {"seed": 43}),
    "logit_bias": (WIDE, {"logit_bias": {"100": 20}}),
    "samplers": ({"temperature": 3, "top_p": 0.5}, {"samplers": ["temperature", "top_p"]}),
}
# Tested below by their effect on a sequence, or on the report.
SEQUENTIAL = {
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "n_probs",
    "ignore_eos",
}


def test_every_sampling_parameter_has_a_test() -> None:
    """No parameter is without a test of its effect."""
    properties = Params.model_json_schema()["properties"]
    sampling = {name for name, schema in properties.items() if schema["group"] == "sampling"}
    assert set(CHANGES) | SEQUENTIAL == sampling


@pytest.mark.parametrize(("name", "pair"), CHANGES.items(), ids=CHANGES)
def test_changed_parameter_changes_the_sample(rig: Rig, name: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """With the same seed and logits, only the parameter makes the difference."""
    base, change = pair
    assert set(change) == {name}
    assert rig.draws(base) == rig.draws(base)
    assert rig.draws(base) != rig.draws({**base, **change})


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_versions_differ(rig: Rig, version: int) -> None:
    """Each version draws differently, and reproducibly with the same seed."""
    drawn = rig.draws({**WIDE, "mirostat": version})
    assert drawn == rig.draws({**WIDE, "mirostat": version})
    assert drawn != rig.draws({**WIDE, "mirostat": 3 - version})


def test_truncation_samplers_keep_their_candidates(rig: Rig) -> None:
    """The kept tokens are those that the definitions of top-k, min-p and top-p give for these logits."""
    row = lib.llama_get_logits_ith(rig.context, -1)
    logits = np.ctypeslib.as_array(row, shape=(rig.n_vocab,)).astype(np.float64) / 3
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    flat = {**WIDE, "samplers": ["temperature", "top_k", "top_p", "min_p"]}
    assert set(rig.draws({**flat, "top_k": 3}, count=300)) == set(order[:3].tolist())
    kept_by_min_p = set(np.flatnonzero(probs >= 0.5 * probs.max()).tolist())
    assert set(rig.draws({**flat, "min_p": 0.5}, count=300)) <= kept_by_min_p
    n_top_p = int(np.searchsorted(np.cumsum(probs[order]), 0.3)) + 1
    assert set(rig.draws({**flat, "top_p": 0.3}, count=300)) <= set(order[:n_top_p].tolist())


def test_temperature_zero_takes_the_likeliest_token(rig: Rig) -> None:
    """The seed does not matter."""
    row = np.ctypeslib.as_array(lib.llama_get_logits_ith(rig.context, -1), shape=(rig.n_vocab,))
    likeliest = int(row.argmax())
    assert set(rig.draws({"temperature": 0})) == {likeliest}
    assert set(rig.draws({"temperature": 0, "mirostat": 2, "seed": 1})) == {likeliest}


def test_banned_token_is_never_sampled(rig: Rig) -> None:
    """``false`` in logit_bias excludes even the likeliest token."""
    likeliest = rig.draws({"temperature": 0}, count=1)[0]
    assert likeliest not in rig.draws({**WIDE, "temperature": 0.1, "logit_bias": {str(likeliest): False}})


def test_ignore_eos_masks_end_tokens(rig: Rig) -> None:
    """The answer continues where the model would end it."""
    wants_end = {**WIDE, "logit_bias": {str(token): 50 for token in rig.end_tokens}}
    assert set(rig.draws(wants_end)) <= set(rig.end_tokens)
    assert not set(rig.draws({**wants_end, "ignore_eos": True})) & set(rig.end_tokens)


def test_penalties_cover_the_end_of_the_prompt(rig: Rig) -> None:
    """A token of the prompt's tail is penalized before anything was sampled; an earlier one is not."""
    likeliest = rig.draws({"temperature": 0}, count=1)[0]
    others = [token for token in range(200, 210) if token != likeliest]
    penalized = {"temperature": 0, "presence_penalty": 10, "repeat_last_n": 5}
    assert rig.draws(penalized, prompt=others, count=1) == [likeliest]
    assert rig.draws(penalized, prompt=[*others, likeliest], count=1) != [likeliest]
    assert rig.draws(penalized, prompt=[likeliest, *others], count=1) == [likeliest]


def dry_choice(rig: Rig, **changes: Any) -> bool:
    """Return whether DRY makes the model avoid the biased token, which would repeat a run."""
    wanted = rig.tokens(" green")[-1]
    run = rig.tokens(" cat dog sun red")
    filler = rig.tokens(" one two six ten")
    prompt = [*run, wanted, *filler, *run]
    # The bias makes the token win by 26 to 40, unless the penalty is higher.
    raw = {"temperature": 0, "dry_multiplier": 20, "logit_bias": {str(wanted): 40}, **changes}
    return rig.draws(raw, prompt=prompt, count=1) != [wanted]


@pytest.mark.parametrize(
    "change",
    [
        {"dry_multiplier": 0.001},
        {"dry_base": 1},
        {"dry_allowed_length": 50},
        {"dry_penalty_last_n": 4},
        {"dry_sequence_breakers": [" red"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_dry_parameters_control_repetition(rig: Rig, change: dict[str, Any]) -> None:
    """Each DRY parameter alone decides whether the repetition continues."""
    assert dry_choice(rig)
    assert not dry_choice(rig, **change)


def test_equal_seeds_give_equal_answers(rig: Rig) -> None:
    """The temperature is above 0; different seeds give different answers."""
    hot = {**WIDE, "temperature": 1.5}
    first = rig.generate({**hot, "seed": 5}, OPENING)
    assert rig.generate({**hot, "seed": 5}, OPENING) == first
    assert rig.generate({**hot, "seed": 6}, OPENING) != first


def test_without_a_seed_each_turn_is_random(rig: Rig) -> None:
    """Two chains without a seed do not draw the same hundred tokens."""
    assert rig.draws({**WIDE, "seed": None}) != rig.draws({**WIDE, "seed": None})


def test_logprobs_are_those_of_the_model_before_any_sampler(rig: Rig) -> None:
    """The likeliest tokens and the sampled one have natural logarithms of the model's own probabilities."""
    sampler = rig.sampler({**WIDE, "seed": 3, "n_probs": 5, "logit_bias": {"100": 50}})
    sampled: Sampled = sampler.sample(-1)
    sampler.close()
    row = np.ctypeslib.as_array(lib.llama_get_logits_ith(rig.context, -1), shape=(rig.n_vocab,)).astype(np.float64)
    logprobs = row - row.max() - math.log(np.exp(row - row.max()).sum())
    assert sampled.logprobs is not None
    assert [entry.token_id for entry in sampled.logprobs.top] == np.argsort(-logprobs)[:5].tolist()
    assert sampled.token == sampled.logprobs.sampled.token_id == 100
    for entry in (sampled.logprobs.sampled, *sampled.logprobs.top):
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        assert entry.token == rig.text(entry.token_id)


def test_row_index_counts_the_tokens_of_the_batch(rig: Rig) -> None:
    """An index without logits is an error, not a crash."""
    sampler = rig.sampler({"temperature": 0})
    last = len(rig.prompt) - 1
    assert sampler.sample(last) == sampler.sample(-1)
    with pytest.raises(IndexError):
        sampler.sample(last - 1)
    sampler.close()


def test_closed_sampler_cannot_be_used(rig: Rig) -> None:
    """Closing twice frees once, and nothing is sampled afterwards."""
    sampler = rig.sampler({})
    sampler.close()
    sampler.close()
    with pytest.raises(RuntimeError):
        sampler.sample(-1)


@pytest.mark.parametrize("temperature", [0.8, 3])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_typical_sampling_with_banned_tokens(rig: Rig, temperature: float, p: float) -> None:
    """Only tokens kept by the definition among the remaining ones are drawn: a ban makes no other token likely."""
    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(rig.context, -1), shape=(rig.n_vocab,)).astype(np.float64)
    banned = np.argsort(-logits)[[0, 1, 5]]
    logits[banned] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    left = np.flatnonzero(probs)
    surprise = -np.log(probs[left])
    order = left[np.argsort(np.abs(surprise - (probs[left] * surprise).sum()), kind="stable")]
    kept = order[: int(np.searchsorted(np.cumsum(probs[order]), p)) + 1]
    raw = {**WIDE, "temperature": temperature, "typical_p": p, "logit_bias": {str(token): False for token in banned}}
    assert set(rig.draws(raw, count=300)) <= set(kept.tolist())


def test_typical_sampling_with_underflowing_probabilities(rig: Rig) -> None:
    """A low temperature before it leaves most tokens with probability zero."""
    cold = {**WIDE, "temperature": 0.05, "samplers": ["temperature", "typ_p"]}
    row = np.ctypeslib.as_array(lib.llama_get_logits_ith(rig.context, -1), shape=(rig.n_vocab,))
    best = np.argsort(-row)[:2]
    row[best] = row.max()
    assert set(rig.draws({**cold, "typical_p": 0.9})) == set(best.tolist())


def test_whole_chain_builds_in_order(rig: Rig) -> None:
    """Every sampler of a plan exists in llama.cpp, and the chain has them in the plan's order."""
    everything: dict[str, Any] = {
        "repeat_penalty": 1.5,
        "dry_multiplier": 1,
        "top_n_sigma": 2,
        "typical_p": 0.5,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.5,
        "logit_bias": {"3": 1},
    }
    shared = ["logit-bias", "penalties", "dry"]
    cutting = ["top-n-sigma", "top-k", "min-p", "typical", "top-p", "min-p", "xtc", "temp-ext"]
    for raw, names in [
        (everything, [*shared, *cutting, "dist"]),
        ({**everything, "temperature": 0}, [*shared, "greedy"]),
        ({**everything, "mirostat": 1}, [*shared, "temp-ext", "mirostat"]),
        ({**everything, "mirostat": 2}, [*shared, "temp-ext", "mirostat-v2"]),
        ({**everything, "adaptive_target": 0.3}, [*shared, *cutting, "adaptive-p"]),
    ]:
        sampler = rig.sampler(raw)
        chain = sampler._chain
        built = [lib.llama_sampler_chain_get(chain, place) for place in range(lib.llama_sampler_chain_n(chain))]
        assert [lib.llama_sampler_name(native).decode() for native in built] == names
        sampler.sample(-1)
        sampler.close()


def test_rows_have_several_candidates(rig: Rig) -> None:
    """The wide setting draws from many tokens, so a difference is not an artifact of a sharp distribution."""
    assert len(Counter(rig.draws(WIDE))) > 20
