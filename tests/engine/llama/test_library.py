"""Tests of finding llama.cpp's libraries, and of their fitting the bindings."""

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
from inferencecenter.hardware import ggml
from inferencecenter.hardware.ggml import LIBRARY_PATH, library_dir


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the variable names, with no library in it."""
    monkeypatch.setenv(LIBRARY_PATH, str(tmp_path))
    return tmp_path


def test_libraries_of_the_bindings_version_are_loaded() -> None:
    """Those of this environment."""
    load_library()


def test_libraries_for_other_bindings_are_refused(libraries: Path) -> None:
    """By the version beside them, without loading them; the message names both and what to do."""
    (libraries / VERSION_FILE).write_text("0.0.1\n")
    with pytest.raises(InferenceCenterError) as caught:
        load_library()
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert f"built for llama-cpp-python 0.0.1, and {version('llama-cpp-python')} is installed" in caught.value.message
    assert "make run" in (caught.value.hint or "")


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


def test_an_engine_says_that_libraries_lack_a_function(libraries: Path) -> None:
    """Libraries that do not tell their version; the daemon ends with the reason and 78."""
    shutil.copy(_core.__file__, libraries / "libllama.so")
    done = started(libraries)
    assert done.returncode == 78
    assert "cannot be used with llama-cpp-python" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_engine_says_that_there_are_no_libraries(libraries: Path) -> None:
    """The folder is named."""
    done = started(libraries)
    assert done.returncode == 78
    assert str(libraries) in done.stdout + done.stderr


def test_a_package_of_libraries_comes_before_those_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the variable names comes before both; without any there is none."""
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
