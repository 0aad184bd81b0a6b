"""The inputs and the result of planning: GPUs, host, constraints, demand, and the plan itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from inferencecenter.hardware.footprint import RuntimeConfig

MIB: Final = 2**20
WEIGHT_BYTES_PER_THREAD: Final = 4 * MIB
"""Weights that occupy a thread in each decode; see ``decode_threads``."""
_LEAST_MARGIN_BYTES: Final = 300 * MIB

SplitMode: TypeAlias = Literal["layer", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU.

    Attributes:
        id: The engine's identifier: its PCI address, or llama.cpp's name for it.
        index: Its index in NVML, -1 if NVML does not know it.
        aliases: Other names: its index and UUID, or llama.cpp's name.
        remote: Whether it belongs to an RPC server, usually on another machine.
        correction_bytes: By how much the last usage exceeded the estimate; negative for less.
    """

    id: str
    name: str
    free_bytes: int
    total_bytes: int
    correction_bytes: int = 0
    index: int = -1
    aliases: tuple[str, ...] = ()
    remote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine around the GPUs; ``available_bytes`` is ``None`` if unknown."""

    available_bytes: int | None
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConstraints:
    """The configured values; 0, -1, ``auto`` and empty leave the choice to the plan.

    Attributes:
        margin_bytes: Memory to leave free on each GPU; ``None`` is 5 %, and at least 300 MiB.
        quantized_kv: Whether KV may have less than 16 bits to make a model fit.
        prefer: ``many`` concurrent sessions, or ``long`` contexts for few.
        expert_offload: Whether experts may stay in the host's memory, all of them do, or none.
        most_gpu_layers: A limit after a failed start; ``None`` is no limit.
        embeds: Whether the context is for embeddings, and sized for them.
    """

    slots: int = 0
    n_ctx: int = 0
    n_gpu_layers: int = -1
    n_batch: int = 0
    n_ubatch: int = 0
    n_threads: int = 0
    kv_type_k: str = "auto"
    kv_type_v: str = "auto"
    flash_attention: str = "auto"
    split_mode: str = "auto"
    main_gpu: int = -1
    tensor_split: tuple[float, ...] = ()
    margin_bytes: int | None = None
    quantized_kv: bool = False
    prefer: str = "many"
    expert_offload: str = "auto"
    most_gpu_layers: int | None = None
    embeds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDemand:
    """Memory placed on one GPU, in bytes; ``context_bytes`` is the overhead of the driver and its libraries."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    context_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes + self.context_bytes


NO_DEMAND: Final = DeviceDemand(weight_bytes=0, kv_bytes=0, compute_bytes=0, context_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A model's memory on each GPU and on the host."""

    devices: tuple[DeviceDemand, ...]
    host_weight_bytes: int
    host_kv_bytes: int
    host_compute_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.host_weight_bytes + self.host_kv_bytes + self.host_compute_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A configuration and the placement of its parts; ``fits`` concerns only the GPUs.

    Attributes:
        counts: Layers on each device; the output counts as one.
        cpu_tensors: Patterns of names of tensors that stay on the host although their layer does not.
        experts_in_host: Number of layers on GPUs whose experts stay on the host.
        draft_on_gpu: Whether the draft model, if there is one, is on the first GPU.
        projector_on_gpu: Whether the projector, if there is one, is.
    """

    setup: RuntimeConfig
    devices: tuple[Device, ...]
    counts: tuple[int, ...]
    n_gpu_layers: int
    experts_in_host: int
    cpu_tensors: tuple[str, ...]
    demand: Demand
    fits: bool
    draft_on_gpu: bool = False
    projector_on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Reason:
    """A number of the plan and its reason; ``explicit`` if it was configured."""

    name: str
    value: str
    why: str
    explicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """How a model is run, with reasons.

    Attributes:
        n_gpu_layers: In llama.cpp's counting: the model's layers and one for the output.
        devices: The GPUs in use, in the order of ``tensor_split``.
        layer_counts: Layers on each of them; the output counts as one.
        tensor_split: The same in llama.cpp's form, for several GPUs.
        experts_in_host: Number of layers on GPUs whose experts stay on the host.
        cpu_tensors: Patterns of names of tensors that stay in the host's memory although their layer does not.
        draft_device: The GPU that the draft model is on; empty for the host's memory.
        mmproj_device: The GPU that the projector is on, likewise.
        fits: Whether all of it fits. If not, configured values were kept all the same.
        demand: The memory on each GPU and on the host.
        reasons: Each number with its reason.
        advice: Alternatives and warnings.
    """

    setup: RuntimeConfig
    n_gpu_layers: int
    devices: tuple[Device, ...]
    split_mode: SplitMode
    main_gpu: int
    layer_counts: tuple[int, ...]
    tensor_split: tuple[float, ...]
    experts_in_host: int
    cpu_tensors: tuple[str, ...]
    draft_device: str
    mmproj_device: str
    n_threads: int
    fits: bool
    demand: Demand
    reasons: tuple[Reason, ...]
    advice: tuple[str, ...]


def margin_bytes(device: Device, constraints: PlacementConstraints) -> int:
    """Return the memory to leave free on a GPU."""
    if constraints.margin_bytes is not None:
        return constraints.margin_bytes
    return max(_LEAST_MARGIN_BYTES, device.total_bytes // 20)


def usable_bytes(device: Device, constraints: PlacementConstraints) -> int:
    """Return the memory of a GPU that a plan may use: free memory less the margin and the measured correction."""
    return max(0, device.free_bytes - margin_bytes(device, constraints) - device.correction_bytes)


def decode_threads(weight_bytes: int, cores: int) -> int:
    """Return the number of threads with which a processor decodes a model fastest.

    In the decode of a tiny model the barriers between threads take longer than the work they divide
    (docs/decisions/0005-spinning-threads.md).
    """
    return max(1, min(cores, weight_bytes // WEIGHT_BYTES_PER_THREAD))
