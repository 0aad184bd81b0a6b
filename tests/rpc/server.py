"""Devices of an RPC server on this machine: libraries of llama.cpp that were built with RPC, and a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from inferencecenter.hardware import ggml
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES_VARIABLE: Final = "INFERENCECENTER_TEST_RPC_LIBS"
_START_TIMEOUT_S: Final = 60.0


class RpcServer:
    """A process that computes on the processor for one client after the other."""

    def __init__(self, *, devices: int = 1) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._devices = devices
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "tests.rpc.serving", self.address, str(self._devices)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def connected(self) -> socket.socket:
        """Return a connection that the server serves until it is closed."""
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), _START_TIMEOUT_S)

    def _listens(self) -> bool:
        try:
            self.connected().close()
        except OSError:
            return False
        return True


def use_libraries(patch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp loaded from libraries with RPC; skip the test where there are none."""
    if libraries := os.environ.get(LIBRARIES_VARIABLE):
        if next(Path(libraries).glob("libggml-rpc.*"), None) is None:
            pytest.skip(f"{libraries} has no libggml-rpc")
        patch.setenv(ggml.LIBRARY_PATH, libraries)
    if not ggml.reaches_servers():
        pytest.skip(f"llama.cpp was built without RPC, and {LIBRARIES_VARIABLE} names no folder with libraries")


def settings_for(*servers: str) -> dict[str, str]:
    """Return the settings of a daemon that uses servers."""
    return {"INFERENCECENTER_GPU__RPC_SERVERS": json.dumps(servers)}


@contextmanager
def serving(patch: pytest.MonkeyPatch, *, devices: int = 1) -> Iterator[RpcServer]:
    """Run a server of so many devices, and have llama.cpp loaded from libraries that reach it."""
    use_libraries(patch)
    server = RpcServer(devices=devices)
    server.start()
    try:
        yield server
    finally:
        server.kill()
