"""A machine of the cluster as its hosts see it: its directory, the files of models, and the plan for its GPUs."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import platformdirs

from inferencecenter.config.sections import EngineSettings
from inferencecenter.config.settings import APP_NAME, GpuSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.vram_calibration import PLAN_FILE, VramCalibration
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.link import ModelFile, file_digest
from inferencecenter.supervisor.engine_options import clipped_to_free
from inferencecenter.supervisor.nodes import machine_resources
from inferencecenter.supervisor.planning import Planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.cluster.file_transfer import FileCopier
    from inferencecenter.cluster.ray_cluster import FileVerdict
    from inferencecenter.ipc.link import NodeResources, StartEngine

DIRECTORY_VARIABLE: Final = "INFERENCECENTER_NODE_DIR"
"""Environment variable with a node's directory, which its hosts inherit."""
_NAME_CHARS: Final = 12


def default_directory() -> Path:
    """Return the directory of a node whose operator has named none."""
    return platformdirs.user_state_path(APP_NAME) / "node"


@dataclass(frozen=True, slots=True)
class Node:
    """This machine.

    Its ``directory`` has the operator's model files in ``models``, copies of the front's in ``copies``, KV on disk in
    ``kv``, and how far plans were off.
    """

    directory: Path

    @classmethod
    def of_environment(cls) -> Node:
        """Return the node that the environment names, with its directories.

        Raises:
            OSError: They cannot be created.
        """
        node = cls(Path(os.environ.get(DIRECTORY_VARIABLE) or default_directory()))
        node.models.mkdir(mode=0o700, parents=True, exist_ok=True)
        return node

    @property
    def models(self) -> Path:
        """Where model files are looked for that are not at the front's path."""
        return self.directory / "models"

    @property
    def copies(self) -> Path:
        """Where files are that were copied from the front."""
        return self.directory / "copies"

    def lock_path(self, engine: str) -> Path:
        """Return the lock of an engine."""
        return self.directory / f"engine-{_short(engine)}.lock"

    @staticmethod
    def resources() -> NodeResources:
        """Return the memory of this machine, and its GPUs; blocks."""
        return machine_resources(read_gpus())

    def complete(self, order: StartEngine, copier: FileCopier) -> EngineOptions:
        """Return the options of an engine on this machine: with its paths, and planned for its GPUs.

        Blocks, and files that are not here are copied first.

        Raises:
            CopyCancelledError: The copier was cancelled.
            InferenceCenterError: ``invalid_model_file`` for a file that is not here and cannot be copied, and
                ``storage_unavailable`` for one that does not fit.
        """
        options = EngineOptions.model_validate_json(order.options_json)
        groups: defaultdict[str, list[ModelFile]] = defaultdict(list)
        for file in order.files:
            groups[file.group].append(file)
        paths = {
            path: str(self._find(files, copier if order.files_port else None) / Path(path).name)
            for path, files in groups.items()
        }
        kv = options.kv
        ram = Path(f"/dev/shm/{APP_NAME}-{os.getuid()}")  # noqa: S108 - a directory writable by others is refused
        ram_dir = ram / _short(str(self.directory)) / kv.ram_dir.name
        options = options.replace(
            model_path=paths.get(options.model_path, options.model_path),
            draft_path=paths.get(options.draft_path, options.draft_path),
            mmproj_path=paths.get(options.mmproj_path, options.mmproj_path),
            lora=tuple(
                each.model_copy(update={"path": Path(paths.get(str(each.path), each.path))}) for each in options.lora
            ),
            kv=kv.model_copy(
                update={
                    "ram_dir": ram_dir,
                    "ram_bytes": clipped_to_free(ram_dir, kv.ram_bytes),
                    "disk_dir": self.directory / "kv" / kv.disk_dir.name,
                }
            ),
        )
        planner = Planner(
            engine=EngineSettings.model_validate_json(order.engine_json),
            gpu=GpuSettings(),
            calibration=VramCalibration(self.directory / PLAN_FILE),
        )
        return planner.first(options)

    def compare(self, file: ModelFile) -> FileVerdict:
        """Return whether this machine has a file of the front, but for copies. Blocks.

        Raises:
            OSError: It cannot be read.
        """
        found = [place for place in self._places([file]) if (place / Path(file.path).name).is_file()]
        if not found:
            return "missing"
        return "same" if any(_is_same(place, file) for place in found) else "different"

    def _find(self, files: Sequence[ModelFile], copier: FileCopier | None) -> Path:
        """Return the directory that has files which belong together: the front's, ``models``, or that of copies."""
        for directory in self._places(files):
            if all((directory / Path(file.path).name).is_file() and _is_same(directory, file) for file in files):
                return directory
        if copier is not None:
            return copier.fetch(files)
        name = Path(files[0].path).name
        raise InferenceCenterError(
            ErrorCode.INVALID_MODEL_FILE,
            f"The machine {os.uname().nodename} does not have the daemon's {name}.",
            hint=f"Copy it to {self.models} on that machine.",
        )

    def _places(self, files: Sequence[ModelFile]) -> tuple[Path, ...]:
        return (Path(files[0].path).parent, self.models)


def _is_same(directory: Path, file: ModelFile) -> bool:
    path = directory / Path(file.path).name
    return path.stat().st_size == file.size_bytes and file_digest(path) == file.digest


def compare_files(files_json: bytes) -> list[FileVerdict]:
    """Compare a list of ``ModelFile`` as JSON with the files of this machine, for ``doctor``. Blocks.

    Raises:
        OSError: A file or the node's directory cannot be read.
    """
    node = Node.of_environment()
    return [node.compare(file) for file in msgspec.json.decode(files_json, type=list[ModelFile])]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_CHARS]
