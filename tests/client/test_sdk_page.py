"""The code in docs/sdk.md runs unchanged but for the address."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter import client as sdk
from tests.documentation import read_page
from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = read_page("docs/sdk.md")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def daemon(home: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model with its state in that home."""
    with run_daemon(home / ".local/state/inferencecenter", demo_model_path) as running:
        yield running


async def run_as_in_a_notebook(code: str, names: dict[str, Any]) -> None:
    """Run a cell with top-level ``await``."""
    compiled = compile(code, "sdk.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(compiled, names)
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.slow
async def test_page_runs_from_top_to_bottom(
    daemon: Daemon, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block runs in the notebook of the previous ones and prints what the page shows."""
    monkeypatch.setenv("HOME", str(home))
    names: dict[str, Any] = {}
    outputs: list[str] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for block in PAGE.blocks:
                await run_as_in_a_notebook(block.text.replace(":3000", f":{daemon.port}"), names)
                outputs.append(capsys.readouterr().out)
    finally:
        await names["client"].close()
    first, *_, errors, plain = outputs
    assert "Ada" in first.splitlines()[-1]
    assert "Paris" in outputs[3]
    assert "aborted" in outputs[5]
    assert outputs[6].strip(), "the text of a field of the answer"
    assert "get_weather {'city': 'Oslo'}" in outputs[7]
    assert "21" in outputs[7]
    assert "invalid_request params.temperature" in errors
    assert "Ada" in plain.splitlines()[-1]


def test_page_names_every_error_class() -> None:
    """The page names every error class, and no others."""
    named = set(re.findall(r"`(\w+Error)`", PAGE.source))
    exported = {name for name in sdk.__all__ if name.endswith("Error")}
    assert named == exported


def test_exports_are_sorted_and_importable() -> None:
    """``__all__`` is sorted, and each of its names can be imported."""
    assert sorted(sdk.__all__) == sorted(set(sdk.__all__))
    assert all(hasattr(sdk, name) for name in sdk.__all__)
