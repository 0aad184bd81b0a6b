"""What docs/sdk.md shows runs as it stands, unchanged but for the address."""

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
    """A daemon on the demo model whose state is in that home."""
    with run_daemon(home / ".local/state/inferencecenter", demo_model_path) as running:
        yield running


async def run_as_in_a_notebook(code: str, names: dict[str, Any]) -> None:
    """Run a cell, in which ``await`` may stand alone."""
    compiled = compile(code, "sdk.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(compiled, names)
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.slow
async def test_the_page_runs_from_top_to_bottom(
    daemon: Daemon, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each piece in the notebook that the ones before have made, and what they print is what they say."""
    monkeypatch.setenv("HOME", str(home))
    names: dict[str, Any] = {}
    told: list[str] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for block in PAGE.blocks:
                await run_as_in_a_notebook(block.text.replace(":3000", f":{daemon.port}"), names)
                told.append(capsys.readouterr().out)
    finally:
        await names["client"].close()
    first, *_, errors, plain = told
    assert "Ada" in first.splitlines()[-1]
    assert "Paris" in told[3]
    assert "aborted" in told[5]
    assert told[6].strip(), "the text of a field of the answer"
    assert "get_weather {'city': 'Oslo'}" in told[7]
    assert "21" in told[7]
    assert "invalid_request params.temperature" in errors
    assert "Ada" in plain.splitlines()[-1]


def test_the_page_names_every_class_of_errors_and_only_what_there_is() -> None:
    """A class that is added is described, and none is described that was taken away."""
    shown = set(re.findall(r"`(\w+Error)`", PAGE.source))
    exported = {name for name in sdk.__all__ if name.endswith("Error")}
    assert shown == exported


def test_everything_that_is_exported_is_there() -> None:
    """Names in ``__all__`` are sorted, and importable."""
    assert sorted(sdk.__all__) == sorted(set(sdk.__all__))
    assert all(hasattr(sdk, name) for name in sdk.__all__)
