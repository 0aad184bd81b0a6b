"""Released interfaces remain: the wire, HTTP, settings, metrics, errors and commands."""

from __future__ import annotations

from tests.compatibility.surface import FROZEN, surface

_REQUIRED = " is required"


def frozen() -> list[str]:
    """The facts of the last release."""
    return FROZEN.read_text().splitlines()


def test_no_released_name_is_removed() -> None:
    """Public names change by addition only."""
    removed = set(frozen()) - set(surface())
    assert not {line for line in removed if not (line.startswith("request ") and line.endswith(_REQUIRED))}


def test_no_released_request_has_a_new_required_field() -> None:
    """Requests of the last release stay valid."""
    subjects = {line.split(":")[0] for line in frozen()}
    added = [line for line in surface() if line.endswith(_REQUIRED) and line not in frozen()]
    assert not [line for line in added if line.startswith("request ") and line.split(":")[0] in subjects]


def test_every_interface_has_facts() -> None:
    """The generated pages are parsed in all parts."""
    kinds = {line.split()[0] for line in surface()}
    assert kinds == {"command", "errors", "event", "http", "metrics", "parameters", "request", "setting"}
