"""The plan of a sampler chain: its order, dropped samplers, and the final choice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.sampling.chain import (
    RANDOM_SEED,
    AdaptiveP,
    Dist,
    Dry,
    Greedy,
    LogitBias,
    MinP,
    Mirostat,
    Penalties,
    SamplerSpec,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
    plan_chain,
    seed_at,
)
from inferencecenter.protocol.params import SAMPLER_ORDER, parse_params

EVERYTHING: dict[str, Any] = {
    "repeat_penalty": 1.5,
    "dry_multiplier": 1,
    "top_n_sigma": 2,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
    "min_keep": 2,
    "seed": 7,
    "logit_bias": {"3": 1},
}


def chain(raw: dict[str, Any], **overrides: Any) -> tuple[SamplerSpec, ...]:
    """Return the plan for parameters as a client writes them."""
    return plan_chain(parse_params(raw), **{"n_vocab": 100, "n_ctx": 512, **overrides})


def kinds(specs: tuple[SamplerSpec, ...]) -> list[type[SamplerSpec]]:
    """Return the kinds of samplers in order."""
    return [type(spec) for spec in specs]


def test_default_parameters_build_a_minimal_chain() -> None:
    """Unset penalties, DRY, XTC and the like add no sampler."""
    assert chain({}) == (TopK(40), TopP(0.95, 0), MinP(0.05, 0), Temperature(0.8, 0.0, 1.0), Dist(RANDOM_SEED))


def test_samplers_have_the_requested_order() -> None:
    """The default order is llama.cpp's; biases come first, the choice last."""
    in_order = [LogitBias, Penalties, Dry, TopNSigma, TopK, TypicalP, TopP, MinP, Xtc, Temperature, Dist]
    assert kinds(chain(EVERYTHING)) == in_order
    backwards = chain({**EVERYTHING, "samplers": list(reversed(SAMPLER_ORDER))})
    assert kinds(backwards) == [LogitBias, *reversed(in_order[1:-1]), Dist]


def test_every_parameter_reaches_its_sampler() -> None:
    """No parameter is lost between the request and the plan."""
    specs = chain(
        {
            "temperature": 1.5,
            "dynatemp_range": 0.5,
            "dynatemp_exponent": 2,
            "top_k": 3,
            "top_p": 0.4,
            "min_p": 0.3,
            "typical_p": 0.6,
            "top_n_sigma": 2.5,
            "xtc_probability": 0.7,
            "xtc_threshold": 0.2,
            "repeat_penalty": 1.2,
            "repeat_last_n": 9,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "dry_multiplier": 0.9,
            "dry_base": 2,
            "dry_allowed_length": 4,
            "dry_penalty_last_n": 8,
            "dry_sequence_breakers": ["x"],
            "min_keep": 5,
            "seed": 11,
            "logit_bias": {"3": -2, "4": False},
        }
    )
    assert specs == (
        LogitBias(((3, -2.0), (4, float("-inf")))),
        Penalties(9, 1.2, 0.2, 0.1),
        Dry(0.9, 2.0, 4, 8, ("x",)),
        TopNSigma(2.5),
        TopK(3),
        TypicalP(0.6, 5),
        TopP(0.4, 5),
        MinP(0.3, 5),
        Xtc(0.7, 0.2, 5, 11),
        Temperature(1.5, 0.5, 2.0),
        Dist(11),
    )


def test_temperature_zero_is_greedy_but_still_penalises() -> None:
    """Nothing is drawn, yet biases, penalties and DRY apply."""
    assert kinds(chain({**EVERYTHING, "temperature": 0})) == [LogitBias, Penalties, Dry, Greedy]
    assert chain({"temperature": 0, "mirostat": 2}) == (Greedy(),)
    assert chain({"temperature": 0, "adaptive_target": 0.5}) == (Greedy(),)


def test_temperature_needs_its_sampler() -> None:
    """Without the temperature sampler even temperature 0 draws from the distribution."""
    assert chain({"temperature": 0, "samplers": [], "seed": 1}) == (Dist(1),)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_replaces_the_truncating_samplers(version: int) -> None:
    """Penalties and temperature stay before it."""
    specs = chain({**EVERYTHING, "mirostat": version, "mirostat_tau": 3, "mirostat_eta": 0.2})
    assert kinds(specs) == [LogitBias, Penalties, Dry, Temperature, Mirostat]
    assert specs[-1] == Mirostat(version, 3.0, 0.2, 7)


def test_adaptive_p_chooses_instead_of_a_plain_draw() -> None:
    """Its target and decay arrive, the truncating samplers stay."""
    specs = chain({"adaptive_target": 0.3, "adaptive_decay": 0.5, "seed": 2, "samplers": ["min_p"]})
    assert specs == (MinP(0.05, 0), AdaptiveP(0.3, 0.5, 2))


def test_minus_one_looks_back_over_the_whole_context() -> None:
    """No look-back is longer than the context."""
    whole = chain({"repeat_penalty": 2, "repeat_last_n": -1, "dry_multiplier": 1, "samplers": ["penalties", "dry"]})
    assert [getattr(spec, "last_n", None) for spec in whole] == [512, 512, None]
    longer = chain({"repeat_penalty": 2, "repeat_last_n": 9999, "samplers": ["penalties"]})
    assert isinstance(longer[0], Penalties)
    assert longer[0].last_n == 512


@pytest.mark.parametrize(
    "idle",
    [
        {"repeat_penalty": 1.5, "repeat_last_n": 0},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"xtc_probability": 1, "xtc_threshold": 0.6},
        {"top_n_sigma": 0},
        {"temperature": 1},
        {"top_k": 0},
        {"typical_p": 1},
    ],
)
def test_samplers_without_effect_are_dropped(idle: dict[str, Any]) -> None:
    """A value that disables a sampler removes it from the chain."""
    names = {"repeat_penalty": "penalties", "dry_multiplier": "dry", "xtc_probability": "xtc", "typical_p": "typ_p"}
    name = next(iter(idle))
    assert chain({**idle, "samplers": [names.get(name, name)], "seed": 1}) == (Dist(1),)


def test_ignore_eos_bans_every_end_token() -> None:
    """``ignore_eos`` overrides a bias on an end token."""
    specs = chain({"ignore_eos": True, "logit_bias": {"2": 5, "9": 1}}, end_tokens=(2, 4))
    assert specs[0] == LogitBias(((2, float("-inf")), (9, 1.0), (4, float("-inf"))))


def test_ban_of_all_tokens_is_refused() -> None:
    """End tokens banned by ``ignore_eos`` count, too."""
    bans = {str(token): False for token in range(99)}
    assert isinstance(chain({"logit_bias": bans})[0], LogitBias)
    with pytest.raises(InferenceCenterError, match="ban every token") as caught:
        chain({"logit_bias": bans, "ignore_eos": True}, end_tokens=(99,))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "params.logit_bias")


def test_bias_on_an_unknown_token_is_refused() -> None:
    """The error names the token and the vocabulary's size."""
    with pytest.raises(InferenceCenterError, match=r"token 100 does not exist.*0 to 99") as caught:
        chain({"logit_bias": {"100": 1}})
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "params.logit_bias")


@given(st.integers(0, RANDOM_SEED - 1), st.integers(0, 100_000))
def test_random_number_depends_on_seed_position_and_sampler(seed: int, position: int) -> None:
    """It is reproducible, differs by position and sampler, and is never the value that means a random seed."""
    made = seed_at(Dist(seed), position)
    assert made == seed_at(Dist(seed), position)
    assert made != seed_at(Xtc(0.5, 0.1, 0, seed), position)
    assert made != seed_at(Dist(seed), position + 1)
    assert 0 <= made < RANDOM_SEED
    assert seed_at(Dist(RANDOM_SEED), position) == RANDOM_SEED
