"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import inferencecenter
import inferencecenter.engine.llama  # tests that import the bindings find the libraries by it
from tests.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_WORKERS = 8
for _name in ("COLUMNS", "LINES"):  # a zero terminal size, which readline passes on to child processes
    os.environ.pop(_name, None)

# Each process that uses pydantic would search all installed packages for plugins of it when it starts.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Daemons handle SIGHUP and programs SIGINT unless started to ignore them, as by `nohup` and a shell's `&`.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis would limit each example to 200 ms; no test asserts a time, since the machine may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_BUNDLED = Path(inferencecenter.__file__).parent / "demo" / "demo.gguf"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use all processors for the whole suite, and this process for paths named on the command line."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The bundled demo model, or the file named by ``INFERENCECENTER_TEST_MODEL``."""
    return Path(os.environ.get("INFERENCECENTER_TEST_MODEL", _BUNDLED))


@pytest.fixture(autouse=True)
def _close_leftovers() -> Iterator[None]:
    """Close what a failed test has left open."""
    with leftovers:
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share bytecode in pytest's cache among the processes that tests start, if none may be written beside the code.

    There are hundreds of such processes, and each would compile every module again.
    """
    with pytest.MonkeyPatch.context() as environment:
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            cache = pytestconfig.cache if pytestconfig.pluginmanager.hasplugin("cacheprovider") else None
            folder = tmp_path_factory.getbasetemp() / "bytecode" if cache is None else cache.mkdir("bytecode")
            environment.delenv("PYTHONDONTWRITEBYTECODE")
            environment.setenv("PYTHONPYCACHEPREFIX", str(folder))
        yield
