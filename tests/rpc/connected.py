"""A plugin of pytest (``-p tests.rpc.connected``): llama.cpp puts all layers on the devices of the server named."""

from __future__ import annotations

import os
from typing import Final

from inferencecenter.engine.llama.library import load_library

SERVER_VARIABLE: Final = "INFERENCECENTER_TEST_RPC_SERVER"


def pytest_configure() -> None:
    """Connect to the server."""
    load_library()
    from inferencecenter.engine.llama.devices import server_devices  # noqa: PLC0415 - needs the library loaded

    assert server_devices(os.environ[SERVER_VARIABLE])
