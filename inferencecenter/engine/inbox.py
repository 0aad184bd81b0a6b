"""What waits to be handled by the engine's loop, put in by the reader thread and the workers."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.ipc.messages import (
    Abort,
    CancelLookup,
    Detokenize,
    Keep,
    KvLimit,
    Limit,
    Release,
    Submit,
    Suspend,
    Tokenize,
)

if TYPE_CHECKING:
    from inferencecenter.engine.grammars import CompiledGrammar
    from inferencecenter.engine.outputs import TurnOutput
    from inferencecenter.errors import InferenceCenterError


ROOM_BYTES: Final = 256 * 1024 * 1024
"""Bytes of commands that the reader takes in while the loop is busy; then the socket is left unread."""


@dataclass(frozen=True, slots=True)
class Received:
    """A command of the front, with the monotonic second at which it came."""

    command: Submit | Abort | Release | Keep | Tokenize | Detokenize | CancelLookup | Limit | KvLimit | Suspend
    at_s: float


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a submitted turn is compiled; its prompt is not tokenized yet."""

    turn_id: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submitted turn whose prompt has become ``tokens``, of which the first ``prefix_tokens`` are shared.

    ``tokens`` go on with what the turn answered before, if it did, and ``output`` knows of that.
    """

    turn_id: str
    tokens: list[int]
    prefix_tokens: int
    output: TurnOutput

    @property
    def prompt(self) -> list[int]:
        """The tokens without those that the turn answered before."""
        return self.tokens[: len(self.tokens) - self.output.n_answered]


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A submitted turn whose prompt could not become tokens."""

    turn_id: str
    error: InferenceCenterError


@dataclass(frozen=True, slots=True)
class Fetched:
    """A parked sequence was read from disk, or could not be."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The front is gone."""


Command: TypeAlias = Received | GrammarReady | Prepared | Unprepared | Fetched | Closed


class Inbox:
    """A queue that knows whether something in it should not wait for the end of a step.

    What the reader thread puts in is bounded in bytes: where a step takes long it waits for the loop, and the front for
    it. What workers put in is bounded by the turns that there are.

    Args:
        room_bytes: How much of commands may wait; one that is larger is taken in alone.
    """

    def __init__(self, *, room_bytes: int = ROOM_BYTES) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._urgent = False
        self._room_bytes = room_bytes
        self._held_bytes = 0
        self._taken = threading.Condition()

    @property
    def urgent(self) -> bool:
        """Whether a turn is to end; work done for it meanwhile is lost."""
        return self._urgent

    @property
    def empty(self) -> bool:
        """Whether nothing has come in."""
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Add a command; from any thread. One that was received waits for room."""
        if size_bytes := _size_bytes(command):
            with self._taken:
                self._taken.wait_for(lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._room_bytes)
                self._held_bytes += size_bytes
        self._commands.put(command)
        if isinstance(command, Closed) or (
            isinstance(command, Received) and isinstance(command.command, Abort | Release | Suspend)
        ):
            self._urgent = True

    def get(self, *, timeout_s: float | None) -> Command | None:
        """Wait for the next command; ``None`` when ``timeout_s`` is over before there is one."""
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._free(_size_bytes(command))
        return command

    def drain(self) -> list[Command]:
        """Return all that has come in."""
        # Before the queue is emptied: what is put meanwhile may be called urgent once too often, but never too seldom.
        self._urgent = False
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                self._free(sum(map(_size_bytes, commands)))
                return commands

    def _free(self, size_bytes: int) -> None:
        if size_bytes:
            with self._taken:
                self._held_bytes -= size_bytes
                self._taken.notify_all()


def _size_bytes(command: Command) -> int:
    """Return what a command counts of the room: only those that bring texts do."""
    if isinstance(command, Received) and isinstance(command.command, Submit | Tokenize | Detokenize):
        return command.command.size_bytes
    return 0
