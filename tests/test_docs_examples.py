"""The examples of the documentation, run unchanged but for the port against a daemon on the demo model.

The shell blocks of a page are one script. A Python block with imports is a program; one without continues the previous
block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.documentation import Block, all_pages, read_page
from tests.e2e.harness import Daemon, run_daemon
from tests.embedding_models import write_embedding_model, write_reranking_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PORT = "3000"
STATE_DIR = ".local/state/inferencecenter"
TIMEOUT_S = 120
# An error of any server, or its absence, ends the script.
PRELUDE = """
set -euo pipefail
curl() { command curl --silent --show-error --fail-with-body --max-time 60 "$@"; echo; }
"""
RUN_ELSEWHERE = frozenset({"docs/sdk.md", "docs/clients.md"})
"""Pages whose examples have tests of their own."""
PAGES = [page for page in all_pages() if page.path not in RUN_ELSEWHERE]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the daemon's state, where programs find the token."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def daemon(home: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon after its first start, with models for embeddings and for reranking beside the demo model."""
    (home / "models").mkdir()
    write_embedding_model(home / "models" / "my-embedder.gguf")
    write_reranking_model(home / "models" / "my-reranker.gguf")
    with run_daemon(home / STATE_DIR, demo_model_path, INFERENCECENTER_MODELS_DIR=str(home / "models")) as running:
        yield running


def run(daemon: Daemon, home: Path, command: list[str], *, folder: Path) -> str:
    """Run a command as a user of the daemon in an empty folder, and return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "INFERENCECENTER_SERVER__PORT": str(daemon.port),
            **({"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def with_port(text: str, daemon: Daemon) -> str:
    """Return an example with the daemon's port."""
    return text.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{daemon.port}")


def programs() -> list[tuple[str, str]]:
    """Return each Python program and its position."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        blocks = [block for block in page.blocks if block.language == "python"]
        for before, block in zip([None, *blocks], blocks, strict=False):
            if before is None or "import " in block.text:
                found.append((str(block), block.text))
            else:
                found[-1] = (found[-1][0], f"{found[-1][1]}\n{block.text}")
    return found


def scripts() -> list[tuple[str, str]]:
    """Return each page's shell commands."""
    texts = {page.path: "\n".join(each.text for each in page.blocks if each.language == "sh") for page in PAGES}
    return [(path, text) for path, text in texts.items() if text]


@pytest.mark.parametrize("program", [pytest.param(text, id=place) for place, text in programs()])
def test_programs_run(program: str, daemon: Daemon, home: Path, tmp_path: Path) -> None:
    """They exit with 0 and print something; one that states a name to the model recalls it."""
    script = tmp_path / "example.py"
    script.write_text(with_port(program, daemon), encoding="utf-8")
    printed = run(daemon, home, [sys.executable, str(script), daemon.admin_token], folder=tmp_path)
    assert printed.strip()
    if '"What is my name?"' in program:
        assert "Ada" in "".join(printed.splitlines()[-2:])


@pytest.mark.parametrize("script", [pytest.param(text, id=place) for place, text in scripts()])
def test_scripts_run(script: str, daemon: Daemon, home: Path, tmp_path: Path) -> None:
    """Each command succeeds, and no HTTP response is an error."""
    printed = run(daemon, home, ["bash", "-c", PRELUDE + with_port(script, daemon)], folder=tmp_path)
    assert printed.strip()
    if "What is my name?" in script:
        assert "Your name is Ada." in printed


def test_shown_answers_have_the_real_fields(daemon: Daemon, home: Path, tmp_path: Path) -> None:
    """A JSON block after a call has the fields of that call's answer."""
    blocks = read_page("docs/openai.md").blocks
    token, *_ = (block for block in blocks if block.language == "sh")
    shown = [pair for pair in pairwise(blocks) if is_call_with_answer(*pair)]
    assert shown
    for call, answer in shown:
        script = PRELUDE + with_port("\n".join(dict.fromkeys([first_line(token), call.text])), daemon)
        assert shape(json.loads(run(daemon, home, ["bash", "-c", script], folder=tmp_path))) == shape(
            json.loads(answer.text)
        ), str(answer)


def is_call_with_answer(call: Block, answer: Block) -> bool:
    """Return whether a block is the answer to the previous one."""
    return call.language == "sh" and answer.language == "json"


def first_line(block: Block) -> str:
    """Return the position of a block for the test id."""
    line = block.text.splitlines()[0]
    assert line.startswith("TOKEN="), line
    return line


def shape(value: Any) -> Any:
    """Return a JSON value with types instead of its texts and numbers."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if isinstance(value, (int, float)) else type(value).__name__
