"""Tests on GPUs: those of this machine, and Vulkan's device in software; where there is none they are skipped.

What the tests start inherits the environment in which llama.cpp finds the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware import ggml
from inferencecenter.hardware.devices import find_devices
from tests.vulkan import software

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.hardware.placement import Device


@pytest.fixture(scope="module", params=["installed", pytest.param("software", marks=pytest.mark.slow)])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[Device, ...]]:
    """The GPUs that the installed llama.cpp finds, or two that Mesa computes on the processor."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "software":
            software.use(patch, devices=2)
        if not ggml.gpu_backends():
            pytest.skip("llama.cpp was built without GPU support")
        found = find_devices()
        if not found:
            pytest.skip("there is no GPU that llama.cpp can use")
        yield found
