"""The record of a run: all that is needed to assess its figures, or to repeat it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from benchmarks.results import rows
from inferencecenter import __version__

if TYPE_CHECKING:
    from benchmarks.options import Options
    from benchmarks.results import Report

_PACKAGES: Final = ("llama-cpp-python", "uvicorn", "starlette", "websockets", "uvloop", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place."""

    cpu: str
    usable_cores: int
    memory_bytes: int
    gpu: str | None
    kernel: str
    python: str


def this_machine(gpu: str | None) -> Machine:
    """Describe this machine.

    Args:
        gpu: Name of its GPU, if there is one.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(
        cpu=names[0] if names else platform.machine(),
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpu=gpu,
        kernel=platform.release(),
        python=platform.python_version(),
    )


def versions() -> dict[str, str]:
    """Return the versions of this package and of those that decide its speed."""
    found = {"inferencecenter": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def record(report: Report, options: Options, *, machine: Machine, date: str) -> dict[str, Any]:
    """Return a run as JSON: options, both sides' facts, every repetition, and the table's rows.

    Tokens are left out. ``date`` is ISO 8601.
    """
    peers = tuple(replace(peer, token=None) for peer in options.peers) if options.peers else None
    public = replace(options, token=None, peers=peers)
    return {
        "scenario": report.scenario,
        "date": date,
        "options": {name: value for name, value in asdict(public).items() if value is not None},
        "machine": asdict(machine),
        "versions": versions(),
        "sides": [asdict(side) for side in report.sides],
        "points": [asdict(point) for point in report.points],
        "rows": [asdict(row) for row in rows(report)],
    }


def as_text(found: dict[str, Any]) -> str:
    """Return a record as it is kept in a file."""
    return orjson.dumps(found, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
