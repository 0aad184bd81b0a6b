"""The unit files of ``make install``, checked by systemd's own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inferencecenter.config.loader import load_settings

ROOT = Path(__file__).parents[2]
MAX_EXPOSURE = 3.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def run(*command: str | Path) -> str:
    """Run a program in the checkout and return its output."""
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make(*arguments: str) -> str:
    """Run make."""
    return run("make", "--silent", *arguments)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installed units, whose program exists."""
    folder = tmp_path_factory.mktemp("installed")
    program = folder / "opt" / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/true")
    make("install-files", f"prefix={folder}/opt", f"sysconfdir={folder}/etc", f"bindir={folder}/bin")
    return folder / "etc" / "systemd" / "system"


@needs_systemd
def test_systemd_analyze_accepts_the_units(units: Path) -> None:
    """Every name is known and every program exists."""
    names = sorted(path.name for path in units.iterdir())
    assert names == ["inferencecenter.service", "inferencecenter.socket"]
    assert run("systemd-analyze", "verify", "--man=no", *(units / name for name in names)) == ""


@needs_systemd
def test_exposure_score_is_within_the_limit(units: Path) -> None:
    """It equals the score in docs/operations.md."""
    said = run("systemd-analyze", "security", "--offline=true", "--no-pager", units / "inferencecenter.service")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert found, said
    assert float(found[1]) <= MAX_EXPOSURE
    assert f"exposure level {found[1]}" in (ROOT / "docs" / "operations.md").read_text()


def test_syslog_identifier_is_the_daemon() -> None:
    """It is not the interpreter's name."""
    assert "\nSyslogIdentifier=inferencecenter\n" in (ROOT / "systemd" / "inferencecenter.service").read_text()


def test_install_is_idempotent(tmp_path: Path) -> None:
    """Files stay below DESTDIR, and an edited configuration is kept."""
    make("install-files", f"DESTDIR={tmp_path}")
    first = tree(tmp_path)
    assert {path.split("/")[0] for path in first} == {"etc", "opt", "usr"}
    config = tmp_path / "etc/inferencecenter/inferencecenter.toml"
    assert b'\nstate_dir = "/var/lib/inferencecenter"\n' in config.read_bytes()
    assert b'\nmodels_dir = "/var/lib/inferencecenter-models"\n' in config.read_bytes()
    assert load_settings(config).engine.exit_when_failed
    config.write_text("server.port = 4000\n")
    make("install-files", f"DESTDIR={tmp_path}")
    second = tree(tmp_path)
    assert second.pop("etc/inferencecenter/inferencecenter.toml.default").startswith(b"# InferenceCenter")
    assert second.pop("etc/inferencecenter/inferencecenter.toml") == b"server.port = 4000\n"
    assert second.items() <= first.items()
    assert len(second) == len(first) - 1


def test_uninstall_keeps_the_configuration(tmp_path: Path) -> None:
    """Everything else is removed, and a second run does nothing."""
    make("install-files", f"DESTDIR={tmp_path}")
    venv = tmp_path / "opt/inferencecenter/venv/bin"
    venv.mkdir(parents=True)
    for _ in range(2):
        assert "/etc/inferencecenter" in make("uninstall", f"DESTDIR={tmp_path}")
        assert list(tree(tmp_path)) == ["etc/inferencecenter/inferencecenter.toml"]
    assert not (tmp_path / "opt").exists()


def test_prefix_is_in_every_file(tmp_path: Path) -> None:
    """Units and command call the installed program."""
    make("install-files", f"DESTDIR={tmp_path}", "prefix=/usr/local/lib/inference", "sysconfdir=/usr/local/etc")
    installed = tree(tmp_path)
    places = [path for path, content in installed.items() if b"/usr/local/lib/inference/venv/bin/python" in content]
    assert sorted(places) == ["usr/local/bin/inferencecenter", "usr/local/etc/systemd/system/inferencecenter.service"]
    assert not [
        path for path, content in installed.items() if b"/opt/inferencecenter/venv" in content and "doc" not in path
    ]
    service = installed["usr/local/etc/systemd/system/inferencecenter.service"].decode()
    calls = re.findall(r"^Exec(?:Start|Reload)=(.*)$", service, re.MULTILINE)
    assert [call.partition(" -m inferencecenter ")[2] for call in calls] == [
        f"{command} --config /usr/local/etc/inferencecenter/inferencecenter.toml" for command in ("serve", "reload")
    ]


@needs_systemd
def test_sysusers_and_tmpfiles_are_valid(tmp_path: Path) -> None:
    """They are applied to a folder of the test's own."""
    make("install-files", f"DESTDIR={tmp_path}")
    (tmp_path / "etc" / "passwd").touch()
    (tmp_path / "etc" / "group").touch()
    run("systemd-sysusers", f"--root={tmp_path}", tmp_path / "etc/sysusers.d/inferencecenter.conf")
    run("systemd-tmpfiles", "--create", f"--root={tmp_path}", tmp_path / "etc/tmpfiles.d/inferencecenter.conf")
    assert "inferencecenter:" in (tmp_path / "etc" / "passwd").read_text()
    assert (tmp_path / "etc" / "inferencecenter").stat().st_mode & 0o777 == 0o750
