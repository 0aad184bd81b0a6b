"""Becomes a daemon with inherited sockets, as systemd starts it: ``python -m tests.service.activated HOW [FD...]``.

``HOW`` is ``exec``, or ``run`` for a daemon that is a fork of the tests' template process.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(how: str, *fds: str) -> None:
    """Put the sockets of ``LISTEN_FDS`` where systemd puts them, and serve."""
    if "LISTEN_FDS" in os.environ:
        os.environ["LISTEN_PID"] = str(os.getpid())
        for at, fd in enumerate(fds):
            os.dup2(int(fd), 3 + at)
    if how == "exec":
        os.execv(sys.executable, [sys.executable, "-m", "inferencecenter", "serve"])
    os.setsid()  # without a terminal
    sys.argv[1:] = ["serve"]
    runpy.run_module("inferencecenter", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
