"""Notifications to all connections, where one of them fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.protocol import events
from tests.server.harness import KITCHEN, StubWire, stub_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.server.hub import ConnectionHub


def fail(*_: object, **__: object) -> None:
    """Raise an error."""
    raise RuntimeError


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("send", lambda hub: hub.broadcast(events.Pong())),
        ("send", lambda hub: hub.notify_client("kitchen", events.Pong(), ())),
        ("close", lambda hub: hub.close_clients({"kitchen"})),
    ],
    ids=["broadcast", "tell", "close"],
)
async def test_failing_connection_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, what: str, act: Callable[[ConnectionHub], None]
) -> None:
    """The other one is notified in either order."""
    context, wires = stub_context(), [StubWire(), StubWire(), StubWire()]
    connections = [Connection(context, wire, address="192.0.2.1", v1=True) for wire in wires]
    for connection in connections:
        connection.authenticate(KITCHEN)
        context.hub.add(connection)
    monkeypatch.setattr(connections[1], what, fail)
    act(context.hub)
    reached = [bool(wire.frames or wire.finished) for wire in wires]
    assert reached == [True, False, True]
    for connection in connections:
        connection.lost()
    await context.close()
