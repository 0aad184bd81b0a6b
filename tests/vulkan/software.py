"""Vulkan's device in software: Mesa's llvmpipe, and libraries of llama.cpp that were built with Vulkan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from inferencecenter.hardware.placement import Device

LIBRARIES_VARIABLE: Final = "INFERENCECENTER_TEST_VULKAN_LIBS"
_DRIVERS: Final = Path("/usr/share/vulkan/icd.d")
_NAME: Final = "llvmpipe"


def driver() -> Path:
    """Return the file that describes llvmpipe to Vulkan's loader; skip the test where there is none."""
    found = next(_DRIVERS.glob("lvp_icd.*.json"), None)
    if found is None:
        pytest.skip("llvmpipe is not installed; Debian's package is mesa-vulkan-drivers")
    return found


def use(patch: pytest.MonkeyPatch, *, devices: int = 1, described_by: Path | None = None) -> None:
    """Set the environment in which llama.cpp finds the device, so many times; skip the test where it cannot."""
    libraries = os.environ.get(LIBRARIES_VARIABLE)
    if not libraries:
        pytest.skip(f"{LIBRARIES_VARIABLE} names no folder with libraries of llama.cpp")
    if next(Path(libraries).glob("libggml-vulkan.*"), None) is None:
        pytest.skip(f"{libraries} has no libggml-vulkan")
    patch.setenv("LLAMA_CPP_LIB_PATH", libraries)
    patch.setenv("VK_ICD_FILENAMES", str(described_by or driver()))
    # llama.cpp leaves out devices that are processors, unless they are named.
    patch.setenv("GGML_VK_VISIBLE_DEVICES", ",".join(["0"] * devices))


def is_software(device: Device) -> bool:
    """Return whether a device computes on the processor."""
    return _NAME in device.name
