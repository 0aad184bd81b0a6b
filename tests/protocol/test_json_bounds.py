"""Bounds of JSON texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import codec
from inferencecenter.protocol.codec import MAX_COMMAS, MAX_STRUCTURE, check_json_bounds, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = MAX_STRUCTURE + 1


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * MANY + b"0]",
        b"[" + b"{}," * MANY + b"0]",
        b"[" * MANY,
        b"{" + b",".join(b'"%x":0' % key for key in range(MANY)) + b"}",
        b"[" + b"0," * (MAX_COMMAS + 1) + b"0]",
        b"[" + b'"",' * (MAX_COMMAS + 1) + b"0]",
        b'":' * (2 * (MAX_COMMAS + MAX_STRUCTURE + 2)),
        b'[":",' * MANY,
    ],
    ids=["lists", "objects", "depth", "fields", "numbers", "strings", "quotes", "strings with marks"],
)
def test_dense_texts_are_refused(text: bytes) -> None:
    """Slow texts are refused before parsing, valid JSON or not."""
    with pytest.raises(InferenceCenterError) as caught:
        check_json_bounds(text)
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("inside", ["[{:,", "a,b: [c]", '\\"[', "\\\\[", '\\"\\\\\\",['])
def test_long_strings_are_accepted(inside: str) -> None:
    """Characters inside strings do not count."""
    text = b'{"a":["' + inside.encode() * MAX_COMMAS + b'"],"b":[":"]}'
    check_json_bounds(text)


def test_dense_frame_is_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON parser is not called."""
    monkeypatch.setattr(orjson, "loads", pytest.fail)
    with pytest.raises(InferenceCenterError) as caught:
        read_frame('{"op":"ping","a":[' + "[]," * MANY + "0]}")
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


_json_values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[{:,]}é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(alphabet='k"\\:[', max_size=4), inner, max_size=6)
    ),
    max_leaves=60,
)


def _structure(value: object) -> int:
    match value:
        case dict():
            return 1 + len(value) + sum(_structure(each) for each in value.values())
        case list():
            return 1 + sum(_structure(each) for each in value)
        case _:
            return 0


@pytest.mark.parametrize("dumps", [json.dumps, lambda value: json.dumps(value, ensure_ascii=False)])
@given(value=_json_values, limit=st.integers(0, 40))
def test_lists_objects_and_fields_count(dumps: Callable[[object], str], value: object, limit: int) -> None:
    """A text is refused exactly above the limit."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codec, "MAX_STRUCTURE", limit)
        try:
            check_json_bounds(dumps(value).encode())
        except InferenceCenterError:
            assert _structure(value) > limit
        else:
            assert _structure(value) <= limit
