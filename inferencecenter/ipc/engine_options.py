"""The configuration of an engine process: the settings of ``[engine]`` and what the front adds to them.

One value is refined: ``supervisor.engine_options`` creates it from a model's settings, the planner sets the fields that
depend on free memory, the supervisor adds those of one process, and ``Configure`` sends it to the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from inferencecenter.config.sections import EngineSettings, KvType, LoraSettings, ModelKind, Section


class KvCachePaths(Section):
    """A directory in memory and one on disk for parked KV; one with a size of 0 is not used.

    Of each, one client may use the fraction ``client_share``.
    """

    ram_dir: Path = Path()
    ram_bytes: int = 0
    disk_dir: Path = Path()
    disk_bytes: int = 0
    client_share: float = 0.5


class EngineOptions(EngineSettings):
    """The settings of one engine process; of those the settings leave open, these have a value.

    ``lora`` are adapters on top of the model. ``draft_path`` is the file of the draft model, empty without one, and
    ``draft_device`` the GPU that it is on, empty for the host's memory. ``mmproj_path`` is the file of the projector,
    empty for a model that does not see, and ``mmproj_device`` its GPU. ``devices`` names the GPUs in use, all if empty;
    ``tensor_split`` are their shares of the layers, ``cpu_tensors`` patterns of names of tensors that stay in the
    host's memory. Without the GPUs the engine fails, or runs on the host if they are ``gpu_optional``. ``kv_adopt``
    selects which files of an earlier engine are recovered; the others are deleted.

    The engine exits when the process ``parent_pid`` does.
    """

    slots: int = Field(8, ge=1, le=256)
    n_batch: int = Field(2048, ge=1, le=2**20)
    n_ubatch: int = Field(512, ge=1, le=2**20)
    kv_type_k: KvType = "f16"
    kv_type_v: KvType = "f16"
    worker_threads: int = Field(2, ge=1, le=256)

    kind: ModelKind = "chat"
    model_path: str = ""
    model_name: str = ""
    lora: tuple[LoraSettings, ...] = ()
    draft_path: str = ""
    draft_device: str = ""
    mmproj_path: str = ""
    mmproj_device: str = ""
    devices: tuple[str, ...] = ()
    split_mode: Literal["layer", "none"] = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    cpu_tensors: tuple[str, ...] = ()
    gpu_optional: bool = False
    kv: KvCachePaths = KvCachePaths()
    kv_adopt: Literal["none", "durable", "all"] = "none"
    parent_pid: int = 0

    def replace(self, **changes: Any) -> Self:
        """Return these options with changes, validated."""
        return self.model_validate(dict(self) | changes)
