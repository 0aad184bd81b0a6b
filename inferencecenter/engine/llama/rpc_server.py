"""Serves this machine's devices by llama.cpp's RPC: ``python -m inferencecenter.engine.llama.rpc_server``.

The protocol has neither encryption nor authentication, so the server listens on the loopback interface only; its host
(``cluster/rpc_host.py``) carries the bytes. The kernel chooses the port, which no other program can take before that.
llama.cpp does not tell it: it is looked up among the sockets of this process, and written as a line to standard output.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.engine.llama.library import load_library
from inferencecenter.ipc.engine_child import die_with_parent

if TYPE_CHECKING:
    from typing import TextIO

_ADDRESS: Final = "127.0.0.1:0"
_RETRY_S: Final = 0.02


def listening_port() -> int | None:
    """Return the port at which this process accepts TCP connections, once it does."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed, or no socket
            copy = os.dup(int(path.name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with found:
                if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return int(found.getsockname()[1])
    return None


def _tell_port(output: TextIO) -> None:
    while (port := listening_port()) is None:
        time.sleep(_RETRY_S)
    output.write(f"{port}\n")
    output.close()


def main() -> int:
    """Serve one connection after the other until the process is ended; return 1 if that is impossible."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # llama.cpp writes to both
    try:
        load_library()
    except InferenceCenterError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    from inferencecenter.engine.llama.devices import serve, served_devices  # noqa: PLC0415 - need what is loaded now

    threading.Thread(target=_tell_port, args=(output,), daemon=True).start()
    serve(_ADDRESS, served_devices(), n_threads=len(os.sched_getaffinity(0)))
    sys.stderr.write("llama.cpp was built without RPC, or cannot listen\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
