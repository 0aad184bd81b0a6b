"""Runs a command and kills its process group when the daemon ends. A standalone script, started by its path.

Arguments: a file descriptor that becomes readable when the daemon or the connection ends; the memory limit in bytes, 0
for none; the command and its arguments. The command inherits only the standard streams, and its core dumps are
disabled.
"""

import contextlib
import os
import resource
import select
import signal
import sys


def main() -> None:
    """Run the command until it ends or the descriptor is closed; this process is the leader of the group."""
    lifeline, memory_bytes, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(lifeline, False)
    ended, notify = os.pipe()
    signal.signal(signal.SIGCHLD, lambda *_: os.write(notify, b"."))
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.execvp(command[0], command)  # noqa: S606 - the operator's command
        os._exit(127)
    os.close(0)
    os.close(1)
    select.select([lifeline, ended], [], [])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
