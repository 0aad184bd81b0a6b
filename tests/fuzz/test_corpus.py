"""The committed corpus: typical inputs, and inputs that once failed."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, corpus


@pytest.mark.parametrize(("target", "name"), [(target, name) for target in TARGETS for name in corpus(target)])
def test_corpus_inputs_are_accepted_or_refused(target: str, name: str) -> None:
    """Inputs that fail in a fuzzer are added to the corpus."""
    TARGETS[target](corpus(target)[name])
