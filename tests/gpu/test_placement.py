"""A model placed on GPUs in every way answers as on the processor, and takes the memory that was planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inferencecenter.hardware.placement import MIB
from tests.engine.process import demo_options
from tests.gpu.answering import Answered, answered
from tests.supervisor.test_planning import Machine

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.hardware.placement import Device
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.protocol.values import EnginePlan

SIZES: dict[str, Any] = {"slots": 4, "n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1}
HOST: dict[str, Any] = {"devices": (), "n_gpu_layers": 0, "split_mode": "none", "main_gpu": -1, "tensor_split": ()}
LOGGED_BYTES = 0.01 * MIB
"""llama.cpp logs sizes with two decimals."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings, and the layers that they put on each GPU (the output counts as one); ``None`` is all of them."""

    layers: tuple[int, ...] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    n_devices: int = 1


CASES = {
    "all layers": Case(),
    "some layers": Case(layers=(3,), engine={"n_gpu_layers": 3}),
    "only the output": Case(layers=(1,), engine={"n_gpu_layers": 1}),
    "no layer": Case(layers=(), engine={"n_gpu_layers": 0}),
    "without flash attention": Case(engine={"flash_attention": "off"}),
    "quantized KV": Case(engine={"kv_type_k": "q8_0", "kv_type_v": "q8_0"}),
    "two GPUs": Case(layers=(4, 3), n_devices=2, gpu={"tensor_split": (1.0, 1.0)}),
    "two GPUs with given shares": Case(layers=(2, 5), n_devices=2, gpu={"tensor_split": (1.0, 5.0)}),
}


@dataclass(frozen=True)
class Placed:
    """A plan, and what came of it: the same model on the GPUs and on the host."""

    plan: EnginePlan
    on_gpus: Answered
    on_host: Answered


@pytest.fixture(scope="module")
def placed(
    devices: tuple[Device, ...], demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Placed]:
    """Every case for which there are enough GPUs."""
    folder = tmp_path_factory.mktemp("plans")
    plans: dict[str, EnginePlan] = {}
    options: list[EngineOptions] = []
    for name, case in CASES.items():
        if case.n_devices > len(devices):
            continue
        machine = Machine(devices=devices[: case.n_devices])
        planner = machine.planner(folder, gpu=case.gpu, **SIZES, **case.engine)
        planned = planner.first(demo_options(demo_model_path))
        assert planner.report is not None
        plans[name] = planner.report
        options += [planned, planned.replace(**HOST)]
    found = answered(options)
    return {
        name: Placed(plan, on_gpus, on_host)
        for (name, plan), on_gpus, on_host in zip(plans.items(), found[::2], found[1::2], strict=True)
    }


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest, placed: dict[str, Placed]) -> str:
    """The name of a case that was run."""
    name: str = request.param
    if name not in placed:
        pytest.skip("there is only one GPU")
    return name


def test_layers_are_on_the_planned_devices(name: str, placed: dict[str, Placed]) -> None:
    """The plan has the layers that are set, or all of them."""
    plan, case = placed[name].plan, CASES[name]
    layers = tuple(device.layers for device in plan.devices)
    assert plan.n_gpu_layers == sum(layers)
    if case.layers is None:
        assert layers == (plan.layers,)
    else:
        assert layers == case.layers


def test_planned_memory_equals_that_of_llama_cpp(name: str, placed: dict[str, Placed]) -> None:
    """Weights and KV of each GPU and of the host are exact, buffers are not larger than planned."""
    plan, memory = placed[name].plan, placed[name].on_gpus.memory
    taken = sorted((use for use in memory if not use.name.startswith("CPU")), key=lambda use: use.name)
    on_gpus = [use for use in taken if not use.name.endswith("_Host")]
    for device, use in zip(plan.devices, on_gpus, strict=True):
        assert device.weight_bytes == pytest.approx(use.weight_bytes, abs=LOGGED_BYTES)
        assert device.kv_bytes == pytest.approx(use.kv_bytes, abs=LOGGED_BYTES)
        assert device.compute_bytes >= use.compute_bytes - LOGGED_BYTES
    in_host = [use for use in memory if use not in on_gpus]
    assert sum(use.kv_bytes for use in in_host) == pytest.approx(plan.host.kv_bytes, abs=LOGGED_BYTES)


def test_answer_is_that_of_the_processor(name: str, placed: dict[str, Placed], record_property: Any) -> None:
    """Greedy tokens are equal, or first different where the best two lie within 0.1."""
    on_gpus, on_host = placed[name].on_gpus, placed[name].on_host
    apart = np.abs(np.array(on_gpus.logits) - np.array(on_host.logits)).max()
    record_property("logits_apart", round(float(apart), 3))
    assert on_host.answer.agrees_with(on_gpus.answer), (on_host.answer, on_gpus.answer)
