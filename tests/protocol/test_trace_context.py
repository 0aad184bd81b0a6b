"""Parsing of ``traceparent``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import read_frame
from inferencecenter.protocol.trace_context import check_traceparent, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
WRONG = {
    "": "must be like",
    "00": "must be like",
    GOOD.upper(): "must be like",
    f" {GOOD}": "must be like",
    f"00-{TRACE}-{SPAN}": "must be like",
    f"00-{TRACE[:-1]}-{SPAN}-01": "must be like",
    f"00_{TRACE}_{SPAN}_01": "must be like",
    f"00-{TRACE}-{SPAN}-0g": "must be like",
    f"ff-{TRACE}-{SPAN}-01": "version ff",
    f"{GOOD}-more": "data after its flags",
    f"{GOOD}\n": "data after its flags",
    f"01-{TRACE}-{SPAN}-01more": "data after its flags",
    f"01-{TRACE}-{SPAN}-01-\x07": "data after its flags",
    f"01-{TRACE}-{SPAN}-01-{'x' * 256}": "data after its flags",
    f"00-{'0' * 32}-{SPAN}-01": "zeros",
    f"00-{TRACE}-{'0' * 16}-01": "zeros",
}


@pytest.mark.parametrize("value", [GOOD, f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-ff", f"cc-{TRACE}-{SPAN}-01-new"])
def test_valid_traceparent_is_kept(value: str) -> None:
    """Unknown flags, and a later version with more fields, are valid, too."""
    assert check_traceparent(value) == value
    assert read_traceparent(f"  {value} ") == value


@pytest.mark.parametrize(("value", "why"), WRONG.items())
def test_invalid_traceparent_is_refused(value: str, why: str) -> None:
    """The error has the reason; zero ids and version ff are invalid too."""
    with pytest.raises(ValueError, match=why):
        check_traceparent(value)


@given(st.text(max_size=80))
def test_invalid_header_is_ignored(value: str) -> None:
    """Parsing a header never fails."""
    assert read_traceparent(value) in (None, value.strip())


def test_missing_header_gives_none() -> None:
    """Most upgrades have no such header."""
    assert read_traceparent(None) is None


@given(st.text(alphabet="0123456789abcdef-", max_size=60))
def test_infer_validates_traceparent(value: str) -> None:
    """The error names the field."""
    frame = read_frame(f'{{"op": "infer", "session_id": "s", "prompt": "x", "traceparent": "{value}"}}')
    if read_traceparent(value) == value:
        assert frame.parse().model_dump()["traceparent"] == value
        return
    with pytest.raises(InferenceCenterError) as refused:
        frame.parse()
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "traceparent")
    assert refused.value.message.startswith("traceparent ")
