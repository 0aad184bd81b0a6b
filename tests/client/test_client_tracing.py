"""A turn belongs to the span in which it was created."""

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


async def test_turn_carries_the_callers_span(scripted: Start) -> None:
    """It is the span in which the turn was created; without a span there is none."""
    received: list[str | None] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        for turn_id in ("t1", "t2"):
            received.append((await peer.begin(turn_id)).get("traceparent"))
            await peer.end(turn_id)

    async with Client(await scripted(daemon), "ic_a_b") as client:
        session = await client.create_session()
        with trace.use_span(_SPAN):
            turn = session.infer("hi")
        await turn.result()
        await session.ask("hi")
    assert received == [_PARENT, None]


def test_without_opentelemetry_no_span_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client does not import it."""
    with trace.use_span(_SPAN):
        assert current_traceparent() == _PARENT
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert current_traceparent() is None
    assert "opentelemetry.trace" not in sys.modules
