"""A supervisor with a real engine process, and turns that record their events."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import (
    Cancelled,
    ContextFull,
    Failed,
    Finished,
    PromptSegment,
    Submit,
    TokenDelta,
    TurnEvent,
)
from inferencecenter.ipc.port import EngineState, EngineStatus, SessionKv
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.protocol.params import Params, encode
from inferencecenter.supervisor.process import LocalLauncher
from inferencecenter.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from inferencecenter.supervisor.poison_turns import CrashLimit
    from inferencecenter.supervisor.process import EngineLauncher

TIMEOUT_S = 60.0
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
Terminal = Finished | Failed | ContextFull | Cancelled


def order(turn_id: str, text: str = "hello", **fields: object) -> Submit:
    """Return a submission that is answered with ``text``."""
    submit = Submit(
        turn_id=turn_id,
        session_id=turn_id,
        client_id="ada",
        priority=1,
        tokens=b"",
        pieces=(PromptSegment(PROMPT.format(text), True),),
        params_json=encode(Params()),
    )
    return msgspec.structs.replace(submit, **fields)


@dataclass
class RecordingTurn:
    """A turn that records its events, and can be resubmitted. Implements ``EngineTurn``."""

    order: Submit
    events: list[TurnEvent] = field(default_factory=list)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    submissions: int = 0
    interruptions: int = 0
    recalls: int = 0
    nodes: list[str] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    was_delayed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.order.turn_id

    @property
    def client_id(self) -> str:
        """The client's id."""
        return self.order.client_id

    @property
    def tokens(self) -> bytes:
        """The generated tokens, packed."""
        return self.order.answer + b"".join(event.tokens for event in self.events if isinstance(event, TokenDelta))

    @property
    def n_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) // 4

    @property
    def session_kv(self) -> SessionKv:
        """The KV of its session."""
        return SessionKv(self.order.session_id, len(self.order.tokens) // 4 + self.n_tokens)

    def submission(self, then: Callable[[], None]) -> Submit | None:
        """Return the rest of the turn."""
        self.submissions += 1
        return msgspec.structs.replace(
            self.order, answer=self.tokens, shown_chars=self.order.shown_chars + len(self.text)
        )

    def on_engine_event(self, event: TurnEvent) -> None:
        """Record the event."""
        self.events.append(event)
        if isinstance(event, TokenDelta):
            self.spoke.set()
        if isinstance(event, Terminal):
            self.ended.set()

    def on_placed(self, node: str) -> None:
        """Record the machine."""
        self.nodes.append(node)

    def on_delay(self, seconds: float) -> None:
        """Record the delay."""
        self.delays_s.append(seconds)
        self.was_delayed.set()

    def on_engine_lost(self) -> None:
        """Count the loss."""
        self.interruptions += 1
        self.spoke.clear()

    def resubmit(self) -> None:
        """Count the recall."""
        self.recalls += 1

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(event.text for event in self.events if isinstance(event, TokenDelta))

    @property
    def terminal(self) -> list[Terminal]:
        """The terminal events, of which there must be one."""
        return [event for event in self.events if isinstance(event, Terminal)]


class ObservedSupervisor:
    """A supervisor and its states; the fixture ``stopped`` stops it."""

    left: ClassVar[list[ObservedSupervisor]] = []

    def __init__(
        self,
        *,
        max_queue: int = 10,
        queue_warning: int = 0,
        load_timeout_s: float = 60.0,
        hang_timeout_s: float = 60.0,
        sleep_after_s: float | None = None,
        max_restarts: int = 100,
        live_sessions: Callable[[], Collection[str]] | None = None,
        plan_again: Callable[[EngineOptions], EngineOptions] | None = None,
        ends_with_it: Callable[[], bool] = lambda: False,
        admit: Callable[[], Awaitable[bool]] | None = None,
        backoff_s: float = 0.01,
        crash_limit: CrashLimit | None = None,
        lock_path: Path | None = None,
        launcher: EngineLauncher | None = None,
        node: str = LOCAL_NODE,
        **options: object,
    ) -> None:
        base: dict[str, object] = {
            "backend": "echo",
            "slots": 2,
            "max_queue": max_queue,
            "queue_warning": queue_warning,
            "load_timeout_s": load_timeout_s,
            "hang_timeout_s": hang_timeout_s,
            "sleep_after_s": -1.0 if sleep_after_s is None else sleep_after_s,
            "max_restarts": max_restarts,
            "restart_backoff_min_s": backoff_s,
            "restart_backoff_max_s": min(2 * backoff_s, 3600.0),
        }
        self.supervisor = Supervisor(
            EngineOptions(**(base | options)),
            live_sessions=live_sessions,
            plan_again=plan_again,
            ends_with_it=ends_with_it,
            admit=admit,
            crash_limit=crash_limit,
            node=node,
            launcher=launcher or LocalLauncher(lock_path),
        )
        self.left.append(self)
        self.states: list[EngineState] = []
        self._changed = asyncio.Event()
        self.supervisor.subscribe(self._see)

    def _see(self, status: EngineStatus) -> None:
        self.states.append(status.state)
        self._changed.set()

    async def until(self, state: EngineState) -> None:
        """Wait for a state that was not seen yet, and drop those before it."""
        async with asyncio.timeout(TIMEOUT_S):
            while state not in self.states:
                self._changed.clear()
                await self._changed.wait()
        del self.states[: self.states.index(state) + 1]

    def submit(self, turn_id: str, text: str = "hello", **fields: object) -> RecordingTurn:
        """Submit a turn that is answered with ``text``."""
        heard = RecordingTurn(order(turn_id, text, **fields))
        self.supervisor.submit(heard)
        return heard

    def kill(self) -> None:
        """Kill the engine with SIGKILL."""
        pid = self.supervisor.status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


async def end_of(heard: RecordingTurn) -> Finished:
    """Wait until a turn has finished and return how."""
    await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    (end,) = heard.terminal
    assert isinstance(end, Finished)
    return end
