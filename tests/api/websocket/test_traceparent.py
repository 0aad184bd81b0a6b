"""The client's trace that a turn belongs to: its own, or that of the socket's upgrade."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from websockets.typing import Subprotocol

from inferencecenter.sessions.journal import TurnQueued
from tests.server.harness import StubJournal, ask, hear, running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from inferencecenter.sessions.journal import Record
    from tests.server.harness import Running

OF_SOCKET = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OF_TURN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@dataclass
class Kept(StubJournal):
    """A store that remembers what was ordered."""

    orders: list[TurnQueued] = field(default_factory=list)

    def write(self, record: Record, *, flush: bool) -> None:
        """Keep it."""
        if isinstance(record, TurnQueued):
            self.orders.append(record)


@pytest.fixture
def journal() -> Kept:
    """A fresh one."""
    return Kept()


@pytest.fixture
async def server(tmp_path: Path, journal: Kept) -> AsyncIterator[Running]:
    """A server that writes its sessions there."""
    async with running_server(tmp_path, journal=journal) as running:
        yield running


async def order(server: Running, header: str | None, **fields: Any) -> dict[str, Any]:
    """Ask a question over a socket that was opened with a header, and return its answer."""
    headers = {"Authorization": f"Bearer {server.token}"} | ({"traceparent": header} if header else {})
    async with server.connect(additional_headers=headers, subprotocols=[Subprotocol("inferencecenter.v1")]) as socket:
        await hear(socket, "auth_success")
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
async def test_a_turn_belongs_to_the_nearest_trace(
    server: Running, journal: Kept, header: str | None, fields: dict[str, str], expected: str | None
) -> None:
    """What the frame says counts before what the upgrade said; a wrong header is passed over."""
    assert (await order(server, header, **fields))["op"] == "queued"
    (ordered,) = journal.orders
    assert ordered.spec.request.traceparent == expected


@pytest.mark.parametrize("wrong", ["", "00-zz", OF_TURN.upper(), OF_TURN + "-x", 7, None])
async def test_a_wrong_field_is_refused(server: Running, journal: Kept, wrong: object) -> None:
    """By its name, and no turn begins; null is as if it were left out."""
    answer = await order(server, OF_SOCKET, traceparent=wrong)
    if wrong is None:
        assert journal.orders[0].spec.request.traceparent == OF_SOCKET
    else:
        assert (answer["op"], answer["code"], answer["field"]) == ("error", "invalid_request", "traceparent")
        assert journal.orders == []
