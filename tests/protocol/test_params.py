"""Parameters: every spelling, every bound, every combination."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import (
    PARAM_DOCS,
    SAMPLER_ORDER,
    Params,
    cross_check,
    decode,
    encode,
    json_schema,
    merge,
    parse_params,
)

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 5),
    "dynatemp_range": (0, 5),
    "dynatemp_exponent": (0.01, 10),
    "top_k": (0, 2**20),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_penalty": (0.01, 10),
    "repeat_last_n": (-1, 2**20),
    "presence_penalty": (-10, 10),
    "frequency_penalty": (-10, 10),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (1, 2**20),
    "dry_penalty_last_n": (-1, 2**20),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 0.99),
    "min_keep": (0, 2**20),
    "seed": (0, 2**32 - 2),
    "n_probs": (0, 20),
    "max_tokens": (1, 2**20),
    "max_time_ms": (1, 86_400_000),
    "stop_on_repetition": (0, 100),
    "n_keep": (0, 1000),
}
INTEGERS = {name for name in RANGES if Params.model_json_schema()["properties"][name].get("type") == "integer"} | {
    "max_time_ms"
}
NOT_NUMERIC = {"dry_sequence_breakers", "logit_bias", "samplers", "ignore_eos", "stop", "stop_regex"}


def refused(raw: dict[str, Any], path: str = "params") -> InferenceCenterError:
    """Return the error of ``raw``."""
    with pytest.raises(InferenceCenterError) as caught:
        parse_params(raw, path=path)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value


def test_every_parameter_is_covered() -> None:
    """The tables of this file have each parameter once."""
    assert set(RANGES) | NOT_NUMERIC == set(Params.model_fields)
    assert [doc.name for doc in PARAM_DOCS] == list(Params.model_fields)


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_range_bounds_are_inclusive(name: str, bounds: tuple[float, float]) -> None:
    """The smallest and the largest value are accepted unchanged."""
    for value in bounds:
        assert getattr(parse_params({name: value}), name) == value


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_out_of_range_error(name: str, bounds: tuple[float, float]) -> None:
    """It names field, value and range."""
    step = 1 if name in INTEGERS else 0.001
    below = bounds[0] - step - (1 if name == "max_tokens" else 0)
    if name in {"seed", "max_tokens"}:
        below = -2
    for value in (below, bounds[1] + step):
        error = refused({name: value})
        assert error.field == f"params.{name}"
        assert repr(value) in error.message
        assert next(doc.allowed for doc in PARAM_DOCS if doc.name == name) in error.message
        assert error.hint


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [True, "1", math.nan, math.inf, -math.inf, [1], {"a": 1}, 10**400])
def test_only_finite_numbers_are_numbers(name: str, value: object) -> None:
    """Booleans, strings, NaN, infinities, containers and huge numbers are refused."""
    raw = {name: value}
    if name == "mirostat" and isinstance(value, dict):
        assert refused(raw).field == "params.mirostat.a"
    else:
        assert refused(raw).field == f"params.{name}"


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_floats_are_no_integers(name: str) -> None:
    """Even a float with an integral value is refused."""
    assert refused({name: 2.0}).field == f"params.{name}"


def test_integers_are_accepted_for_floats() -> None:
    """Integers are stored as floats."""
    value = parse_params({"temperature": 1}).temperature
    assert (value, type(value)) == (1.0, float)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ({"ignore_eos": 1}, "1"),
        ({"ignore_eos": "true"}, "'true'"),
        ({"stop": ""}, "''"),
        ({"stop": ["a", ""]}, "a list of 2 items"),
        ({"stop": ["x" * 257]}, "a list of 1 items"),
        ({"stop": ["x"] * 17}, "a list of 17 items"),
        ({"stop": [1]}, "a list of 1 items"),
        ({"stop": {"a": 1}}, "an object of 1 entries"),
        ({"stop": "\ud800"}, "'\\ud800'"),
        ({"stop_regex": "("}, "does not compile"),
        ({"stop_regex": "a*"}, "matches the empty text"),
        ({"stop_regex": "(?r)ab"}, "lookbehind"),
        ({"stop_regex": ["a"] * 5}, "a list of 5 items"),
        ({"stop_regex": "a" * 513}, "'aaaa"),
        ({"dry_sequence_breakers": ["x" * 41]}, "a list of 1 items"),
        ({"dry_sequence_breakers": ["a\0b"]}, "NUL"),
        ({"dry_sequence_breakers": "\n"}, "'\\n'"),
        ({"samplers": ["top_k", "top_k"]}, "top_k occurs twice"),
        ({"samplers": ["typ_p", "typical_p"]}, "typ_p occurs twice"),
        ({"samplers": ["infill"]}, "a list of 1 items"),
        ({"samplers": "top_k"}, "'top_k'"),
        ({"logit_bias": {"a": 1}}, "token id"),
        ({"logit_bias": {"-1": 1}}, "token id"),
        ({"logit_bias": {"1": 101}}, "an object of 1 entries"),
        ({"logit_bias": {"1": True}}, "an object of 1 entries"),
        ({"logit_bias": {"1": None}}, "an object of 1 entries"),
        ({"logit_bias": {"1": 1, "01": 2}}, "twice"),
        ({"logit_bias": [[1, 2], [1, 3]]}, "twice"),
        ({"logit_bias": [[1]]}, "pairs"),
        ({"logit_bias": [[True, 1]]}, "token id"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "1025 entries"),
        ({"logit_bias": "5"}, "'5'"),
        ({"stop_on_repetition": 1}, "always occurs once"),
    ],
)
def test_invalid_strings_and_lists_are_refused(raw: dict[str, Any], shown: str) -> None:
    """Items are validated one by one, and the error names the defect."""
    error = refused(raw)
    assert error.field == f"params.{next(iter(raw))}"
    assert shown in error.message


def test_lists_and_biases_become_tuples() -> None:
    """Every accepted form gives tuples."""
    params = parse_params(
        {
            "stop": "END",
            "stop_regex": ["\\d+"],
            "logit_bias": {"5": -1, "7": False},
            "samplers": ["typical_p", "temperature"],
            "dry_sequence_breakers": [],
        }
    )
    assert params.stop == ("END",)
    assert params.stop_regex == ("\\d+",)
    assert params.logit_bias == ((5, -1.0), (7, False))
    assert params.samplers == ("typ_p", "temperature")
    assert params.dry_sequence_breakers == ()
    assert parse_params({"logit_bias": [[5, -1], [7, False]]}).logit_bias == params.logit_bias


def test_zero_bias_is_no_ban() -> None:
    """Zero and false differ on the wire."""
    biases = decode(encode(parse_params({"logit_bias": {"1": 0, "2": False}}))).logit_bias
    assert [type(bias) for _, bias in biases] == [float, bool]


def test_aliases() -> None:
    """Each alias sets its parameter."""
    aliases = {alias: doc.name for doc in PARAM_DOCS for alias in doc.aliases}
    assert aliases == {
        "temp": "temperature",
        "penalty_last_n": "repeat_last_n",
        "logprobs": "n_probs",
        "n_predict": "max_tokens",
    }
    for alias, name in aliases.items():
        assert getattr(parse_params({alias: 3}), name) == 3


def test_nested_forms_equal_the_flat_form() -> None:
    """Every layout gives the same values."""
    nested = parse_params(
        {
            "sampling": {
                "temp": 1.5,
                "dynatemp": {"range": 0.5, "exponent": 2},
                "dry": {
                    "multiplier": 1,
                    "base": 2,
                    "allowed_length": 3,
                    "penalty_last_n": 4,
                    "sequence_breakers": ["x"],
                },
                "mirostat": {"mode": 2, "tau": 3, "eta": 0.5},
                "xtc": {"probability": 0.5, "threshold": 0.2},
                "adaptive": {"target": -1, "decay": 0.5},
            },
            "stopping": {"stop": ["x"], "n_predict": 5},
            "memory": {"n_keep": 2},
        }
    )
    flat = parse_params(
        {
            "n_keep": 2,
            "temperature": 1.5,
            "dynatemp_range": 0.5,
            "dynatemp_exponent": 2,
            "dry_multiplier": 1,
            "dry_base": 2,
            "dry_allowed_length": 3,
            "dry_penalty_last_n": 4,
            "dry_sequence_breakers": ["x"],
            "mirostat": 2,
            "mirostat_tau": 3,
            "mirostat_eta": 0.5,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
            "adaptive_target": -1,
            "adaptive_decay": 0.5,
            "stop": ["x"],
            "max_tokens": 5,
        }
    )
    assert nested == flat
    assert nested.model_fields_set == flat.model_fields_set


@pytest.mark.parametrize(
    ("raw", "both"),
    [
        ({"temp": 1, "temperature": 1}, ("params.temp", "params.temperature")),
        ({"top_k": 1, "sampling": {"top_k": 1}}, ("params.top_k", "params.sampling.top_k")),
        ({"xtc": {"threshold": 0.1}, "xtc_threshold": 0.1}, ("params.xtc.threshold", "params.xtc_threshold")),
        ({"sampling": {"mirostat": 1}, "mirostat": {"mode": 1}}, ("params.sampling.mirostat", "params.mirostat.mode")),
        ({"temp": None, "temperature": 1}, ("params.temp", "params.temperature")),
    ],
)
def test_duplicate_parameter_is_refused(raw: dict[str, Any], both: tuple[str, str]) -> None:
    """The error names both spellings."""
    message = refused(raw).message
    assert all(spelling in message for spelling in both)


@pytest.mark.parametrize(
    ("raw", "field", "hint"),
    [
        ({"temprature": 1}, "params.temprature", "temperature"),
        ({"xtc": {"probabilty": 1}}, "params.xtc.probabilty", "probability"),
        ({"sampling": {"sampling": {}}}, "params.sampling.sampling", "sampling"),
        ({"zzzzqqqq": 1}, "params.zzzzqqqq", "Known are temperature"),
        ({"y" * 1000: 1}, f"params.{'y' * 64}…", "Known are"),
        ({"tfs_z": 0.9}, "params.tfs_z", "min_p, top_p or typical_p"),
        ({"tfs_z": True}, "params.tfs_z", "min_p"),
        ({"tfs_z": "1.0"}, "params.tfs_z", "min_p"),
        ({"penalize_nl": False}, "params.penalize_nl", "logit_bias"),
        ({"top_a": 0.1}, "params.top_a", "min_p"),
        ({"repetition_penalty": 1.1}, "params.repetition_penalty", "repeat_penalty"),
        ({"json_schema": {}}, "params.json_schema", "beside params"),
        ({"mirostat": 3}, "params.mirostat", "mirostat 1 and 2 only"),
        ({"max_tokens": 0}, "params.max_tokens", "append"),
    ],
)
def test_unknown_parameter_suggests_a_name(raw: dict[str, Any], field: str, hint: str) -> None:
    """The hint has the most similar name, or what replaces a removed parameter."""
    error = refused(raw)
    assert error.field == field
    assert error.hint is not None
    assert hint in error.hint


@pytest.mark.parametrize("raw", [{"sampling": 1}, {"dry": []}, {"xtc": "a"}, {"stopping": [1]}])
def test_groups_must_be_objects(raw: dict[str, Any]) -> None:
    """Other values are refused at their path."""
    error = refused(raw)
    assert error.field == f"params.{next(iter(raw))}"
    assert "must be an object" in error.message


def test_wrong_group_names_the_right_one() -> None:
    """For ``stop`` under ``sampling`` the error names its own group."""
    error = refused({"sampling": {"stop": "x"}})
    assert error.field == "params.sampling.stop"
    assert "stopping" in error.message


def test_disabled_tail_free_sampling_is_accepted() -> None:
    """``tfs_z: 1.0`` has no effect."""
    assert parse_params({"tfs_z": 1.0, "tfs": None}).model_fields_set == set()


def test_error_paths_start_at_the_given_path() -> None:
    """The path given by the caller is the prefix of paths in errors."""
    assert refused({"top_k": -1}, path="generation.defaults").field == "generation.defaults.top_k"


def test_null_is_unset() -> None:
    """The level below applies."""
    assert parse_params({"temperature": None, "sampling": None, "stop": None}).model_fields_set == set()


def test_minus_one_overrides_lower_levels() -> None:
    """It means no limit, and a random seed."""
    base = parse_params({"seed": 5, "max_tokens": 9})
    merged = merge(base, parse_params({"seed": -1, "max_tokens": -1}))
    assert (merged.seed, merged.max_tokens) == (None, None)
    assert decode(encode(merged)) == merged


def test_levels_merge_field_by_field() -> None:
    """A later level wins where it has a value."""
    merged = merge(Params(), Params(top_k=1, top_p=0.5), Params(top_p=0.6), Params())
    assert (merged.top_k, merged.top_p, merged.min_p) == (1, 0.6, Params().min_p)
    assert merged.model_fields_set == {"top_k", "top_p"}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 5),
            "presence_penalty": st.floats(-10, 10),
            "top_k": st.integers(0, 2**20),
            "seed": st.none() | st.integers(0, 2**32 - 2),
            "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3).map(tuple),
            "logit_bias": st.dictionaries(
                st.integers(0, 2**31 - 1), st.floats(-100, 100) | st.just(False), max_size=3
            ).map(lambda biases: tuple(biases.items())),
            "samplers": st.permutations(SAMPLER_ORDER).map(tuple),
            "ignore_eos": st.booleans(),
        },
    )
)
def test_wire_form_round_trips(values: dict[str, Any]) -> None:
    """Values are equal to the last bit, and as explicitly set as before."""
    params = Params(**values)
    again = decode(encode(params))
    assert again == params
    assert again.model_fields_set == params.model_fields_set


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([*Params.model_fields, "temp", "xtc", "dry", "sampling", "stopping", "memory", "tfs_z", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_any_input_is_accepted_or_refused(raw: dict[str, Any]) -> None:
    """Every error names a field."""
    try:
        params = parse_params(raw)
    except InferenceCenterError as error:
        outcome = (error.code, (error.field or "").split(".")[0], len(error.message) < 600)
    else:
        assert decode(encode(params)) == params
        return
    assert outcome == (ErrorCode.INVALID_REQUEST, "params", True)


@pytest.mark.parametrize(
    ("raw", "silenced"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 1}, {"top_p", "top_k", "seed"}),
        ({"temperature": 0, "dynatemp_range": 1}, {"dynatemp_range"}),
        ({"temperature": 0, "mirostat": 2}, {"mirostat"}),
        ({"temperature": 0, "adaptive_target": 0.5, "adaptive_decay": 0.5}, {"adaptive_target", "adaptive_decay"}),
        ({"temperature": 0, "repeat_penalty": 1.5, "logit_bias": {"1": 1}}, set()),
        ({"mirostat": 1, "top_k": 3, "min_p": 0.5, "typical_p": 0.5}, {"top_k", "min_p", "typical_p"}),
        ({"mirostat": 2, "mirostat_tau": 3, "temperature": 1}, set()),
        ({"mirostat_tau": 3}, {"mirostat_tau"}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, {"xtc_probability", "xtc_threshold"}),
        ({"xtc_threshold": 0.2}, {"xtc_threshold"}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, set()),
        ({"dynatemp_exponent": 2}, {"dynatemp_exponent"}),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1}, {"repeat_penalty", "presence_penalty"}),
        ({"repeat_last_n": 10}, {"repeat_last_n"}),
        ({"repeat_last_n": 10, "frequency_penalty": 1}, set()),
        ({"dry_base": 2, "dry_sequence_breakers": ["a"]}, {"dry_base", "dry_sequence_breakers"}),
        ({"dry_multiplier": 1, "dry_penalty_last_n": 0}, {"dry_multiplier", "dry_penalty_last_n"}),
        ({"dry_multiplier": 1, "dry_base": 2}, set()),
        ({"adaptive_decay": 0.5}, {"adaptive_decay"}),
        ({"adaptive_target": 0.5, "adaptive_decay": 0.5}, set()),
        ({"samplers": ["top_k"], "top_k": 5, "top_p": 0.5, "temperature": 0}, {"top_p", "temperature"}),
        ({"min_keep": 3, "top_p": 1, "min_p": 0}, {"min_keep"}),
        ({"min_keep": 3}, set()),
    ],
)
def test_values_without_effect_are_warned_about(raw: dict[str, Any], silenced: set[str]) -> None:
    """Each explicit value without effect gives exactly one warning."""
    warnings = cross_check(parse_params(raw))
    assert {warning.split()[0] for warning in warnings} == silenced
    assert len(warnings) == len(silenced)


def test_warnings_ignore_excluded_levels() -> None:
    """Values of excluded levels, such as a model file's, give no warnings."""
    params = parse_params({"temperature": 0, "top_k": 20})
    assert cross_check(params, given={"temperature"}) == ()
    assert len(cross_check(params, given={"temperature", "top_k"})) == 1


def test_conflicting_final_samplers_are_refused() -> None:
    """Mirostat and adaptive-p cannot both be last."""
    with pytest.raises(InferenceCenterError) as caught:
        cross_check(parse_params({"mirostat": 2, "adaptive_target": 0.3}))
    assert caught.value.field == "params.adaptive_target"


def test_docs_and_schema_come_from_the_model() -> None:
    """Each parameter has a group, a sentence, and a JSON value."""
    schema = json_schema()
    assert set(schema["properties"]) == set(Params.model_fields)
    assert schema["additionalProperties"] is False
    orjson.dumps(schema)
    for doc in PARAM_DOCS:
        assert doc.group in {"sampling", "stopping", "memory"}
        assert doc.description.endswith(".")
        assert doc.kind
        assert schema["properties"][doc.name]["group"] == doc.group
    assert {doc.name for doc in PARAM_DOCS if doc.group == "stopping"} == {
        "stop",
        "stop_regex",
        "max_tokens",
        "max_time_ms",
        "stop_on_repetition",
    }
