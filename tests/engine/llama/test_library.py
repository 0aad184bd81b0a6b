"""Finding llama.cpp's libraries, and checking that they fit the bindings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import _core  # any shared library

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.library import VERSION_FILE, load_library
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.hardware import ggml
from inferencecenter.hardware.ggml import LIBRARY_PATH, library_dir


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without libraries, named by the environment variable."""
    monkeypatch.setenv(LIBRARY_PATH, str(tmp_path))
    return tmp_path


def test_libraries_of_the_bindings_version_are_loaded() -> None:
    """The libraries of this environment have it."""
    load_library()


def test_libraries_for_other_bindings_are_refused(libraries: Path) -> None:
    """The version file beside them is checked before loading; the message names both versions and the remedy."""
    (libraries / VERSION_FILE).write_text("0.0.1\n")
    with pytest.raises(InferenceCenterError) as caught:
        load_library()
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert f"built for llama-cpp-python 0.0.1, and {version('llama-cpp-python')} is installed" in caught.value.message
    assert "make run" in (caught.value.hint or "")


def test_selected_kernels_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that llama.cpp names is logged at info; its other messages keep their level."""
    chosen, searched = "load_backend: loaded CPU backend from /lib/libggml-cpu-zen4.so", "search path does not exist"
    monkeypatch.setattr(LlamaLog, "install", lambda log: log.write(2, f"{chosen}\n{searched}\n"))
    lines: list[tuple[str, str]] = []
    load_library(on_log=lambda level, line: lines.append((level, line)))
    assert lines == [("info", chosen), ("debug", searched)]


def started(libraries: Path) -> subprocess.CompletedProcess[str]:
    """Start a daemon on the bundled model with these libraries."""
    return subprocess.run(
        [sys.executable, "-m", "inferencecenter", "serve", "--port", "0", "--state-dir", libraries / "state"],
        env={**os.environ, LIBRARY_PATH: str(libraries)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_incompatible_libraries_stop_the_daemon(libraries: Path) -> None:
    """Libraries without a version lack a function: the daemon ends with the reason and status 78."""
    shutil.copy(_core.__file__, libraries / "libllama.so")
    done = started(libraries)
    assert done.returncode == 78
    assert "cannot be used with llama-cpp-python" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_missing_libraries_are_reported(libraries: Path) -> None:
    """The directory is named."""
    done = started(libraries)
    assert done.returncode == 78
    assert str(libraries) in done.stdout + done.stderr


def test_library_package_has_priority_over_the_bindings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment variable has priority over both; without any there are none."""
    monkeypatch.delenv(LIBRARY_PATH)
    installed = {name: tmp_path / name for name in ("inferencecenter_llama", "llama_cpp")}
    monkeypatch.setattr(
        ggml,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(installed[name])]) if name in installed else None,
    )
    assert library_dir() is None
    for name in ("llama_cpp", "inferencecenter_llama"):
        (tmp_path / name / "lib").mkdir(parents=True)
        assert library_dir() == tmp_path / name / "lib"
    monkeypatch.setenv(LIBRARY_PATH, "/mine")
    assert library_dir() == Path("/mine")
    monkeypatch.delenv(LIBRARY_PATH)
    installed.clear()
    assert library_dir() is None
