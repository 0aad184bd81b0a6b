"""Tries a sample of each property's examples in the fast tests, and all of them in the slow ones.

Each test with ``@given`` runs twice: among the fast tests with a part of its examples, and as ``[all]`` among the slow
ones with as many as its settings say. Only the number differs. A test that is slow anyway runs once.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import is_hypothesis_test, settings

_PART: Final = 4
"""One of so many examples is tried in the fast tests."""
_FEWEST: Final = 5
_ALL: Final = "all"
_ATTRIBUTE: Final = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a test: those given to it, else those of the profile."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the run with all examples."""
    if is_hypothesis_test(metafunc.function) and metafunc.definition.get_closest_marker("slow") is None:
        metafunc.fixturenames.append(_examples.__name__)
        sample = pytest.param("sample", id=pytest.HIDDEN_PARAM)
        every = pytest.param(_ALL, id=_ALL, marks=pytest.mark.slow)
        metafunc.parametrize(_examples.__name__, [sample, every], indirect=True)


@pytest.fixture
def _examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the number of examples of the test to its part."""
    if request.param != _ALL:
        function: Any = getattr(request.function, "__func__", request.function)  # of a method
        own: settings = vars(function)[_ATTRIBUTE]
        fewer = max(own.max_examples // _PART, min(own.max_examples, _FEWEST))
        monkeypatch.setattr(function, _ATTRIBUTE, settings(own, max_examples=fewer))
