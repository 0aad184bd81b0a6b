"""Headers of real models, and machines to plan for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from benchmarks.header import HEADERS, write_header
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.placement import MIB, Device, Host

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.header import HeaderName
    from inferencecenter.hardware.model_shape import ModelShape

GIB: Final = 1024 * MIB
HOST: Final = Host(available_bytes=32 * GIB, cores=6)


def gpus(*gib: float) -> tuple[Device, ...]:
    """Return GPUs of these sizes, all of it free."""
    sizes = [int(each * GIB) for each in gib]
    return tuple(Device(id=f"{n}", name=f"GPU {n}", free_bytes=s, total_bytes=s) for n, s in enumerate(sizes))


@pytest.fixture(scope="session")
def header_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HeaderName], Path]:
    """Return a header-only file of a real model."""
    folder = tmp_path_factory.mktemp("headers")

    @cache
    def write(name: HeaderName) -> Path:
        path = folder / f"{name}.gguf"
        write_header(path, HEADERS[name], name=name)
        return path

    return write


@pytest.fixture(scope="session")
def shape_of(header_of: Callable[[HeaderName], Path]) -> Callable[[HeaderName], ModelShape]:
    """Return the shape of a real model, read from its header."""

    @cache
    def read(name: HeaderName) -> ModelShape:
        return describe(read_gguf(header_of(name)))

    return read
