"""Headers of real models, and machines to plan them for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from inferencecenter.bench.header import HEADERS, write_header
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.model_shape import describe
from inferencecenter.hardware.plan import MIB, Device, Host

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.bench.header import HeaderName
    from inferencecenter.hardware.model_shape import ModelShape

GIB: Final = 1024 * MIB
HOST: Final = Host(available_bytes=32 * GIB, cores=6)


def gpus(*gib: float) -> tuple[Device, ...]:
    """Return GPUs that have so much, all of it free."""
    sizes = [int(each * GIB) for each in gib]
    return tuple(Device(id=f"{n}", name=f"GPU {n}", free_bytes=s, total_bytes=s) for n, s in enumerate(sizes))


@pytest.fixture(scope="session")
def shape_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HeaderName], ModelShape]:
    """Return the shape of a real model, read from a file that is all header."""

    @cache
    def read(name: HeaderName) -> ModelShape:
        return describe(read_gguf(header_of(name)))

    header_of = _headers(tmp_path_factory.mktemp("headers"))
    return read


@pytest.fixture(scope="session")
def header_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HeaderName], Path]:
    """Return such a file."""
    return _headers(tmp_path_factory.mktemp("files"))


def _headers(folder: Path) -> Callable[[HeaderName], Path]:
    @cache
    def write(name: HeaderName) -> Path:
        path = folder / f"{name}.gguf"
        write_header(path, HEADERS[name], name=name)
        return path

    return write
