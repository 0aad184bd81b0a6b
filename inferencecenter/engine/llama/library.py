"""The libraries of llama.cpp: whether the bindings are made for them, and loading both.

The bindings are declarations in Python. A library of another version has other structures behind the same names, which
would be read as garbage, so the version that is written beside the libraries is compared before they are loaded.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.ggml import LIBRARY_PATH, library_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERSION_FILE: Final = "llama-cpp-python.version"
"""Beside the libraries: the version of the bindings that they were built for."""

_BINDINGS: Final = "llama-cpp-python"
_LOADED: Final = "load_backend: loaded "
"""How llama.cpp's log names a backend that it chose, with its file."""


def _ignore(_level: str, _line: str) -> None:
    pass


def load_library(*, on_log: Callable[[str, str], None] = _ignore) -> None:
    """Check that libraries and bindings have the same version, and load both.

    Libraries that do not report a version mismatch only if they lack a function. ``on_log`` receives a level and a line
    of llama.cpp's log: in a portable build, the kernels selected for this CPU.

    Raises:
        InferenceCenterError: ``invalid_config`` if they do not match or cannot be loaded.
    """
    place = library_dir()
    bindings = version(_BINDINGS)
    if place is not None and (built_for := _version_of(place)) not in (None, bindings):
        raise _refused(f"were built for {_BINDINGS} {built_for}, and {bindings} is installed", place, bindings)
    try:
        importlib.import_module("llama_cpp.llama_cpp")
    except (OSError, RuntimeError, AttributeError) as error:  # what ctypes and the bindings raise
        raise _refused(f"cannot be used with {_BINDINGS} {bindings}: {error}", place, bindings) from error
    from inferencecenter.engine.llama.devices import load_backends  # noqa: PLC0415 - needs what was loaded just now
    from inferencecenter.engine.llama.log import LlamaLog  # noqa: PLC0415

    log = LlamaLog(lambda level, line: on_log("info" if line.startswith(_LOADED) else level, line))
    log.install()
    try:
        found = load_backends()
    finally:
        log.close()
    if not found:
        raise _refused("have no kernels for this CPU", place, bindings)


def _version_of(place: Path) -> str | None:
    try:
        return (place / VERSION_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _refused(why: str, place: Path | None, bindings: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        f"llama.cpp's libraries{f' in {place}' if place else ''} {why}.",
        hint="Install both anew with `make run` or from the wheels of one release; where"
        f" {LIBRARY_PATH} is set, unset it or name libraries for {bindings}.",
    )
