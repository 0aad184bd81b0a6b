"""What a plan is made from and consists of: GPUs, host, constraints, demand, and the plan itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from inferencecenter.hardware.footprint import RuntimeConfig

MIB: Final = 2**20
_LEAST_MARGIN_BYTES: Final = 300 * MIB

SplitMode: TypeAlias = Literal["layer", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU.

    Attributes:
        id: What the engine finds it by: its address on the PCI bus, or llama.cpp's name for it.
        index: Its number in NVML, -1 for what NVML does not know.
        aliases: What else it is called by: its index and UUID, or llama.cpp's name.
        correction_bytes: How much more than estimated it took the last time; negative for less.
    """

    id: str
    name: str
    free_bytes: int
    total_bytes: int
    correction_bytes: int = 0
    index: int = -1
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine around the GPUs; ``available_bytes`` is ``None`` where the kernel does not tell."""

    available_bytes: int | None
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConstraints:
    """What is set; 0, -1, ``auto`` and empty leave it to the plan.

    Attributes:
        margin_bytes: What is left free on each GPU; ``None`` is 5 %, and at least 300 MiB.
        quantized_kv: Whether KV may be kept in less than 16 bits to make a model fit.
        prefer: ``many`` sessions at once, or ``long`` contexts for few.
        expert_offload: Whether experts may be kept in the host's memory, all of them are, or none.
        most_gpu_layers: A limit from a start that failed; ``None`` is none.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDemand:
    """What is put on one GPU, in bytes; ``context_bytes`` is what the driver and its libraries take for themselves."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    context_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.compute_bytes + self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model takes: on each GPU, and of the host's memory."""

    devices: tuple[DeviceDemand, ...]
    host_weight_bytes: int
    host_kv_bytes: int
    host_compute_bytes: int

    @property
    def host_bytes(self) -> int:
        """All of the host's memory that it takes."""
        return self.host_weight_bytes + self.host_kv_bytes + self.host_compute_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A set-up, and where each part of it goes; ``fits`` is about the GPUs alone.

    Attributes:
        counts: Layers on each device, the output counted as one.
        cpu_tensors: Patterns of the names of tensors that stay with the host though their layer does not.
        experts_in_host: Of how many layers on GPUs the experts are not there.
    """

    setup: RuntimeConfig
    devices: tuple[Device, ...]
    counts: tuple[int, ...]
    n_gpu_layers: int
    experts_in_host: int
    cpu_tensors: tuple[str, ...]
    demand: Demand
    fits: bool


@dataclass(frozen=True, slots=True)
class Reason:
    """A number of the plan, and why it is that; ``explicit`` when it was set."""

    name: str
    value: str
    why: str
    explicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """How a model is run, and why.

    Attributes:
        n_gpu_layers: As llama.cpp counts them; one more than the model has layers is everything.
        devices: The GPUs that take part, in the order of ``tensor_split``.
        layer_counts: Layers on each of them, the output counted as one.
        tensor_split: The same as llama.cpp wants it, for several.
        experts_in_host: Of how many layers on GPUs the experts are not there.
        cpu_tensors: Patterns of the names of tensors that stay in the host's memory though their layer does not.
        fits: Whether all of it fits. If not, what is set was kept all the same.
        demand: What it takes, on each GPU and on the host.
        reasons: Each number with its reason in words.
        advice: What else could be chosen, or should be known.
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
    n_threads: int
    fits: bool
    demand: Demand
    reasons: tuple[Reason, ...]
    advice: tuple[str, ...]


def margin_bytes(device: Device, constraints: PlacementConstraints) -> int:
    """Return what is left free on a GPU."""
    if constraints.margin_bytes is not None:
        return constraints.margin_bytes
    return max(_LEAST_MARGIN_BYTES, device.total_bytes // 20)


def usable_bytes(device: Device, constraints: PlacementConstraints) -> int:
    """Return what a plan may use of a GPU: what is free less the margin, corrected by what was measured."""
    return max(0, device.free_bytes - margin_bytes(device, constraints) - device.correction_bytes)
