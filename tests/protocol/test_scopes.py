"""Tests of the table of scopes."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.scopes import SCOPES, Scope, parse_scopes


def test_every_scope_is_described() -> None:
    """The table has a row for each scope and no other."""
    assert set(SCOPES) == set(Scope)
    assert all(SCOPES.values())


def test_names_become_scopes() -> None:
    """Names are spelled as on the wire."""
    assert parse_scopes(["user", "admin"]) == {Scope.USER, Scope.ADMIN}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """The message names the wrong one, the hint all right ones."""
    with pytest.raises(InferenceCenterError, match="'root'") as caught:
        parse_scopes(["user", "root"])
    assert caught.value.hint == "One of: user, priority, operator, admin."
