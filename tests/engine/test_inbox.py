"""The inbox of the engine's loop."""

from __future__ import annotations

import os
import threading

import pytest

from inferencecenter.engine.inbox import FrontDisconnected, Inbox, ReceivedCommand, _read
from inferencecenter.ipc.messages import AbortTurn
from tests.engine.harness import TIMEOUT_S, submit


def test_inbox_is_bounded_in_bytes() -> None:
    """The reader pauses until the loop has taken earlier messages, and leaves the rest in the socket."""
    inbox = Inbox(room_bytes=10_000)
    names = [f"t{number}" for number in range(30)]
    put: list[str] = []

    def read() -> None:
        for name in names:
            inbox.put(ReceivedCommand(submit(name, "x" * 4000), 0.0))
            put.append(name)
        inbox.put(FrontDisconnected())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    got: list[str] = []
    while len(got) < len(names):
        command = inbox.get(timeout_s=TIMEOUT_S)
        assert isinstance(command, ReceivedCommand)
        assert len(put) - len(got) <= 3
        got += [each.command.turn_id for each in (command, *inbox.drain()) if isinstance(each, ReceivedCommand)]  # type: ignore[union-attr]
    reader.join(TIMEOUT_S)
    assert got == names
    assert inbox._held_bytes == 0


def test_oversized_message_is_admitted_alone() -> None:
    """A message larger than the inbox does not wait forever, and one without text never waits."""
    inbox = Inbox(room_bytes=100)
    inbox.put(ReceivedCommand(submit("large", "x" * 4000), 0.0))
    inbox.put(ReceivedCommand(AbortTurn("large"), 0.0))
    assert inbox.urgent
    assert len(inbox.drain()) == 2
    inbox.put(ReceivedCommand(submit("next", "x" * 4000), 0.0))
    assert inbox.get(timeout_s=TIMEOUT_S) is not None


class Unreadable:
    """A pipe whose reading fails, as that of a socket may."""

    def read(self) -> None:
        """Fail."""
        raise OSError("no buffer space available")


def test_failed_reader_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reads no more messages would keep its memory, and its turns would wait forever."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    inbox = Inbox()
    _read(Unreadable(), inbox)  # type: ignore[arg-type]
    assert isinstance(inbox.get(timeout_s=0), FrontDisconnected)
    assert ended == [os.EX_SOFTWARE]
