"""Starts this project's programs as forks of a process that has imported it.

A daemon takes most of a second of CPU time to import, an engine a third, and the tests start many of both. So each
worker of a run has a template process (``python -m tests.prefork FD``), which imports once and forks for each start.
``install`` makes ``subprocess`` do this for ``python -m MODULE`` with a module of this project; other programs are
executed. A fork has the arguments, descriptors, environment and parent of the executed program and runs the module to
its end. Tests of the start itself execute (``tests/service``).

A forked daemon forks its first engine itself, while it has one thread. Later, when it starts other engines or restarts
a lost one, it has threads, so it forks a template of its own with the first engine.
"""

from __future__ import annotations

import asyncio
import asyncio.unix_events
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ROOT: Final = Path(__file__).parents[1]
_PYTHON: Final = [sys.executable, "-m"]
_PACKAGES: Final = ("inferencecenter", "benchmarks", "tests", "http")
_PRELOADED: Final = (
    "inferencecenter.cli.app",
    "inferencecenter.cli.chat",
    "inferencecenter.cli.model",
    "inferencecenter.cli.run",
    "inferencecenter.cli.serve",
    "inferencecenter.cli.stats",
    "inferencecenter.cli.token",
    "inferencecenter.first_engine",
    "inferencecenter.daemon",
    "inferencecenter.api.operations",
    "inferencecenter.engine.__main__",
    "inferencecenter.engine.grammar_sandbox",
    "inferencecenter.sessions.prompt.template_worker",
    "benchmarks.load",
    "tests.prebuilt",
)
_MCP: Final = ("mcp.server", "inferencecenter.mcp.connection")
"""Imported for the first MCP server and the first daemon that uses one: 1.3 s of CPU time."""
_MODULE: Final = "tests.prefork"
_NEUTRAL: Final[dict[str, object]] = {
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "start_new_session": False,
    "process_group": -1,
}
"""What a fork does not do; a start with other values is executed."""
_READ_AT_EXEC: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
_OF_FILES_AND_PIPES: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED")
"""What Python reads at its start, but what does not change what a program does."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_SENT_TO_GROUPS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_MESSAGE_BYTES: Final = 2**20
_ABOVE: Final = 512
"""Received descriptors are moved above this number, to free those that they become."""
_COMMAND_LINE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class _Program:
    """A module to run: its arguments, environment and directory, and the numbers that its descriptors get."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str
    fds: list[int]

    def run(self, given: Sequence[int]) -> int:
        """Run the module in this fork with the descriptors ``given``; return the exit status."""
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in given]
        os.closerange(3, _ABOVE)
        for source, target in zip(moved, self.fds, strict=True):
            os.dup2(source, target)
        os.closerange(_ABOVE, max(moved) + 1)
        gc.enable()  # a daemon disables it while it starts
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        sys.argv[:] = [self.module, *self.arguments]
        _set_command_line([sys.executable, "-m", self.module, *self.arguments])
        for name in (self.module, f"{self.module}.__main__"):  # it runs as ``__main__``, and is not imported
            sys.modules.pop(name, None)
        try:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if isinstance(ended.code, str):
                sys.stderr.write(f"{ended.code}\n")
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # noqa: BLE001 - what the interpreter does at its end
            traceback.print_exc()
            return 1
        return 0


def _set_command_line(command: Sequence[str]) -> None:
    """Write this process's ``/proc/self/cmdline``, in which tests find engines."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    data = "\0".join([*command, ""]).encode()[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


class _Template:
    """A template process, which is a child of this process, and the end of a socket to it."""

    def __init__(self, run: Callable[[socket.socket], Callable[[], object]]) -> None:
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._wait = run(theirs)

    def close(self) -> None:
        """End the process; forks that still run are not ended."""
        self._socket.close()
        self._wait()

    def start(self, program: _Program, given: Sequence[int]) -> int:
        """Fork a program and return its process id.

        The template's child, which forks it and ends, leaves it to this process, the nearest subreaper.
        """
        with self._lock:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(asdict(program)).encode()], given)
                return int(self._socket.recv(_MESSAGE_BYTES))
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)


_templates: list[_Template] = []


def _execute_template(asked: socket.socket) -> Callable[[], object]:
    """Execute a process that imports the programs; return how to wait for it."""
    command = [sys.executable, "-m", _MODULE, str(asked.fileno()), " " * _COMMAND_LINE_BYTES]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=_ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would not be in a fork
        pass_fds=(asked.fileno(),),
    ).wait


def _fork_template(asked: socket.socket) -> Callable[[], object]:
    """Fork this process, which has imported the programs; return how to wait for the fork."""
    if (pid := os.fork()) != 0:
        return lambda: os.waitpid(pid, 0)
    requests = socket.socket(fileno=fcntl.fcntl(asked.fileno(), fcntl.F_DUPFD, _ABOVE))
    os.closerange(3, _ABOVE)  # among them the locks of this process
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SENT_TO_GROUPS}
    _set_command_line([sys.executable, "-m", _MODULE])
    program, fds = _serve(requests)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _end(program.run(fds))


def _start_by_template(program: _Program, given: Sequence[int]) -> int:
    if not _templates:
        _templates.append(_Template(_execute_template))
    return _templates[0].start(program, given)


def _start_by_fork(program: _Program, given: Sequence[int]) -> int:
    """Fork this process, which has imported the program, or have its template do so."""
    if not _single_threaded():
        return _templates[0].start(program, given)
    if not _templates:
        _templates.append(_Template(_fork_template))
    if (pid := os.fork()) == 0:
        _templates.clear()
        _end(program.run(given))
    return pid


def _end(status: int) -> NoReturn:
    """End this fork as the interpreter ends, but leave its memory to the kernel.

    Freeing each object would write to, and so copy, most pages that it shares with the template: 0.1 s of CPU time.
    """
    vars(threading)["_shutdown"]()  # waits for threads
    vars(atexit)["_run_exitfuncs"]()
    close_template()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the other end is gone, or the program closed it
            stream.flush()
    os._exit(status)


def close_template() -> None:
    """End the template process, if there is one."""
    while _templates:
        _templates.pop().close()


_execute: Final = vars(subprocess.Popen)["_execute_child"]
_create_by_loop: Final = asyncio.create_subprocess_exec
_SubprocessTransport: Final[Any] = vars(asyncio.unix_events)["_UnixSubprocessTransport"]
_signature: Final = inspect.signature(_execute)


def install(start: Callable[[_Program, Sequence[int]], int] = _start_by_template) -> None:
    """Have ``subprocess`` start this project's programs by ``start``."""

    def execute_child(popen: subprocess.Popen[Any], *arguments: Any) -> None:
        asked = _signature.bind(popen, *arguments).arguments
        # A program that has itself killed with its parent ends with the thread that started the template.
        main = threading.current_thread() is threading.main_thread()
        forkable = bool(_templates) or (main and (start is _start_by_template or _single_threaded()))
        if (program := _program(asked)) is None or not forkable:
            _execute(popen, *arguments)
            return
        ours = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        given = [number if fd == -1 else fd for number, fd in enumerate(ours)]
        pid = start(program, [*given, *sorted(asked["pass_fds"])])
        vars(popen).update(pid=pid, _child_created=True)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        vars(subprocess.Popen)["_close_pipe_fds"](popen, *(asked[name] for name in pipes))

    setattr(subprocess.Popen, "_execute_child", execute_child)  # noqa: B010 - it has no type
    setattr(asyncio, "create_subprocess_exec", _create_subprocess)  # noqa: B010 - nor has it


async def _create_subprocess(*command: Any, limit: int = 2**16, **options: Any) -> asyncio.subprocess.Process:
    """Do what asyncio does, on uvloop by its transport, too: that of uvloop does without ``subprocess``."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, uvloop.Loop) or list(command[:2]) != _PYTHON:
        return await _create_by_loop(*command, limit=limit, **options)
    protocol = asyncio.subprocess.SubprocessStreamProtocol(limit=limit, loop=loop)
    pipes = [options.pop(name, None) for name in ("stdin", "stdout", "stderr")]
    connected = loop.create_future()
    transport = _SubprocessTransport(loop, protocol, command, False, *pipes, 0, waiter=connected, **options)
    process = transport.get_extra_info("subprocess")
    pidfd = os.pidfd_open(process.pid)

    def exited() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        transport._process_exited(process.wait())

    loop.add_reader(pidfd, exited)
    await connected
    return asyncio.subprocess.Process(transport, protocol, loop)


def _program(asked: Mapping[str, Any]) -> _Program | None:
    """Return the program of a start, ``None`` if it has to be executed."""
    if any(asked[name] != value for name, value in _NEUTRAL.items()):
        return None
    command, env = asked["args"], dict(os.environ if asked["env"] is None else asked["env"])
    if not isinstance(command, list | tuple) or asked["executable"] is not None:
        return None
    words = [os.fspath(word) for word in command]
    if len(words) < 3 or words[:2] != _PYTHON or not all(isinstance(word, str) for word in words):
        return None
    module = words[2]
    if module == _MODULE or module.partition(".")[0] not in _PACKAGES:
        return None
    if _read_at_exec(env) != _read_at_exec(os.environ):
        return None
    fds = [0, 1, 2, *sorted(asked["pass_fds"])]
    return _Program(module, words[3:], env, os.fspath(asked["cwd"] or Path.cwd()), fds)


def _read_at_exec(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that take effect only when a program is executed."""
    found = {name: value for name, value in env.items() if name.startswith(_READ_AT_EXEC)}
    if found.get("PYTHONPATH") == str(_ROOT):
        del found["PYTHONPATH"]
    return {name: value for name, value in found.items() if name not in _OF_FILES_AND_PIPES}


def _single_threaded() -> bool:
    return len(list(Path("/proc/self/task").iterdir())) == 1


def fork_program(module: str, *arguments: str, env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Run a module as ``python -m`` does, with standard output and error to the descriptor ``output``."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
    )


def _serve(asked: socket.socket) -> tuple[_Program, list[int]]:
    """Answer requests until the worker ends; return only in a fork, with what it is to run."""
    while True:
        data, fds, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, _ABOVE // 2)
        if not data:
            os._exit(0)
        program = _Program(**json.loads(data))
        if program.module == "tests.mcp.server" or "INFERENCECENTER_MCP" in program.env:
            for name in _MCP:
                importlib.import_module(name)
        told, telling = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (pid := os.fork()) != 0:
                os.write(telling, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:  # a program may have itself killed with its parent
                time.sleep(0.0005)
            return program, fds
        os.waitpid(between, 0)
        answer = os.read(told, 32)
        for fd in (told, telling, *fds):  # before the answer: a lock on its way to the program ends with the program
            os.close(fd)
        asked.send(answer)


def _main() -> NoReturn:
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert _single_threaded(), "a fork has only one thread"
    install(_start_by_fork)
    program, fds = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(program.run(fds))


if __name__ == "__main__":
    _main()
