"""The trace context of a turn: its own, or that of the socket's upgrade."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from websockets.typing import Subprotocol

from inferencecenter.sessions.journal import TurnQueued
from tests.server.harness import StubJournal, ask, receive, running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from inferencecenter.sessions.journal import Record
    from tests.server.harness import Running

OF_SOCKET = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OF_TURN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@dataclass
class RecordingJournal(StubJournal):
    """A journal that records what is written."""

    orders: list[TurnQueued] = field(default_factory=list)

    def write(self, record: Record, *, flush: bool) -> None:
        """Record it."""
        if isinstance(record, TurnQueued):
            self.orders.append(record)


@pytest.fixture
def journal() -> RecordingJournal:
    """A new journal."""
    return RecordingJournal()


@pytest.fixture
async def server(tmp_path: Path, journal: RecordingJournal) -> AsyncIterator[Running]:
    """A server with that journal."""
    async with running_server(tmp_path, journal=journal) as running:
        yield running


async def run_turn(server: Running, header: str | None, **fields: Any) -> dict[str, Any]:
    """Request a turn on a socket opened with a header, and return the first frame of its answer."""
    headers = {"Authorization": f"Bearer {server.token}"} | ({"traceparent": header} if header else {})
    async with server.connect(additional_headers=headers, subprotocols=[Subprotocol("inferencecenter.v1")]) as socket:
        await receive(socket, "auth_success")
        session_id = (await ask(socket, op="create_session"))["session_id"]
        return await ask(socket, op="infer", session_id=session_id, prompt="Hi", **fields)


@pytest.mark.parametrize(
    ("header", "fields", "expected"),
    [
        (None, {}, None),
        (OF_SOCKET, {}, OF_SOCKET),
        (None, {"traceparent": OF_TURN}, OF_TURN),
        (OF_SOCKET, {"traceparent": OF_TURN}, OF_TURN),
        ("00-nonsense-01", {}, None),
        ("x" * 4000, {}, None),
    ],
)
async def test_frame_trace_overrides_upgrade_trace(
    server: Running, journal: RecordingJournal, header: str | None, fields: dict[str, str], expected: str | None
) -> None:
    """An invalid header is ignored."""
    assert (await run_turn(server, header, **fields))["op"] == "queued"
    (ordered,) = journal.orders
    assert ordered.spec.request.traceparent == expected


@pytest.mark.parametrize("wrong", ["", "00-zz", OF_TURN.upper(), OF_TURN + "-x", 7, None])
async def test_invalid_traceparent_field_is_refused(server: Running, journal: RecordingJournal, wrong: object) -> None:
    """The error names the field, and no turn begins; null means absent."""
    answer = await run_turn(server, OF_SOCKET, traceparent=wrong)
    if wrong is None:
        assert journal.orders[0].spec.request.traceparent == OF_SOCKET
    else:
        assert (answer["op"], answer["code"], answer["field"]) == ("error", "invalid_request", "traceparent")
        assert journal.orders == []
