"""A supervisor with a real engine process on the echo backend, and what its turns are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from inferencecenter.ipc.messages import Delta, EngineOptions, Failed, Finished, Overflowed, Piece, Submit, TurnEvent
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol.params import Params, encode
from inferencecenter.supervisor.backoff import RestartPolicy
from inferencecenter.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 30.0
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Heard:
    """The events of one turn."""

    events: list[TurnEvent] = field(default_factory=list)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: TurnEvent) -> None:
        """Keep the event."""
        self.events.append(event)
        if isinstance(event, Delta):
            self.spoke.set()
        if isinstance(event, Finished | Failed | Overflowed):
            self.ended.set()

    @property
    def text(self) -> str:
        """What the turn said."""
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def terminal(self) -> list[Finished | Failed | Overflowed]:
        """Its terminal events, of which there must be one."""
        return [event for event in self.events if isinstance(event, Finished | Failed | Overflowed)]


class Watched:
    """A supervisor and the states it went through."""

    def __init__(
        self,
        *,
        max_queue: int = 10,
        queue_warning: int = 0,
        load_timeout_s: float = 60.0,
        lock_path: Path | None = None,
        **options: object,
    ) -> None:
        base = {"backend": "echo", "parent_pid": 0, "slots": 2}
        self.supervisor = Supervisor(
            EngineOptions(**(base | options)),  # type: ignore[arg-type]
            policy=RestartPolicy(min_s=0.01, max_s=0.02),
            max_queue=max_queue,
            queue_warning=queue_warning,
            load_timeout_s=load_timeout_s,
            lock_path=lock_path,
        )
        self.states: list[EngineState] = []
        self._changed = asyncio.Event()
        self.supervisor.subscribe(self._see)

    def _see(self, status: EngineStatus) -> None:
        self.states.append(status.state)
        self._changed.set()

    async def until(self, state: EngineState) -> None:
        """Wait for a state that has not been seen yet, and forget what came before it."""
        async with asyncio.timeout(TIMEOUT_S):
            while state not in self.states:
                self._changed.clear()
                await self._changed.wait()
        del self.states[: self.states.index(state) + 1]

    def submit(self, turn_id: str, text: str = "hello", **fields: object) -> Heard:
        """Submit a turn that is answered with ``text``."""
        heard = Heard()
        turn = Submit(
            turn_id=turn_id,
            session_id=turn_id,
            client_id="ada",
            priority=1,
            tokens=b"",
            pieces=(Piece(PROMPT.format(text), True),),
            params_json=encode(Params()),
        )
        self.supervisor.submit(msgspec.structs.replace(turn, **fields), heard)
        return heard
