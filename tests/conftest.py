"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

import inferencecenter
import inferencecenter.engine.llama  # tests that import the bindings find the libraries by it
from tests.leftovers import leftovers
from tests.prefork import close_template, install

if TYPE_CHECKING:
    from collections.abc import Generator

pytest_plugins = ("tests.examples",)

_MOST_WORKERS = 8
_WITH_ANTHROPIC = (
    "tests/api/anthropic/",
    "tests/api/openai/test_models.py",
    "tests/api/test_empty_conversations.py",
    "tests/api/test_prompt_counts.py",
)
"""Tests with the client of the package anthropic, which takes four seconds of CPU time to import."""
for _name in ("COLUMNS", "LINES"):  # a zero terminal size, which readline passes on to child processes
    os.environ.pop(_name, None)

# Each process that uses pydantic would search all installed packages for plugins of it when it starts.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Daemons handle SIGHUP and programs SIGINT unless started to ignore them, as by `nohup` and a shell's `&`.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis would limit each example to 200 ms, and the making of its data to some seconds; no test asserts a time,
# since the machine may be busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_BUNDLED = Path(inferencecenter.__file__).parent / "demo" / "demo.gguf"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use all processors for the whole suite, and this process for paths named on the command line."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Any:
    """Give a worker whole files, and one worker all that use the package anthropic."""
    if config.getvalue("dist") != "loadfile":
        return None
    scheduler = LoadFileScheduling(config, log)
    file_of = scheduler._split_scope
    scheduler._split_scope = lambda test: "anthropic" if test.startswith(_WITH_ANTHROPIC) else file_of(test)
    return scheduler


def pytest_configure() -> None:
    """Have programs forked."""
    install()


def pytest_unconfigure() -> None:
    """End the process of which daemons are forks."""
    close_template()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what stays until the end from garbage collection, which would traverse it over and over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Send one report of a test that passes, not of its start, setup and teardown too: half the messages of a worker.

    With ``--durations``, which lists setups and teardowns, all are sent.
    """
    if not hasattr(item.config, "workerinput") or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The bundled demo model, or the file named by ``INFERENCECENTER_TEST_MODEL``."""
    return Path(os.environ.get("INFERENCECENTER_TEST_MODEL", _BUNDLED))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Close what a failed test has left open. A fixture that each test has would take seconds."""
    with leftovers:
        return (yield)
