"""Ratios are computed between comparable sides only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.compare import COMPARED, compare
from benchmarks.target import TargetFacts

OURS = TargetFacts(
    name="ours",
    kind="inferencecenter",
    url="ws://127.0.0.1:1/",
    model="tiny",
    model_bytes=530,
    n_params=494,
    library="llama.cpp 0c1e57098",
    threads=2,
    slots=8,
    n_ctx=512,
)
EQUAL = replace(OURS, name="peer", kind="llama-server", url="http://127.0.0.1:2", library="b9001-0c1e57098")


def test_comparable_sides() -> None:
    """Name, kind, address and version format may differ."""
    found = compare(OURS, EQUAL, assume_same=())

    assert found.fair
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model_bytes", 531),
        ("n_params", 1),
        ("library", "b9001-1111111aa"),
        ("threads", 4),
        ("slots", 4),
        ("n_ctx", 1024),
    ],
)
def test_known_difference_is_refused(field: str, other: Any) -> None:
    """An assumption does not override it."""
    found = compare(OURS, replace(EQUAL, **{field: other}), assume_same=tuple(COMPARED))

    assert not found.fair
    (refusal,) = found.refusals
    assert COMPARED[field] in refusal
    assert str(other) in refusal


@pytest.mark.parametrize(
    ("field", "unknown"),
    [("model_bytes", None), ("n_params", None), ("library", ""), ("threads", None), ("slots", None), ("n_ctx", None)],
)
def test_unknown_fact_may_be_assumed(field: str, unknown: Any) -> None:
    """Without the assumption the error has its option, whichever side lacks the fact."""
    peer = replace(EQUAL, **{field: unknown})

    (refusal,) = compare(OURS, peer, assume_same=()).refusals
    assert f"--assume-same {field}" in refusal
    assert compare(replace(OURS, **{field: unknown}), EQUAL, assume_same=()).refusals
    assumed = compare(OURS, peer, assume_same=(field,))
    assert assumed.fair
    assert assumed.assumed == (field,)


def test_versions_of_different_kinds_require_an_assumption() -> None:
    """A package version and a commit cannot be compared."""
    packaged = replace(OURS, library="llama.cpp 0.5.0-dev via llama-cpp-python 0.3.36")

    assert not compare(packaged, EQUAL, assume_same=()).fair
    assert compare(packaged, EQUAL, assume_same=("library",)).fair


def test_abbreviated_commit_is_equal() -> None:
    """Servers abbreviate commits to different lengths."""
    assert compare(replace(OURS, library="0c1e57098a"), EQUAL, assume_same=()).fair
