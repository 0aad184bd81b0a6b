"""Tests on GPUs: those of this machine, Vulkan's device in software, and an RPC server's; they are skipped without any.

What the tests start inherits the environment in which llama.cpp finds the device.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware import ggml
from inferencecenter.hardware.devices import find_devices
from tests.rpc.server import serving
from tests.vulkan import software

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.hardware.placement import Device


_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("software", "server")]


@pytest.fixture(scope="module", params=["installed", *_SLOW])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[Device, ...]]:
    """The GPUs that the installed llama.cpp finds, or two that are the processor: by Mesa, or by a server."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        servers = []
        if request.param == "server":
            servers = [held.enter_context(serving(patch, devices=2)).address]
        elif request.param == "software":
            software.use(patch, devices=2)
        if not (servers or ggml.gpu_backends()):
            pytest.skip("llama.cpp was built without GPU support")
        found = [device for device in find_devices(rpc_servers=servers) if device.remote is bool(servers)]
        if not found:
            pytest.skip("there is no GPU that llama.cpp can use")
        yield tuple(found)
