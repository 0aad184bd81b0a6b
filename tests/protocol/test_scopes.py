"""The table of scopes."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.scopes import SCOPES, Scope, parse_scopes


def test_every_scope_is_described() -> None:
    """The table has exactly one row per scope."""
    assert set(SCOPES) == set(Scope)
    assert all(SCOPES.values())


def test_scope_names_are_parsed() -> None:
    """Names are parsed as they are spelled on the wire."""
    assert parse_scopes(["user", "admin"]) == {Scope.USER, Scope.ADMIN}


def test_unknown_scope_is_refused() -> None:
    """The hint has all valid names."""
    with pytest.raises(InferenceCenterError, match="'root'") as caught:
        parse_scopes(["user", "root"])
    assert caught.value.hint == "One of: user, priority, operator, admin."
