"""The inputs of a build, and its name in the cache; builds with equal names have equal libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

CMAKE_PROJECT: Final = Path(__file__).parent
_SOURCES: Final = ("CMakeLists.txt", "include/vulkan/vulkan.hpp")
# Variables that CMake and compilers read; they are part of the digest.
_READ: Final = (
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS"),
    *("CUDACXX", "CUDAARCHS", "CUDAHOSTCXX", "CUDAFLAGS", "HIPCXX", "HIPFLAGS"),
)
_KINDS: Final = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
}
# Arguments that only add backends: the other libraries are the same without them.
_ADD_BACKENDS: Final = ("-DGGML_VULKAN=", "-DGGML_RPC=", "-DVulkan_")
COMPILED: Final = ("PORTABLE", "CMAKE_ARGS")
"""Variables that customize a build; whether a wheel of an index matches them cannot be known."""

_CUDA_BIN: Final = "/usr/local/cuda/bin"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A build of the libraries."""

    version: str
    kind: str
    portable: bool
    arguments: tuple[str, ...]
    digest: str
    base: Recipe | None = None
    """The build without the added backends, which has all other libraries of this one."""

    @classmethod
    def from_environment(cls, version: str, environment: Mapping[str, str], *, before: str = "cpu") -> Self:
        """Return the build selected by the variables, by default of the installed kind.

        ``CUDA=1`` and ``VULKAN=1`` are for GPUs, ``PORTABLE=1`` is for any processor of this architecture, and
        ``CMAKE_ARGS`` are further arguments.
        """
        named = [kind for kind in _KINDS if environment.get(kind.upper())]
        kind = next((each for each in (*named, before) if each in _KINDS), "cpu")
        portable = bool(environment.get("PORTABLE"))
        arguments = (*_KINDS[kind], *(["-DPORTABLE=ON"] if portable else []))
        further = shlex.split(environment.get("CMAKE_ARGS", ""))
        arguments += tuple(further)
        base = None
        if any(each.startswith(_ADD_BACKENDS) for each in arguments):
            other = shlex.join(each for each in further if not each.startswith(_ADD_BACKENDS))
            kind_of_base = "cpu" if kind == "vulkan" else kind
            base = cls.from_environment(
                version, {**environment, "VULKAN": "", "CMAKE_ARGS": other}, before=kind_of_base
            )
        known = [
            *((CMAKE_PROJECT / name).read_text(encoding="utf-8") for name in _SOURCES),
            *arguments,
            *(f"{name}={environment.get(name, '')}" for name in _READ),
            " ".join((platform.machine(), *platform.libc_ver())),
            "" if portable else _processor(),
            _gpus() if kind == "cuda" else "",
        ]
        digest = hashlib.sha256("\0".join(known).encode()).hexdigest()[:12]
        return cls(version, kind, portable, arguments, digest, base)

    @property
    def name(self) -> str:
        """Version, kind and digest."""
        return f"{self.version}-{self.label}-{self.digest}"

    @property
    def label(self) -> str:
        """The kind, and whether it is portable."""
        return f"{self.kind}.portable" if self.portable else self.kind


def toolkit_hints() -> list[str]:
    """Return a hint for each GPU compiler on this machine that a CPU build does not use."""
    found = []
    if find_program("nvcc"):
        found.append("nvcc is installed: `make run CUDA=1` builds llama.cpp for NVIDIA GPUs.")
    if find_program("glslc"):
        found.append("glslc is installed: `make run VULKAN=1` builds llama.cpp for GPUs with a Vulkan driver.")
    return found


def find_program(name: str) -> str | None:
    """Return the path of a program, also searched in CUDA's default folder."""
    return shutil.which(name, path=search_path())


def search_path() -> str:
    """Return the search path for the programs that a build runs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), _CUDA_BIN])


def _processor() -> str:
    """Return the properties that distinguish CPUs for code generation."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _gpus() -> str:
    """Return the compute capabilities of the GPUs, for which CUDA code is generated."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
