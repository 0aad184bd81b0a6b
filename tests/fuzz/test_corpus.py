"""The committed corpus: inputs that once failed at a border, and typical ones."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, corpus


@pytest.mark.parametrize(("target", "name"), [(target, name) for target in TARGETS for name in corpus(target)])
def test_what_is_in_the_corpus_is_taken_or_refused(target: str, name: str) -> None:
    """As its border says; what fails in a fuzzer is added here."""
    TARGETS[target](corpus(target)[name])
