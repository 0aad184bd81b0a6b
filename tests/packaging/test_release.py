"""Releases: tag, notes, and the workflows that build them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CHANGELOG = """# Changelog

## {title}

### Added

- A thing.

## 1.2.2 - 2026-01-01

- The first one.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of version 1.2.3, with a Python that only records what it should build."""
    for folder in ("tools", "inferencecenter"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "tools/release", tmp_path / "tools")
    (tmp_path / "inferencecenter/__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.3"\n')
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    return tmp_path


def release(checkout: Path, tag: str, title: str) -> subprocess.CompletedProcess[str]:
    """Build a release whose changelog section has this title."""
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.format(title=title))
    command = [str(checkout / "tools/release"), tag, "dist"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "python")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_release_notes_are_the_section_of_the_version(checkout: Path) -> None:
    """They have neither its title nor other versions."""
    done = release(checkout, "v1.2.3", "1.2.3 - 2026-02-03")
    assert (done.returncode, done.stdout) == (0, "-m build --outdir dist\n"), done.stderr
    assert (checkout / "dist/notes.md").read_text().strip() == "### Added\n\n- A thing."


@pytest.mark.parametrize(
    ("tag", "title", "said"),
    [
        ("v1.2.4", "1.2.3 - 2026-02-03", "the tag is v1.2.4 and the version 1.2.3"),
        ("1.2.3", "1.2.3 - 2026-02-03", "the tag is 1.2.3 and the version 1.2.3"),
        ("v1.2.3", "1.2.3 - unreleased", "CHANGELOG.md has no section"),
        ("v1.2.3", "1.2.30 - 2026-02-03", "CHANGELOG.md has no section"),
    ],
)
def test_release_must_match_its_tag(checkout: Path, tag: str, title: str, said: str) -> None:
    """Nothing is built for another version's tag, or before the changelog has a date."""
    done = release(checkout, tag, title)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""


def test_changelog_starts_with_the_version() -> None:
    """The first heading is the package's version, with a date or as unreleased."""
    version = re.findall(r'^__version__ = "(.+)"$', (ROOT / "inferencecenter/__init__.py").read_text(), re.MULTILINE)
    title = r"^## (\S+) - (?:unreleased|\d{4}-\d\d-\d\d)$"
    assert re.findall(title, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1] == version


def steps(workflow: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", ())]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(workflow: Path) -> None:
    """Third-party actions are pinned by commit."""
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []


def test_programs_of_workflows_exist() -> None:
    """Programs of the repository exist and are executable."""
    commands = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    called = {word for command in commands for word in command.split()[:1] if "/" in word}
    assert called == {".ci/run", "tools/release"}
    assert [name for name in called if not (ROOT / name).stat().st_mode & 0o100] == []


def test_workflow_matrix_equals_the_classifiers() -> None:
    """Both begin with the lowest supported version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    assert project["requires-python"] == f">={pythons[0]}"
