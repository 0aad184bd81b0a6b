"""Plans in the protocol's format."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.header import HEADERS, write_header
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.placement import MIB, Device, Host, PlacementConstraints, PlacementPlan, Reason
from inferencecenter.hardware.split import plan
from inferencecenter.supervisor.planning import plan_report, with_measured_usage

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.header import HeaderName
    from inferencecenter.hardware.model_shape import ModelShape

GIB = 1024 * MIB
HOST = Host(available_bytes=32 * GIB, cores=6)


def shape(folder: Path, name: HeaderName) -> ModelShape:
    """Return the shape of a model of which only the header exists."""
    path = folder / "model.gguf"
    write_header(path, HEADERS[name], name=name)
    return describe(read_gguf(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """The shape of a 7B model."""
    return shape(tmp_path_factory.mktemp("model"), "qwen2.5-7b")


def gpus(*gib: float) -> tuple[Device, ...]:
    """Return GPUs of this much memory, of which other programs use a quarter of a GiB."""
    return tuple(
        Device(id=f"{n}", name=f"GPU {n}", free_bytes=int((each - 0.25) * GIB), total_bytes=int(each * GIB))
        for n, each in enumerate(gib)
    )


def made(
    model: ModelShape, devices: tuple[Device, ...], constraints: PlacementConstraints | None = None
) -> PlacementPlan:
    """Return the plan."""
    return plan(model, devices, HOST, constraints or PlacementConstraints())


def test_report_lists_each_gpu(model: ModelShape) -> None:
    """Layers and bytes by device add up to the model; memory of other programs is not counted as free."""
    planned = made(model, gpus(4, 6))
    told = plan_report(planned, model=model, host=HOST, constraints=PlacementConstraints())
    assert (told.fits, told.n_gpu_layers, told.layers, told.split_mode) == (True, 29, 29, "layer")
    assert sum(each.layers for each in told.devices) == 29
    assert sum(each.weight_bytes for each in told.devices) + told.host.weight_bytes == model.bytes
    assert [each.total_bytes - each.free_bytes for each in told.devices] == [GIB // 4, GIB // 4]
    for each, demand in zip(told.devices, planned.demand.devices, strict=True):
        assert each.weight_bytes + each.kv_bytes + each.compute_bytes + each.context_bytes == demand.bytes
        assert each.used_bytes is None
    assert {each.name for each in told.reasons} >= {"n_gpu_layers", "devices", "slots", "n_ctx"}


def test_single_gpu_has_all_offloaded_layers(model: ModelShape) -> None:
    """The rest, with its KV, is on the host."""
    told = plan_report(made(model, gpus(3)), model=model, host=HOST, constraints=PlacementConstraints())
    (device,) = told.devices
    assert 0 < device.layers == told.n_gpu_layers < told.layers
    assert told.host.kv_bytes > 0
    assert told.host.available_bytes == 32 * GIB


def test_report_of_a_cpu_plan_has_no_device(model: ModelShape) -> None:
    """The first reason explains it."""
    told = plan_report(made(model, ()), model=model, host=HOST, constraints=PlacementConstraints())
    assert (told.devices, told.n_gpu_layers, told.host.weight_bytes) == ((), 0, model.bytes)
    assert told.reasons[0].why == "llama.cpp can use no GPU"


def test_experts_on_the_host_are_reported(tmp_path: Path) -> None:
    """They are counted in layers."""
    model = shape(tmp_path, "qwen3-30b-a3b")
    told = plan_report(made(model, gpus(8)), model=model, host=HOST, constraints=PlacementConstraints())
    assert 0 < told.host.expert_layers < told.layers


def test_measurement_is_reported_per_device(model: ModelShape) -> None:
    """It is reported with its device only."""
    told = with_measured_usage(
        plan_report(made(model, gpus(4, 6)), model=model, host=HOST, constraints=PlacementConstraints()), {"1": 5 * GIB}
    )
    assert [each.used_bytes for each in told.devices] == [None, 5 * GIB]


def test_report_is_bounded(model: ModelShape) -> None:
    """Architectures and names come from files and drivers, and must fit a frame."""
    planned = made(model, tuple(replace(each, name="long " * 1000) for each in gpus(8)))
    flooded = replace(planned, reasons=(Reason("n", "v" * 1000, "why"),) * 100, advice=("words " * 1000,) * 1000)
    told = plan_report(flooded, model=model, host=HOST, constraints=PlacementConstraints())
    assert (len(told.devices[0].name), told.devices[0].name[-1]) == (512, "\N{HORIZONTAL ELLIPSIS}")
    assert (len(told.reasons), len(told.advice)) == (32, 128)
    assert len(told.model_dump_json()) < 2**18
