"""A turn belongs to the span in which it was asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace

from inferencecenter.client import Client
from inferencecenter.client.options import current_traceparent

if TYPE_CHECKING:
    from tests.client.peer import Peer, Start

_SPAN = trace.NonRecordingSpan(
    trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
)
_PARENT = "00-00000000000000000000000000000abc-0000000000000def-01"


async def test_a_turn_goes_out_with_the_callers_span(scripted: Start) -> None:
    """That of the moment at which it is made, and none where there is none."""
    heard: list[str | None] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        for turn_id in ("t1", "t2"):
            heard.append((await peer.begin(turn_id)).get("traceparent"))
            await peer.end(turn_id)

    async with Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        with trace.use_span(_SPAN):
            turn = session.infer("hi")
        await turn.result()
        await session.ask("hi")
    assert heard == [_PARENT, None]


def test_programs_without_opentelemetry_have_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not imported for that."""
    with trace.use_span(_SPAN):
        assert current_traceparent() == _PARENT
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert current_traceparent() is None
    assert "opentelemetry.trace" not in sys.modules
