"""Who may raise the class of a turn."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.client import Principal


def test_lowering_is_free_and_silence_keeps_what_holds() -> None:
    """A lower class needs no scope, and no class at all takes the one given."""
    client = Principal("ada", 1, "normal", frozenset())
    assert client.allow_priority("batch", otherwise="normal") == "batch"
    assert client.allow_priority("normal", otherwise="batch") == "normal"
    assert client.allow_priority(None, otherwise="batch") == "batch"


def test_raising_needs_the_scope() -> None:
    """A class above the client's own is forbidden without the scope and allowed with it."""
    with pytest.raises(InferenceCenterError) as caught:
        Principal("ada", 1, "normal", frozenset({"user"})).allow_priority("interactive", otherwise="normal")
    assert caught.value.code is ErrorCode.FORBIDDEN
    assert caught.value.field == "priority"
    assert Principal("ada", 1, "normal", frozenset({"priority"})).allow_priority("interactive", otherwise="normal") == (
        "interactive"
    )
