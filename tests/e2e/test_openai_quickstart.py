"""The README's quickstart with the openai package does what it says, unchanged but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import run_daemon

README = Path(__file__).parents[2] / "README.md"


def test_the_quickstart_runs_as_it_is_written(tmp_path: Path, demo_model_path: Path) -> None:
    """With the token that the first start leaves in the home directory; the second response remembers the first."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if "from openai import" in block)
    script = tmp_path / "quickstart.py"
    with run_daemon(tmp_path / ".local/state/inferencecenter", demo_model_path) as daemon:
        assert "127.0.0.1:3000" in code
        script.write_text(code.replace("127.0.0.1:3000", f"127.0.0.1:{daemon.port}"))
        done = subprocess.run(
            [sys.executable, str(script)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    streamed, remembered = done.stdout.strip().splitlines()
    assert streamed
    assert "Ada" in remembered
