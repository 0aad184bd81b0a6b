"""``python -m tests.cli.terminal ARGUMENTS``: the command line on the controlling terminal of a new session.

A separate session makes the terminal on standard input the controlling one, so that ^C becomes a signal. It is a module
of its own, since the tests fork modules of the project, which costs a tenth of a start (``tests/prefork.py``).
"""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import sys
import termios

os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell starts a program
for name in [name for name in sys.modules if name.startswith("inferencecenter.cli")]:
    del sys.modules[name]  # its consoles are those of another terminal
runpy.run_module("inferencecenter", run_name="__main__", alter_sys=True)
