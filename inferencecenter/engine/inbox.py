"""Inputs of the engine's loop: commands, worker results, deadlines, the throttle's pause."""

from __future__ import annotations

import heapq
import math
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.ipc.messages import (
    AbortTurn,
    CancelLookup,
    DetokenizeRequest,
    EngineLimits,
    KvRamLimit,
    ReleaseSession,
    RetainSessions,
    Submit,
    Suspend,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inferencecenter.core.errors import InferenceCenterError
    from inferencecenter.engine.grammar_cache import CompiledGrammar
    from inferencecenter.engine.output_processor import OutputProcessor

ROOM_BYTES: Final = 256 * 1024 * 1024
"""Bytes of commands that are read while the loop is busy; beyond that the socket is not read."""
# Below this count, pruning deadlines of ended turns is not worth it.
_FEWEST: Final = 1024


@dataclass(frozen=True, slots=True)
class ReceivedCommand:
    """A command from the front, with the monotonic second of its arrival."""

    command: (
        Submit
        | AbortTurn
        | ReleaseSession
        | RetainSessions
        | TokenizeRequest
        | DetokenizeRequest
        | CancelLookup
        | EngineLimits
        | KvRamLimit
        | Suspend
    )
    at_s: float


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a submitted turn is compiled; its prompt is not tokenized yet."""

    turn_id: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class TokenizedTurn:
    """A submitted turn with its prompt's ``tokens``, of which the first ``prefix_tokens`` are shared.

    ``tokens`` continue with the turn's earlier answer, if any, which ``output`` has replayed.
    """

    turn_id: str
    tokens: list[int]
    prefix_tokens: int
    output: OutputProcessor

    @property
    def prompt(self) -> list[int]:
        """The tokens without the earlier answer."""
        return self.tokens[: len(self.tokens) - self.output.n_answered]


@dataclass(frozen=True, slots=True)
class TokenizationFailed:
    """A submitted turn whose prompt could not be tokenized."""

    turn_id: str
    error: InferenceCenterError


@dataclass(frozen=True, slots=True)
class KvFetched:
    """A load of a parked sequence from disk has finished or failed."""


@dataclass(frozen=True, slots=True)
class FrontDisconnected:
    """The connection to the front has closed."""


Command: TypeAlias = ReceivedCommand | GrammarReady | TokenizedTurn | TokenizationFailed | KvFetched | FrontDisconnected


class Inbox:
    """Command queue that knows whether a command must not wait for the end of a step.

    Commands of the reader thread are bounded in bytes: during a long step the reader blocks, which applies backpressure
    to the front. Results of workers are bounded by the number of turns.

    Args:
        room_bytes: Bytes of commands that may wait; a larger one is accepted alone.
    """

    def __init__(self, *, room_bytes: int = ROOM_BYTES) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._urgent = False
        self._room_bytes = room_bytes
        self._held_bytes = 0
        self._taken = threading.Condition()

    @property
    def urgent(self) -> bool:
        """Whether a turn must end; further work for it would be discarded."""
        return self._urgent

    @property
    def empty(self) -> bool:
        """Whether no command is queued."""
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Add a command, from any thread; a received one blocks until there is room."""
        if size_bytes := _size_bytes(command):
            with self._taken:
                self._taken.wait_for(lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._room_bytes)
                self._held_bytes += size_bytes
        self._commands.put(command)
        if isinstance(command, FrontDisconnected) or (
            isinstance(command, ReceivedCommand) and isinstance(command.command, AbortTurn | ReleaseSession | Suspend)
        ):
            self._urgent = True

    def get(self, *, timeout_s: float | None) -> Command | None:
        """Wait for the next command; ``None`` after ``timeout_s``."""
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._free(_size_bytes(command))
        return command

    def drain(self) -> list[Command]:
        """Return all queued commands."""
        # Cleared before the queue is emptied: a concurrent put may set ``urgent`` once too often, but it is never
        # missed.
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
    """Return the bytes a command counts for; only commands that carry text count."""
    if isinstance(command, ReceivedCommand) and isinstance(
        command.command, Submit | TokenizeRequest | DetokenizeRequest
    ):
        return command.command.size_bytes
    return 0


class StepThrottle:
    """Pauses after each step while handling commands.

    Args:
        inbox: Source of commands.
        clock: Monotonic seconds.
    """

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._clock = clock
        self._length_s = 0.0
        self._until_s = -math.inf

    @property
    def is_set(self) -> bool:
        """Whether there is a pause after each step."""
        return self._length_s > 0

    def change(self, length_s: float) -> None:
        """Set the length of pauses from the next step on and end the current one."""
        self._length_s, self._until_s = length_s, -math.inf

    def begin(self) -> None:
        """Start the pause at the end of a step."""
        if self._length_s:
            self._until_s = self._clock() + self._length_s

    def command(self) -> Command | None:
        """Return the next command during the pause, ``None`` when it is over."""
        if self._until_s == -math.inf:
            return None
        left_s = self._until_s - self._clock()
        command = self._inbox.get(timeout_s=left_s) if left_s > 0 else None
        if command is None:
            self._until_s = -math.inf
        return command


class Deadlines:
    """Monotonic deadlines of turns.

    A passed deadline is a hint that the caller must verify: the turn may have begun or ended since. Deadlines of ended
    turns are pruned once they are the majority.

    Args:
        is_active: Returns whether a turn has not ended.
    """

    def __init__(self, is_active: Callable[[str], bool]) -> None:
        self._is_active = is_active
        self._due: list[tuple[float, str]] = []
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._due)

    def add(self, turn_id: str, deadlines_s: Iterable[float]) -> None:
        """Add a turn's deadlines; infinite ones are ignored."""
        for due_s in deadlines_s:
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, turn_id))
        if len(self._due) > self._most:
            self._due = [(due_s, turn_id) for due_s, turn_id in self._due if self._is_active(turn_id)]
            heapq.heapify(self._due)
            self._most = max(_FEWEST, 2 * len(self._due))

    def passed(self, now: float) -> tuple[str, ...]:
        """Remove and return the turns with a deadline up to ``now``."""
        turn_ids: list[str] = []
        while self._due and self._due[0][0] <= now:
            turn_ids.append(heapq.heappop(self._due)[1])
        return tuple(turn_ids)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next deadline, at least 0, or ``None`` when there is none."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def clear(self) -> None:
        """Remove all deadlines."""
        self._due.clear()
