"""The real engine process, with the test as its front."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inferencecenter.ipc.engine_child import send_descriptors
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
    """A process that has been told its options."""

    def __init__(self, options: EngineOptions) -> None:
        ours, theirs = socket.socketpair()
        self.heartbeat = Heartbeat.create()
        command = [sys.executable, "-m", "inferencecenter.engine", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        send_descriptors(ours, (self.heartbeat.fd,))
        self.front = Front(ours)
        self.front.send(Configure(options.model_dump_json().encode()))

    @property
    def log(self) -> list[str]:
        """What the engine itself logged."""
        return [frame.event for frame in self.front.frames if isinstance(frame, LogLine) and frame.source == "engine"]

    def ready(self) -> ModelInfo:
        """Wait until the model is loaded and return what is told of it."""
        self.front.read_until(lambda: any(isinstance(frame, Ready | LoadFailed) for frame in self.front.frames))
        (ready,) = (frame for frame in self.front.frames if isinstance(frame, Ready))
        return ready.model

    def suspend(self) -> int:
        """Have the KV brought to disk, and return how many sessions are there."""
        self.front.send(Suspend())
        self.front.read_until(lambda: any(isinstance(frame, Suspended) for frame in self.front.frames))
        (suspended,) = (frame for frame in self.front.frames if isinstance(frame, Suspended))
        return suspended.sessions

    def wait(self) -> int:
        """Return the exit status."""
        return self.process.wait(TIMEOUT_S)


def child_of(options: EngineOptions) -> Child:
    """Start a process that is gone after the test, whatever that leaves undone."""
    child = Child(options)

    def clean_up() -> None:
        child.front.close()
        child.process.kill()
        child.process.wait()
        if not child.heartbeat._page.closed:
            child.heartbeat.close()

    leftovers.callback(clean_up)
    return child


@contextmanager
def running(options: EngineOptions) -> Iterator[Child]:
    """Run a process until its model is loaded, and end it at the end."""
    child = Child(options)
    try:
        child.ready()
        yield child
        child.front.close()
        child.wait()
    finally:
        child.process.kill()
        child.process.wait()
        child.heartbeat.close()


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
