"""Tests on a machine with an NVIDIA GPU and a llama.cpp built for it; elsewhere they are skipped with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware import ggml
from inferencecenter.hardware.devices import find_devices

if TYPE_CHECKING:
    from inferencecenter.hardware.placement import Device


@pytest.fixture(scope="session")
def devices() -> tuple[Device, ...]:
    """The GPUs of this machine."""
    if not ggml.gpu_backends():
        pytest.skip("llama.cpp was built without GPU support")
    found = find_devices()
    if not found:
        pytest.skip("there is no GPU that llama.cpp can use")
    return found
