"""Commands for the engine's loop: the thread that reads them from the front, the queue, and the pauses between steps.

Mechanism: the loop handles commands between steps, so a command waits for the end of the running one, unless it is
urgent. The reader never waits for the loop, except that commands of more than ``INBOX_BYTES`` are not read ahead; it
also ends the process when the front disconnects, whatever the loop does.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.engine.tokenization import PreparationResult, TextsTokenized
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    AbortTurn,
    CancelLookup,
    Configure,
    DetokenizeRequest,
    Embed,
    EngineLimits,
    ImageData,
    KvRamLimit,
    Reattach,
    ReleaseSession,
    RetainSessions,
    Submit,
    Suspend,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.framing import BlockingChannel

INBOX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of commands that are read while the loop is busy; beyond that the socket is not read."""
_GRACE_S: Final = 1.0
_URGENT: Final = (AbortTurn, ReleaseSession, Suspend, Reattach)
_SIZED: Final = (Submit, Embed, TokenizeRequest, DetokenizeRequest, ImageData)


@dataclass(slots=True)
class ReceivedCommand:
    """A command from the front, with the monotonic second of its arrival; only content of clients has a size."""

    command: (
        Submit
        | Embed
        | AbortTurn
        | ReleaseSession
        | RetainSessions
        | TokenizeRequest
        | DetokenizeRequest
        | CancelLookup
        | ImageData
        | EngineLimits
        | KvRamLimit
        | Suspend
        | Reattach
    )
    at_s: float
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        command = self.command
        self.size_bytes = command.size_bytes if isinstance(command, _SIZED) else 0


@dataclass(frozen=True, slots=True)
class KvFetched:
    """A load of a parked sequence from disk has finished or failed."""


@dataclass(frozen=True, slots=True)
class FrontDisconnected:
    """The connection to the front has closed."""


Command: TypeAlias = ReceivedCommand | PreparationResult | TextsTokenized | KvFetched | FrontDisconnected


class Inbox:
    """Command queue that knows whether a command must not wait for the end of a step.

    Commands of the reader thread are bounded in bytes: during a long step the reader blocks, which applies backpressure
    to the front. Results of workers are bounded by the number of turns.

    Args:
        room_bytes: Bytes of commands that may wait; a larger one is accepted alone.
    """

    def __init__(self, *, room_bytes: int = INBOX_BYTES) -> None:
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
            isinstance(command, ReceivedCommand)
            and isinstance(command.command, AbortTurn | ReleaseSession | Suspend | Reattach)
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
    return command.size_bytes if isinstance(command, ReceivedCommand) else 0


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

    def begin(self, *, least_s: float = 0.0) -> None:
        """Start the pause at the end of a step, of at least ``least_s``."""
        if length_s := max(self._length_s, least_s):
            self._until_s = self._clock() + length_s

    def command(self) -> Command | None:
        """Return the next command during the pause, ``None`` when it is over."""
        if self._until_s == -math.inf:
            return None
        left_s = self._until_s - self._clock()
        command = self._inbox.get(timeout_s=left_s) if left_s > 0 else None
        if command is None:
            self._until_s = -math.inf
        return command


def watch(pipe: BlockingChannel, inbox: Inbox) -> None:
    """Start the thread that queues the front's messages and ends the process when the front disconnects."""
    threading.Thread(target=_read, args=(pipe, inbox), name="reader", daemon=True).start()


def _read(pipe: BlockingChannel, inbox: Inbox) -> None:
    status = os.EX_OK
    try:
        while (message := pipe.read()) is not None:
            if isinstance(message, Configure):
                raise FramingError("a second Configure")
            inbox.put(ReceivedCommand(message, time.monotonic()))
    except FramingError as error:
        sys.stderr.write(f"inferencecenter.engine: {error}\n")
        status = os.EX_PROTOCOL
    except Exception:  # noqa: BLE001 - an engine without a reader must not live on
        traceback.print_exc()
        status = os.EX_SOFTWARE
    inbox.put(FrontDisconnected())
    # The main thread may be loading a model or decoding for many seconds and cannot be interrupted there, but the
    # supervisor needs the memory back now, and this process holds no only copy of anything.
    time.sleep(_GRACE_S)
    os._exit(status)
