"""Memory figures of the kernel: machine, control groups and processes, complete or not."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware import process_usage
from inferencecenter.hardware.memory import (
    MemoryLimit,
    ResidentMemory,
    available_memory_bytes,
    cgroup_memory,
    machine_memory,
    physical_cores,
    resident_memory,
)
from inferencecenter.hardware.process_usage import read_usage

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1024, 2**20
MEMINFO = """\
MemTotal:        8000 kB
MemFree:          500 kB
MemAvailable:    3000 kB
HugePages_Total:    0
"""
# 700 in all: 300 of processes, 100 of a tmpfs, 250 of files, 30 of the kernel that it can free, 20 that it cannot.
STAT = """\
anon 300
file 350
shmem 100
inactive_anon 400
active_anon 0
inactive_file 200
active_file 50
unevictable 0
slab_reclaimable 30
slab_unreclaimable 20
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A ``/proc`` directory, with this process in the group ``/user/app``."""
    path = tmp_path / "proc"
    (path / "self").mkdir(parents=True)
    (path / "self" / "cgroup").write_text("4:memory:/old\n0::/user/app\n")
    (path / "meminfo").write_text(MEMINFO)
    return path


def group(path: Path, *, limit: str = "max", high: str = "max", current: int = 700, stat: str = STAT) -> None:
    """Create a control group."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in (("max", limit), ("high", high), ("current", str(current)), ("stat", stat)):
        (path / f"memory.{name}").write_text(f"{text}\n")


def test_machine_memory(proc: Path) -> None:
    """Used is the total less what is available."""
    assert machine_memory(proc) == MemoryLimit(5000 * KIB, 8000 * KIB)


@pytest.mark.parametrize("text", ["", "MemTotal: 1 kB\n", "MemTotal: lots kB\nMemAvailable: 5 kB\n", "\n\n:\n"])
def test_machine_without_figures(proc: Path, text: str) -> None:
    """Missing and partial figures are unknown."""
    (proc / "meminfo").write_text(text)
    assert machine_memory(proc) is None


def test_this_machine() -> None:
    """Readings of this machine and of this process grow with it, shared memory included."""
    share = machine_memory()
    assert share is not None
    assert 0 < share.used_bytes < share.total_bytes
    before = resident_memory(os.getpid())
    with mmap.mmap(-1, 32 * MIB) as shared, mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE) as own:
        for mapping in (shared, own):
            mapping.write(b"x" * len(mapping))
        after = resident_memory(os.getpid())
    assert after.shared_bytes - before.shared_bytes >= 32 * MIB
    assert after.own_bytes - before.own_bytes >= 16 * MIB


def test_reclaimable_group_memory_does_not_count(proc: Path, tmp_path: Path) -> None:
    """Files of a tmpfs do count, because they cannot be read again."""
    group(tmp_path / "user" / "app", limit="1000")
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(420, 1000)


def test_memory_high_is_a_limit(proc: Path, tmp_path: Path) -> None:
    """Above ``memory.high`` the kernel throttles a group."""
    group(tmp_path / "user" / "app", limit="1000", high="800")
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(420, 800)
    group(tmp_path / "user" / "app", high="900")
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(420, 900)


def test_fullest_group_counts(proc: Path, tmp_path: Path) -> None:
    """Parent groups count, groups without a limit do not."""
    group(tmp_path / "user" / "app", limit="10000")
    group(tmp_path / "user", limit="1000", current=1000)
    group(tmp_path)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(720, 1000)


def test_container_group_at_the_root(proc: Path, tmp_path: Path) -> None:
    """Its limit is found there."""
    (proc / "self" / "cgroup").write_text("0::/\n")
    group(tmp_path, limit="1000")
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(420, 1000)


def group_v1(path: Path, *, limit: int, usage: int = 700) -> None:
    """Create a control group of version 1 that uses 250 of page cache, its child 200 of these."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (path / "memory.stat").write_text("cache 200\ninactive_file 200\ntotal_inactive_file 200\ntotal_active_file 50\n")


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_cgroup_v1(proc: Path, tmp_path: Path, controllers: str) -> None:
    """The limit is below the controller's own directory, child groups included."""
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n4:{controllers}:/user/app\n0::/\n")
    group_v1(tmp_path / controllers / "user" / "app", limit=1000)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(450, 1000)
    group_v1(tmp_path / controllers / "user", limit=460, usage=710)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(460, 460)


def test_cgroup_v1_without_a_limit(proc: Path, tmp_path: Path) -> None:
    """The kernel reports a very large number."""
    (proc / "self" / "cgroup").write_text("4:memory:/user/app\n")
    group_v1(tmp_path / "memory" / "user" / "app", limit=9223372036854771712)
    assert cgroup_memory(proc, tmp_path) is None


def test_cgroup_v1_in_a_container(proc: Path, tmp_path: Path) -> None:
    """The path is the host's, of which only the group is mounted."""
    (proc / "self" / "cgroup").write_text("4:memory:/docker/0123456789ab\n0::/system.slice/docker\n")
    group_v1(tmp_path / "memory", limit=1000)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(450, 1000)


def test_hybrid_cgroup_layout(proc: Path, tmp_path: Path) -> None:
    """Version 2 is mounted elsewhere, without the memory controller."""
    (proc / "self" / "cgroup").write_text("4:memory:/app\n0::/app\n")
    group_v1(tmp_path / "memory" / "app", limit=1000)
    (tmp_path / "unified" / "app").mkdir(parents=True)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(450, 1000)


@pytest.mark.parametrize("line", ["", "0::/../other\n", "4:memory:/old\n", "0::/gone\n", "nonsense"])
def test_no_limited_group(proc: Path, tmp_path: Path, line: str) -> None:
    """Mixed, missing, unreachable and absent groups have no limit."""
    (proc / "self" / "cgroup").write_text(line)
    group(tmp_path / "old", limit="1000")
    group(tmp_path.parent / "other", limit="1000")
    assert cgroup_memory(proc, tmp_path) is None


@pytest.mark.parametrize("broken", ["memory.current", "memory.stat", "memory.max"])
def test_group_with_partial_figures(proc: Path, tmp_path: Path, broken: str) -> None:
    """Without its limit or its use it is unknown; without details all of its use counts."""
    group(tmp_path / "user" / "app", limit="1000")
    (tmp_path / "user" / "app" / broken).unlink()
    assert cgroup_memory(proc, tmp_path) == (MemoryLimit(700, 1000) if broken == "memory.stat" else None)


def test_limit_of_zero_is_ignored(proc: Path, tmp_path: Path) -> None:
    """No daemon can run in such a group."""
    group(tmp_path / "user" / "app", limit="0")
    assert cgroup_memory(proc, tmp_path) is None


def test_available_memory_of_the_machine(proc: Path, tmp_path: Path) -> None:
    """A missing figure is unknown, and a control group without a limit changes nothing."""
    group(tmp_path / "user" / "app")
    assert available_memory_bytes(proc, tmp_path) == 3000 * KIB
    (proc / "meminfo").write_text("MemTotal: 8000 kB\n")
    assert available_memory_bytes(proc, tmp_path) is None
    (proc / "meminfo").unlink()
    assert available_memory_bytes(proc, tmp_path) is None


def test_available_memory_of_a_group(proc: Path, tmp_path: Path) -> None:
    """It is the least that the process's group and its parents leave, without page cache."""
    group(tmp_path / "user" / "app", limit="1000")
    assert available_memory_bytes(proc, tmp_path) == 580
    group(tmp_path / "user", limit="9000", high="8000", current=7900)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(7620, 8000)
    assert available_memory_bytes(proc, tmp_path) == 380
    group(tmp_path / "user", limit="90000", current=89000)
    assert cgroup_memory(proc, tmp_path) == MemoryLimit(88720, 90000)
    assert available_memory_bytes(proc, tmp_path) == 580
    group(tmp_path / "user", limit="1000", current=1500)
    assert available_memory_bytes(proc, tmp_path) == 0


def test_available_memory_of_a_cgroup_v1(proc: Path, tmp_path: Path) -> None:
    """Page cache of the group can be reclaimed."""
    (proc / "self" / "cgroup").write_text("4:memory:/user/app\n")
    group_v1(tmp_path / "memory" / "user" / "app", limit=1000)
    assert available_memory_bytes(proc, tmp_path) == 550


def test_available_memory_of_a_group_larger_than_the_machine(proc: Path, tmp_path: Path) -> None:
    """The machine's memory is the limit."""
    group(tmp_path / "user" / "app", limit=str(2**40))
    assert available_memory_bytes(proc, tmp_path) == 3000 * KIB


def test_process_memory(proc: Path) -> None:
    """Page cache does not count."""
    (proc / "7").mkdir()
    (proc / "7" / "status").write_text("Name:\tengine 1\nRssAnon:\t 10 kB\nRssFile:\t 90 kB\nRssShmem:\t 3 kB\n")
    assert resident_memory(7, proc) == ResidentMemory(10 * KIB, 3 * KIB)
    assert resident_memory(8, proc) == ResidentMemory()


ODD = [b"\xff\xfe", b"9" * 5000, b"-5", "\u0663".encode(), b"", b"\0", b"nan"]


@pytest.mark.parametrize("content", ODD)
@pytest.mark.parametrize("name", ["memory.max", "memory.high", "memory.current", "memory.stat"])
def test_malformed_group_figure_is_unknown(proc: Path, tmp_path: Path, name: str, content: bytes) -> None:
    """It is treated as missing."""
    group(tmp_path / "user" / "app", limit="1000")
    (tmp_path / "user" / "app" / name).write_bytes(content)
    assert cgroup_memory(proc, tmp_path) in (None, MemoryLimit(420, 1000), MemoryLimit(700, 1000))


@pytest.mark.parametrize("content", ODD)
def test_malformed_kernel_figures_are_unknown(proc: Path, tmp_path: Path, content: bytes) -> None:
    """They are those of the machine, of a control group, of a process, and of the cores."""
    for path in (proc / "meminfo", proc / "self" / "cgroup", tmp_path / "cores"):
        path.write_bytes(content)
    (proc / "7").mkdir()
    (proc / "7" / "status").write_bytes(b"RssAnon: " + content + b" kB\n")
    (proc / "7" / "stat").write_bytes(content)
    assert machine_memory(proc) is None
    assert cgroup_memory(proc, tmp_path) is None
    assert resident_memory(7, proc) == ResidentMemory()
    assert available_memory_bytes(proc, tmp_path) is None
    (proc / "meminfo").write_bytes(b"MemTotal: 0 kB\nMemAvailable: " + content + b" kB\n")
    assert available_memory_bytes(proc, tmp_path) is None
    assert machine_memory(proc) is None
    assert physical_cores(tmp_path) >= 1


@pytest.mark.parametrize("content", [*ODD, b"7 (a b) R", b"7 (a) " + b"x " * 50])
def test_malformed_process_figures(proc: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """It is treated as gone."""
    (proc / "7").mkdir()
    for name in ("stat", "statm"):
        (proc / "7" / name).write_bytes(content)
    monkeypatch.setattr(process_usage, "_PROC", proc)
    with pytest.raises(OSError):  # noqa: PT011 - what callers are told to expect
        read_usage(7)
