"""Tries a sample of each property's examples in the fast tests, and all of them in the slow ones.

Each test with ``@given`` runs twice: among the fast tests with a part of its examples, and as ``[all]`` among the slow
ones with as many as its settings say. Only the number differs. A test that is slow anyway runs once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import is_hypothesis_test, settings

if TYPE_CHECKING:
    from collections.abc import Generator

_PART: Final = 4
"""One of so many examples is tried in the fast tests."""
_FEWEST: Final = 5
_NAME: Final = "_examples"
"""The parameter that distinguishes the two runs."""
_SAMPLE: Final = "sample"
_ALL: Final = "all"
_ATTRIBUTE: Final = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a test: those given to it, else those of the profile."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the run with all examples."""
    if is_hypothesis_test(metafunc.function) and metafunc.definition.get_closest_marker("slow") is None:
        metafunc.fixturenames.append(_NAME)
        sample = pytest.param(_SAMPLE, id=pytest.HIDDEN_PARAM)
        every = pytest.param(_ALL, id=_ALL, marks=pytest.mark.slow)
        metafunc.parametrize(_NAME, [sample, every], indirect=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Reduce the number of examples of a test that tries a sample, before Hypothesis reads its settings.

    A fixture could not: pytest leaves out those that neither the test nor a marker names.
    """
    call = getattr(item, "callspec", None)
    if call is None or call.params.get(_NAME) != _SAMPLE:
        return (yield)
    function: Any = getattr(item, "function")  # noqa: B009 - only functions have parameters
    function = getattr(function, "__func__", function)  # of a method
    own: settings = vars(function)[_ATTRIBUTE]
    fewer = max(own.max_examples // _PART, min(own.max_examples, _FEWEST))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, _ATTRIBUTE, settings(own, max_examples=fewer))
        return (yield)
