"""The installed service under a real systemd, booted in a container over this machine's own root.

``systemd-nspawn`` boots an overlay of the root directory: what is written there is in memory and goes with it, the
network is the container's own, and of this machine's services none is started. The check is a unit that works through a
list of steps, writes down how each went, and ends the container. Where this machine forbids any of that the test is
left out, and says why; it knows by a first step that only needs systemd itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import inferencecenter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
CGROUPS: Final = Path("/sys/fs/cgroup")
BOOT_S: Final = 240
"""Seconds after which the container is killed."""
_TOOLS: Final = ("systemd-nspawn", "unshare", "mount", "make")

# Makes the overlay, puts the files of `make install` into it, and boots it. The mounts are of this process's own
# namespace and end with it.
_OUTER: Final = """
set -eu
folder=$1
shift
mount -t tmpfs -o size=1g,mode=755 tmpfs "$folder/base"
cd "$folder/base"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=upper,workdir=work" root
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
rm -rf root/opt/inferencecenter root/etc/inferencecenter root/var/lib/inferencecenter
: >root/etc/fstab
make --silent -C "$folder/source" install-files DESTDIR="$folder/base/root"
cp -r "$folder/files/." root/
cd /
exec systemd-nspawn --quiet --register=no --directory="$folder/base/root" --machine="$(basename "$folder")" --boot \\
    --private-network --link-journal=no --resolv-conf=off --timezone=off --console=read-only \\
    --bind="$folder/check:/check" "$@" systemd.unit=inferencecenter-check.target </dev/null
"""

_TARGET: Final = """
[Unit]
Requires=inferencecenter-check.service
AllowIsolate=yes
"""

_UNIT: Final = """
[Unit]
DefaultDependencies=no
Requires=sysinit.target
After=sysinit.target
SuccessAction=exit-force
FailureAction=exit-force

[Service]
Type=oneshot
ExecStart=/bin/bash /check/steps.sh
TimeoutStartSec=200
"""

_STEPS: Final = r"""
step() {
    local name=$1 status=0
    shift
    "$@" >"/check/$name.out" 2>&1 || status=$?
    echo "$name $status" >>/check/steps
}
config=/etc/inferencecenter/inferencecenter.toml
# The first death of an engine is the last, so that the daemon gives it up.
sed -i 's/^#max_restarts = .*/max_restarts = 0/' "$config"
restarted() {
    for _ in $(seq 300); do
        [ "$(systemctl show --property=NRestarts --value inferencecenter)" = 1 ] && return
        sleep 0.2
    done
    return 1
}
kill_engine() {
    local found
    found=$(grep --files-with-matches --text 'inferencecenter[.]engine' /proc/[0-9]*/cmdline | cut -d/ -f3)
    kill -KILL $found
}
pid() { systemctl show --property=MainPID --value inferencecenter; }
step booted systemctl list-units --no-pager

# As `make install` does on the machine that it installs on.
step users systemd-sysusers /etc/sysusers.d/inferencecenter.conf
step folders systemd-tmpfiles --create /etc/tmpfiles.d/inferencecenter.conf
chgrp inferencecenter "$config"
step daemon-reload systemctl daemon-reload

step start systemctl start inferencecenter
step status systemctl status --no-pager inferencecenter
step ready inferencecenter healthcheck --ready --config "$config"
step pid pid
step reload systemctl reload inferencecenter
cp "$config" "$config.good"
echo 'broken = [' >>"$config"
step reload-broken systemctl reload inferencecenter
step active-after systemctl is-active inferencecenter
step pid-after pid
cp "$config.good" "$config"
step ready-after inferencecenter healthcheck --ready --config "$config"
step reload-mended systemctl reload inferencecenter
step engine-killed kill_engine
step restarted restarted
step start-again systemctl start inferencecenter
step ready-again inferencecenter healthcheck --ready --config "$config"
step stop systemctl stop inferencecenter
step result systemctl show --property=Result --property=ExecMainStatus inferencecenter
step journal journalctl --no-pager --output=cat --unit=inferencecenter
step lines journalctl --no-pager --output=json --identifier=inferencecenter
"""


@dataclass(frozen=True)
class BootResult:
    """The results of the steps."""

    statuses: dict[str, int]
    folder: Path

    def output(self, step: str) -> str:
        """Return the output of a step."""
        return (self.folder / f"{step}.out").read_text(errors="replace")


def obstacle() -> str | None:
    """Return why this machine cannot boot the container, as far as known beforehand."""
    if os.geteuid() != 0:
        return "only root may boot a container"
    if missing := [name for name in _TOOLS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed (Debian: apt install systemd-container)"
    if not PYTHON.exists():
        return f"there is no {PYTHON}, and the unit does not see a Python in a home directory"
    if not (Path("/run/systemd/system").is_dir() or cgroup_roots()):
        return "there is neither a running systemd nor a control group hierarchy to boot one in"
    return None


def cgroup_roots() -> list[Path]:
    """Return the container's control groups; in a hybrid layout there are two."""
    return [path for path in (CGROUPS, CGROUPS / "systemd", CGROUPS / "unified") if (path / "cgroup.procs").exists()]


@contextlib.contextmanager
def own_cgroup(name: str) -> Iterator[list[str]]:
    """Yield shell commands that enter control groups of their own, which are removed at the end.

    A running systemd creates one on request, and no other process may write to its hierarchy.
    """
    if Path("/run/systemd/system").is_dir():
        yield []
        return
    groups = [root / name for root in cgroup_roots()]
    for group in groups:
        group.mkdir()
    try:
        yield [f"echo $$ >{group}/cgroup.procs" for group in groups]
    finally:
        for group in groups:
            remove_cgroup(group)


def remove_cgroup(group: Path) -> None:
    """Kill what runs in a control group and remove it with its children."""
    for below in sorted((path for path in (group, *group.rglob("*")) if path.is_dir()), reverse=True):
        deadline = time.monotonic() + 60
        while below.exists():
            for pid in (below / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):  # it has ended since the list was read
                    os.kill(int(pid), signal.SIGKILL)
            try:
                below.rmdir()
            except OSError:
                assert time.monotonic() < deadline, f"{below} is still in use"
                time.sleep(0.05)


def paths_of_python() -> list[Path]:
    """Return the import paths of the package and its dependencies, the package's first."""
    own = Path(inferencecenter.__file__).parents[1]
    others = [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return list(dict.fromkeys([own, *others]))


def write_overlay(folder: Path) -> list[str]:
    """Write the container's files besides those of ``make install``; return its options."""
    for name in ("base", "check", "files"):
        (folder / name).mkdir()
    (folder / "source").symlink_to(ROOT)
    units = folder / "files/etc/systemd/system"
    units.mkdir(parents=True)
    (units / "inferencecenter-check.target").write_text(_TARGET)
    (units / "inferencecenter-check.service").write_text(_UNIT)
    for waiting in ("systemd-networkd-wait-online", "NetworkManager-wait-online", "ifupdown-wait-online"):
        (units / f"{waiting}.service").symlink_to("/dev/null")
    (folder / "check/steps.sh").write_text(_STEPS)
    # In place of the environment that `make install` makes from wheels: the same Python, and these very packages.
    venv = folder / "files/opt/inferencecenter/venv"
    site_packages = venv / f"lib/{PYTHON.name}/site-packages"
    site_packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to(PYTHON)
    (venv / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\ninclude-system-site-packages = false\n")
    there = {source: f"/opt/inferencecenter/lib/{number}" for number, source in enumerate(paths_of_python())}
    (site_packages / "paths.pth").write_text("".join(f"{place}\n" for place in there.values()))
    return [f"--bind-ro={source}:{place}" for source, place in there.items()]


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> BootResult:
    """The results of the steps, run once by a booted systemd."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("boot")
    options = write_overlay(folder)
    with own_cgroup(f"inferencecenter-{os.getpid()}") as enter, (folder / "console").open("wb") as console:
        keep = ["--keep-unit"] if enter else []
        script = "\n".join([*enter, _OUTER])
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "boot", str(folder)]
        ended = subprocess.run(
            ["timeout", "--kill-after=10", str(BOOT_S), *command, *keep, *options],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            check=False,
        )
    told = (folder / "console").read_text(errors="replace")
    steps = folder / "check/steps"
    lines = steps.read_text().split("\n") if steps.exists() else []
    statuses = {name: int(status) for name, _, status in (line.partition(" ") for line in lines if line)}
    if statuses.get("booted") != 0:
        pytest.skip(f"no systemd can be booted here: {told[-2000:]}")
    assert "lines" in statuses, (ended.returncode, statuses, told)
    return BootResult(statuses, folder / "check")


def test_installed_service_becomes_ready(booted: BootResult) -> None:
    """``systemctl start`` returns when turns can run, within the unit's sandbox."""
    for step in ("users", "folders", "daemon-reload", "start", "status", "ready", "reload"):
        assert booted.statuses[step] == 0, (step, booted.output(step), booted.output("journal"))
    assert 'Status: "' in booted.output("status")
    assert "-m inferencecenter.engine" in booted.output("status")


def test_reload_of_a_broken_file_fails(booted: BootResult) -> None:
    """The daemon stays ready, and accepts the repaired file."""
    assert booted.statuses["reload-broken"] != 0
    journal = booted.output("journal")
    assert "inferencecenter.toml: is not TOML" in journal
    assert booted.output("active-after").strip() == "active"
    assert booted.output("pid-after") == booted.output("pid") != "0\n"
    for step in ("ready-after", "reload-mended"):
        assert booted.statuses[step] == 0, (step, booted.output(step), journal)


def test_systemd_restarts_after_a_given_up_engine(booted: BootResult) -> None:
    """The daemon exits, and the next one is ready."""
    for step in ("engine-killed", "restarted", "start-again", "ready-again"):
        assert booted.statuses[step] == 0, (step, booted.output(step), booted.output("journal"))
    assert "code=exited, status=1/FAILURE" in booted.output("journal")


def test_stop_is_clean(booted: BootResult) -> None:
    """The unit does not fail."""
    assert booted.statuses["stop"] == 0
    assert sorted(booted.output("result").split()) == ["ExecMainStatus=0", "Result=success"]


def test_journal_has_the_service_name_and_no_token(booted: BootResult) -> None:
    """The administrator's token of the first start is not logged."""
    assert '"engine_ready' in booted.output("lines").replace('\\"', '"')
    journal = booted.output("journal")
    assert "Token in /var/lib/inferencecenter/admin.token" in journal
    assert "Token    ic_" not in journal
