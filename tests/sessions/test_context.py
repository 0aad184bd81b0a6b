"""Permission to raise the priority of a turn."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.context import Principal


def test_lowering_the_priority_needs_no_scope() -> None:
    """Without a requested priority the given one applies."""
    client = Principal("ada", 1, "normal", frozenset())
    assert client.allow_priority("batch", otherwise="normal") == "batch"
    assert client.allow_priority("normal", otherwise="batch") == "normal"
    assert client.allow_priority(None, otherwise="batch") == "batch"


def test_raising_the_priority_needs_the_scope() -> None:
    """A priority above the client's own is forbidden without the scope."""
    with pytest.raises(InferenceCenterError) as caught:
        Principal("ada", 1, "normal", frozenset({"user"})).allow_priority("interactive", otherwise="normal")
    assert caught.value.code is ErrorCode.FORBIDDEN
    assert caught.value.field == "priority"
    assert Principal("ada", 1, "normal", frozenset({"priority"})).allow_priority("interactive", otherwise="normal") == (
        "interactive"
    )
