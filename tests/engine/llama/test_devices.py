"""Tests of ``engine.llama.devices``."""

from __future__ import annotations

import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama import devices


def test_a_build_without_a_gpu_offloads_nothing() -> None:
    """What llama.cpp says here is what it says of itself; a processor is a device, but takes no layers."""
    assert devices._device_by_type(0)
    assert devices.offloads() == any(map(devices._device_by_type, (1, 2)))


@pytest.mark.parametrize(
    ("supported", "present", "expected"),
    [(True, {1}, True), (True, {2}, True), (True, {0, 3}, False), (False, {1}, False), (True, set(), False)],
)
def test_layers_go_to_a_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, *, supported: bool, present: set[int], expected: bool
) -> None:
    """A build that could use other machines, or an accelerator that is no GPU, is not enough."""
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: supported)
    monkeypatch.setattr(devices, "_device_by_type", lambda kind: kind if kind in present else None)
    assert devices.offloads() is expected
