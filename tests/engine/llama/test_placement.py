"""Compares the planned placement and memory of a model with llama.cpp's own figures.

GPUs that only count (``counting_gpu``) stand for real ones. Their weights, KV and buffers are what llama.cpp would put
on any GPU of that kind; what a driver takes for itself is not in it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from benchmarks.header import HEADERS, write_header
from inferencecenter.engine.llama.log import BufferSizes
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.placement import MIB, Device, Host, PlacementConstraints
from inferencecenter.hardware.split import CONTEXT_BYTES, plan
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import BufferUse
from tests.engine.llama.tiny_projectors import write_projector

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.header import HeaderShape
    from inferencecenter.hardware.placement import PlacementPlan

DENSE = replace(HEADERS["llama3.1-8b"], layers=6, vocabulary=16_384)
MIXTURE = replace(HEADERS["qwen3-30b-a3b"], layers=6, experts=16, vocabulary=16_384)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, GPUs with their free memory beside the driver's part, and constraints."""

    shape: HeaderShape
    mib: tuple[int, ...]
    n_gpu_layers: int
    constraints: dict[str, Any] = field(default_factory=dict)


CASES = {
    "all layers": Case(shape=DENSE, mib=(2000,), n_gpu_layers=7),
    "some layers": Case(shape=DENSE, mib=(500,), n_gpu_layers=3),
    "only the output": Case(shape=DENSE, mib=(2000,), n_gpu_layers=1, constraints={"n_gpu_layers": 1}),
    "two GPUs": Case(shape=DENSE, mib=(700, 900), n_gpu_layers=7),
    "two GPUs, some layers": Case(shape=DENSE, mib=(300, 420), n_gpu_layers=4),
    "shares that are set": Case(
        shape=DENSE, mib=(2000, 2000), n_gpu_layers=7, constraints={"tensor_split": (1.0, 3.0)}
    ),
    "quantized KV": Case(
        shape=DENSE, mib=(2000,), n_gpu_layers=7, constraints={"kv_type_k": "q8_0", "kv_type_v": "q8_0", "slots": 4}
    ),
    "without flash attention": Case(shape=DENSE, mib=(2000,), n_gpu_layers=7, constraints={"flash_attention": "off"}),
    "experts on the GPU": Case(shape=MIXTURE, mib=(2000,), n_gpu_layers=7),
    "experts of some layers in the host": Case(shape=MIXTURE, mib=(380,), n_gpu_layers=7),
    "all experts in the host": Case(shape=MIXTURE, mib=(2000,), n_gpu_layers=7, constraints={"expert_offload": "all"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_estimate_equals_the_memory_used_by_llama_cpp(tmp_path: Path, case: Case) -> None:
    """Weights and KV per GPU to the byte that llama.cpp reports; buffers at least, and within 5 % of the total."""
    path = tmp_path / "model.gguf"
    write_header(path, case.shape, name="test")
    made, memory = _planned_and_taken(tmp_path, path, case)
    assert made.fits
    assert made.n_gpu_layers == case.n_gpu_layers
    for device, demand in zip(made.devices, made.demand.devices, strict=True):
        taken = memory[device.name]
        assert demand.weight_bytes == pytest.approx(taken.weight_bytes, abs=0.1 * MIB)
        assert demand.kv_bytes == pytest.approx(taken.kv_bytes, abs=0.1 * MIB)
        assert demand.compute_bytes >= taken.compute_bytes - 0.1 * MIB
        together = taken.weight_bytes + taken.kv_bytes + taken.compute_bytes + CONTEXT_BYTES
        assert demand.bytes <= 1.06 * together
    in_host = [use for name, use in memory.items() if not name.startswith("FAKE") or name == "FAKE_Host"]
    assert sum(use.kv_bytes for use in in_host) == pytest.approx(made.demand.host_kv_bytes, abs=0.1 * MIB)


def _planned_and_taken(folder: Path, path: Path, case: Case) -> tuple[PlacementPlan, dict[str, BufferUse]]:
    devices = [
        Device(
            id=f"0000:0{number}:00.0",
            name=f"FAKE{number}",
            free_bytes=room * MIB + CONTEXT_BYTES,
            total_bytes=room * MIB + CONTEXT_BYTES,
        )
        for number, room in enumerate(case.mib)
    ]
    constraints = PlacementConstraints(**{"margin_bytes": 0, "n_ctx": 1024, "n_ubatch": 256, **case.constraints})
    made = plan(describe(read_gguf(path)), devices, Host(available_bytes=None, cores=1), constraints)
    options = EngineOptions(
        backend="llama",
        parent_pid=0,
        model_path=str(path),
        **(asdict(made.setup) | {"flash_attention": constraints.flash_attention}),
        n_threads=1,
        n_gpu_layers=made.n_gpu_layers,
        devices=tuple(device.id for device in made.devices),
        split_mode=made.split_mode,
        main_gpu=made.main_gpu,
        tensor_split=made.tensor_split,
        cpu_tensors=made.cpu_tensors,
    )
    return made, load(folder, options, n_gpus=len(devices))


def load(folder: Path, options: EngineOptions, *, n_gpus: int) -> dict[str, BufferUse]:
    """Load a model in another process on counting GPUs, and return the memory it uses by name."""
    told = folder / "options.json"
    told.write_text(options.model_dump_json())
    command = [sys.executable, "-m", "tests.engine.llama.counting_gpu", str(told), str(n_gpus)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    return {use.name: use for use in msgspec.json.decode(done.stdout, type=list[BufferUse])}


@pytest.fixture
def demo(demo_model_path: Path) -> EngineOptions:
    """Options of the demo model on a GPU."""
    return EngineOptions(
        backend="llama",
        parent_pid=0,
        model_path=str(demo_model_path),
        slots=2,
        n_ctx=256,
        n_threads=1,
        n_gpu_layers=4,
        devices=("0000:00:00.0",),
        split_mode="none",
    )


def test_gpu_is_found_by_its_address_or_name(tmp_path: Path, demo: EngineOptions) -> None:
    """Both identify the same GPU."""
    by_name = demo.replace(devices=("FAKE1",))
    assert (
        load(tmp_path, demo, n_gpus=2)["FAKE0"].weight_bytes == load(tmp_path, by_name, n_gpus=2)["FAKE1"].weight_bytes
    )


def test_projector_is_on_the_named_gpu(tmp_path: Path, demo: EngineOptions) -> None:
    """It may be another than that of the layers; the buffer for an image is allocated at load."""
    mmproj = tmp_path / "mmproj.gguf"
    write_projector(mmproj, n_embd=192)
    seeing = demo.replace(mmproj_path=str(mmproj), mmproj_device="FAKE1")
    taken, plain = load(tmp_path, seeing, n_gpus=2), load(tmp_path, demo, n_gpus=2)
    assert taken["FAKE0"] == plain["FAKE0"]
    assert "FAKE1" not in plain
    assert taken["FAKE1"].compute_bytes > 0
    host = load(tmp_path, demo.replace(mmproj_path=str(mmproj)), n_gpus=2)
    assert "FAKE1" not in host


def test_without_a_gpu_no_gpu_memory_is_used(tmp_path: Path, demo: EngineOptions) -> None:
    """Compute buffers for layers in host memory use none, either."""
    none = demo.replace(devices=(), n_gpu_layers=0, main_gpu=-1)
    assert not any(name.startswith("FAKE") for name in load(tmp_path, none, n_gpus=1))


def test_sizes_are_read_from_the_log() -> None:
    """Weights and KV add up, reallocated buffers do not; other lines are ignored."""
    sizes = BufferSizes()
    for line in (
        "load_tensors:   CPU_Mapped model buffer size =     2.00 MiB",
        "load_tensors:        CUDA0 model buffer size =    10.00 MiB",
        "load_tensors:        CUDA0 model buffer size =     1.50 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     4.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     1.00 MiB",
        "llama_memory_recurrent:      CUDA0 RS buffer size =     0.50 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    90.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    64.00 MiB",
        "llama_context:  CUDA_Host  output buffer size =     3.91 MiB",
        "llama_kv_cache: size = 4096.00 MiB (  4096 cells,  32 layers,  8/8 seqs)",
    ):
        sizes.read(line)
    assert sizes.uses() == (
        BufferUse(name="CPU_Mapped", weight_bytes=2 * MIB),
        BufferUse(name="CUDA0", weight_bytes=int(11.5 * MIB), kv_bytes=int(5.5 * MIB), compute_bytes=64 * MIB),
        BufferUse(name="CUDA_Host", output_bytes=round(3.91 * MIB)),
    )
