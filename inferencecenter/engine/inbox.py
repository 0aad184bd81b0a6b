"""What wakes the engine's loop: commands of the front, results of workers, deadlines, the end of a throttling pause."""

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
"""Bytes of commands that the reader takes in while the loop is busy; then the socket is left unread."""
# With no more than these it is not worth looking which of them are of turns that have ended.
_FEWEST: Final = 1024


@dataclass(frozen=True, slots=True)
class ReceivedCommand:
    """A command of the front, with the monotonic second at which it came."""

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
    """A submitted turn whose prompt has become ``tokens``, of which the first ``prefix_tokens`` are shared.

    ``tokens`` go on with what the turn answered before, if it did, and ``output`` knows of that.
    """

    turn_id: str
    tokens: list[int]
    prefix_tokens: int
    output: OutputProcessor

    @property
    def prompt(self) -> list[int]:
        """The tokens without those that the turn answered before."""
        return self.tokens[: len(self.tokens) - self.output.n_answered]


@dataclass(frozen=True, slots=True)
class TokenizationFailed:
    """A submitted turn whose prompt could not become tokens."""

    turn_id: str
    error: InferenceCenterError


@dataclass(frozen=True, slots=True)
class KvFetched:
    """A parked sequence was read from disk, or could not be."""


@dataclass(frozen=True, slots=True)
class FrontDisconnected:
    """The front is gone."""


Command: TypeAlias = ReceivedCommand | GrammarReady | TokenizedTurn | TokenizationFailed | KvFetched | FrontDisconnected


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
        if isinstance(command, FrontDisconnected) or (
            isinstance(command, ReceivedCommand) and isinstance(command.command, AbortTurn | ReleaseSession | Suspend)
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
    if isinstance(command, ReceivedCommand) and isinstance(
        command.command, Submit | TokenizeRequest | DetokenizeRequest
    ):
        return command.command.size_bytes
    return 0


class StepThrottle:
    """Waits after each step, heeding what comes in.

    Args:
        inbox: Where commands come from.
        clock: Monotonic seconds.
    """

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._clock = clock
        self._length_s = 0.0
        self._until_s = -math.inf

    @property
    def is_set(self) -> bool:
        """Whether there is to be a pause after each step."""
        return self._length_s > 0

    def change(self, length_s: float) -> None:
        """Let pauses be so long from the next step on, and end the one that is."""
        self._length_s, self._until_s = length_s, -math.inf

    def begin(self) -> None:
        """Take note that a step has ended."""
        if self._length_s:
            self._until_s = self._clock() + self._length_s

    def command(self) -> Command | None:
        """Return the next command that comes in during the pause, ``None`` when it is over."""
        if self._until_s == -math.inf:
            return None
        left_s = self._until_s - self._clock()
        command = self._inbox.get(timeout_s=left_s) if left_s > 0 else None
        if command is None:
            self._until_s = -math.inf
        return command


class Deadlines:
    """Turns by the monotonic second at which one of their times runs out.

    What is due is a hint: the turn may have ended or begun since, which is for the caller to see. Deadlines of turns
    that have ended are forgotten when they are the greater part of all.

    Args:
        lives: Tells whether a turn has not ended.
    """

    def __init__(self, lives: Callable[[str], bool]) -> None:
        self._lives = lives
        self._due: list[tuple[float, str]] = []
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._due)

    def add(self, turn_id: str, deadlines_s: Iterable[float]) -> None:
        """Take note of a turn's deadlines; infinite ones never come."""
        for due_s in deadlines_s:
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, turn_id))
        if len(self._due) > self._most:
            self._due = [(due_s, turn_id) for due_s, turn_id in self._due if self._lives(turn_id)]
            heapq.heapify(self._due)
            self._most = max(_FEWEST, 2 * len(self._due))

    def passed(self, now: float) -> tuple[str, ...]:
        """Return the turns with a deadline up to ``now``, and forget those deadlines."""
        turn_ids: list[str] = []
        while self._due and self._due[0][0] <= now:
            turn_ids.append(heapq.heappop(self._due)[1])
        return tuple(turn_ids)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next deadline, at least 0, or ``None`` when there is none."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def clear(self) -> None:
        """Forget all deadlines: there is no turn any more."""
        self._due.clear()
