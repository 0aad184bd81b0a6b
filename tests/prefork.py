"""Starts daemons as forks of a process that has imported the package: ``fork_program``.

A daemon takes most of a second of CPU time to import, and the tests start many. So each worker of a run has a template
process (``python -m tests.prefork FD``), which imports once and forks for each start. A fork then has the arguments,
the environment and the output of ``python -m MODULE`` and runs that module to its end; from there on it is an ordinary
daemon, whose engine is a process of its own. Tests of the start itself run ``python -m`` (``tests/service``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PRELOADED: Final = ("inferencecenter.cli.app", "inferencecenter.cli.serve", "inferencecenter.daemon")
_MESSAGE_BYTES: Final = 2**20


class _Template:
    """The template process of this worker, and the end of a socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.prefork", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                pass_fds=(theirs.fileno(),),
            )

    def close(self) -> None:
        """End the process; forks that still run are not ended."""
        self._socket.close()
        self._process.wait()

    def ask(self, question: Mapping[str, Any], *, fds: Sequence[int] = ()) -> int:
        """Send a request, and return the number that answers it."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], fds)
            return int(self._socket.recv(_MESSAGE_BYTES))


_templates: list[_Template] = []


def close_template() -> None:
    """End the template process, if there is one."""
    while _templates:
        _templates.pop().close()


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that the template has forked; the template is its parent, and reaps it when its status is read."""

    def __init__(self, module: str, arguments: Sequence[str], *, env: Mapping[str, str], output: int) -> None:
        self._child_created = False  # for the base class's destructor: there is nothing to reap
        self.returncode = None
        if not _templates:
            _templates.append(_Template())
        self._template = _templates[0]
        self.args = [module, *arguments]
        self.pid = self._template.ask({"run": self.args, "env": dict(env), "cwd": str(Path.cwd())}, fds=(output,))
        self._ended = os.pidfd_open(self.pid)

    def __del__(self) -> None:
        """Close the descriptor of a process whose end was not awaited."""
        if getattr(self, "returncode", 0) is None and hasattr(self, "_ended"):
            os.close(self._ended)

    def poll(self) -> int | None:
        """Return the exit status, ``None`` while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        if self.returncode is None:
            polled = select.poll()
            polled.register(self._ended, select.POLLIN)
            if not polled.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._template.ask({"reap": self.pid})
            os.close(self._ended)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, sig)


def fork_program(module: str, *arguments: str, env: Mapping[str, str], output: int) -> ForkedProcess:
    """Run a module as ``python -m`` does, with standard output and error to the descriptor ``output``."""
    return ForkedProcess(module, arguments, env=env, output=output)


def _serve(asked: socket.socket) -> dict[str, Any]:
    """Answer requests until the worker ends; return only in a fork, with what it is to run."""
    while True:
        data, fds, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 1)
        if not data:
            os._exit(0)
        question: dict[str, Any] = json.loads(data)
        if "reap" in question:
            _, status = os.waitpid(question["reap"], 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        (output,) = fds
        if (pid := os.fork()) == 0:
            asked.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return question
        os.close(output)
        asked.send(str(pid).encode())


def _main() -> None:
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has only one thread"
    question = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(question["cwd"])
    os.environ.clear()
    os.environ.update(question["env"])
    module, *arguments = question["run"]
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
