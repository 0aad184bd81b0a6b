"""What programs outside rely on is still there: the wire, HTTP, settings, metrics, errors and commands."""

from __future__ import annotations

from tests.compatibility.surface import FROZEN, surface

_REQUIRED = " is required"


def frozen() -> list[str]:
    """The facts of the last release."""
    return FROZEN.read_text().splitlines()


def test_nothing_that_was_released_is_gone() -> None:
    """Names of the outside change by addition only."""
    gone = set(frozen()) - set(surface())
    assert not {line for line in gone if not (line.startswith("request ") and line.endswith(_REQUIRED))}


def test_no_released_request_requires_another_field() -> None:
    """A program of the last release still sends requests that are whole."""
    subjects = {line.split(":")[0] for line in frozen()}
    added = [line for line in surface() if line.endswith(_REQUIRED) and line not in frozen()]
    assert not [line for line in added if line.startswith("request ") and line.split(":")[0] in subjects]


def test_every_part_of_the_outside_is_looked_at() -> None:
    """The reading of the generated pages finds facts in each of them."""
    kinds = {line.split()[0] for line in surface()}
    assert kinds == {"command", "errors", "event", "http", "metrics", "parameters", "request", "setting"}
