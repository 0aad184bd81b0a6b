"""What ``make wheels`` writes, and what ``make install`` takes of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program(path: Path, text: str) -> None:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """The file in which the programs note what they were asked."""
    return tmp_path / "asked"


def test_wheels_come_with_their_checksums(tmp_path: Path, asked: Path) -> None:
    """Libraries and bindings first, which pip would compile otherwise; nothing of an earlier run stays."""
    venv, folder = tmp_path / "venv", tmp_path / "wheels"
    program(venv / "bin/python", f'echo "$@" >>{asked}; mkdir -p {folder}; echo llama >{folder}/llama.whl')
    program(venv / "bin/pip", f'echo "$@" >>{asked}; [ -e {folder}/llama.whl ] && echo us >{folder}/us.whl')
    folder.mkdir()
    (folder / "old.whl").touch()
    subprocess.run([ROOT / "tools/wheels", venv, folder], cwd=ROOT, check=True)
    first, second = asked.read_text().splitlines()
    assert first == f"-m tools.llama wheels {folder}"
    assert f"--find-links {folder}" in second
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "llama.whl", "us.whl"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_the_service_is_installed_from_wheels_alone(tmp_path: Path, asked: Path) -> None:
    """The libraries among them, and without a network."""
    inner = tmp_path / "inner"
    program(inner, f'echo "$@" >>{asked}')
    program(tmp_path / "python", f'mkdir -p "$3/bin" && cp {inner} "$3/bin/python"')
    places = {name: f"/{name}" for name in ("prefix", "sysconfdir", "bindir", "unitdir", "sysusersdir", "tmpfilesdir")}
    environment = {**os.environ, **places, "DESTDIR": str(tmp_path / "root"), "PYTHON": str(tmp_path / "python")}
    subprocess.run([ROOT / "tools/service", "install", "wheels"], cwd=ROOT, env=environment, check=True)
    assert asked.read_text().split()[-6:] == [
        "--quiet",
        "--no-index",
        "--find-links",
        "wheels",
        "inferencecenter[server]",
        "inferencecenter-llama",
    ]
    assert (tmp_path / "root/prefix/venv/bin/python").exists()
