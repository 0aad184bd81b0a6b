"""The real engine process, with the test as its front."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inferencecenter.ipc.engine_child import EngineChild, send_descriptors
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import Configure, LoadFailed, LogLine, Ready, Suspend, Suspended
from tests.engine.harness import TIMEOUT_S, Front
from tests.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.ipc.messages import ModelInfo


class Child:
    """A process that has received its options."""

    def __init__(self, options: EngineOptions) -> None:
        self.heartbeat = Heartbeat.create()
        self._child = EngineChild()
        self.process = self._child.process
        send_descriptors(self._child.socket, (self.heartbeat.fd,))
        self.front = Front(self._child.socket)
        self.front.send(Configure(options.model_dump_json().encode()))

    @property
    def log(self) -> list[str]:
        """The engine's log."""
        return [frame.event for frame in self.front.frames if isinstance(frame, LogLine) and frame.source == "engine"]

    def ready(self) -> ModelInfo:
        """Wait until the model is loaded and return its description."""
        self.front.read_until(lambda: any(isinstance(frame, Ready | LoadFailed) for frame in self.front.frames))
        failed = [frame for frame in self.front.frames if isinstance(frame, LoadFailed)]
        assert not failed, failed
        (ready,) = (frame for frame in self.front.frames if isinstance(frame, Ready))
        return ready.model

    def suspend(self) -> int:
        """Suspend, and return the number of saved sessions."""
        self.front.send(Suspend())
        self.front.read_until(lambda: any(isinstance(frame, Suspended) for frame in self.front.frames))
        (suspended,) = (frame for frame in self.front.frames if isinstance(frame, Suspended))
        return suspended.sessions

    def wait(self) -> int:
        """Return the exit status."""
        return self.process.wait(TIMEOUT_S)

    def discard(self) -> None:
        """End the process, if it still runs, and free what it used."""
        self.front.close()
        self._child.discard()
        if not self.heartbeat._page.closed:
            self.heartbeat.close()


def child_of(options: EngineOptions) -> Child:
    """Start a process that is ended after the test in any case."""
    child = Child(options)
    leftovers.callback(child.discard)
    return child


@contextmanager
def running(options: EngineOptions) -> Iterator[Child]:
    """Run a process, and wait until its model is loaded."""
    child = Child(options)
    try:
        child.ready()
        yield child
        child.front.close()
        child.wait()
    finally:
        child.discard()


def demo_options(path: Path, **changes: object) -> EngineOptions:
    """Return options for a model file: four slots of 256 tokens, one thread, small batches."""
    options = EngineOptions(
        backend="llama",
        parent_pid=os.getpid(),
        model_path=str(path),
        slots=4,
        n_ctx=256,
        n_threads=1,
        n_batch=64,
        n_ubatch=64,
    )
    return options.replace(**changes)
