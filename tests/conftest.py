"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import inferencecenter
from tests.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_WORKERS = 8
for _name in ("COLUMNS", "LINES"):  # the size of no terminal, which readline leaves to processes that are started
    os.environ.pop(_name, None)

# Daemons obey SIGHUP and programs SIGINT unless they were started to ignore them, as `nohup` and a shell's `&` do.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis would have each example end within 200 ms; no test asserts a time, since machines are busy with other work.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_BUNDLED = Path(inferencecenter.__file__).parent / "demo" / "demo.gguf"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite on all processors, and what is named on the command line in this process."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The bundled demo model, or the file named by ``INFERENCECENTER_TEST_MODEL``."""
    return Path(os.environ.get("INFERENCECENTER_TEST_MODEL", _BUNDLED))


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    """Close what a test that failed halfway has left open."""
    with leftovers:
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where no bytecode may be left beside the code, have the processes that tests start share it in pytest's cache.

    There are hundreds of them, and each would compile everything again.
    """
    with pytest.MonkeyPatch.context() as environment:
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            cache = pytestconfig.cache if pytestconfig.pluginmanager.hasplugin("cacheprovider") else None
            folder = tmp_path_factory.getbasetemp() / "bytecode" if cache is None else cache.mkdir("bytecode")
            environment.delenv("PYTHONDONTWRITEBYTECODE")
            environment.setenv("PYTHONPYCACHEPREFIX", str(folder))
        yield
