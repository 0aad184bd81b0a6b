"""The README's client does what it says, unchanged but for the port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_client_is_told_its_name_back(daemon: Daemon, tmp_path: Path) -> None:
    """Thirty lines with the websockets package alone: two turns stream, the second remembers the first."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if "websockets" in block)
    assert len(code.splitlines()) <= 30
    script = tmp_path / "client.py"
    script.write_text(code.replace("127.0.0.1:3000", f"127.0.0.1:{daemon.port}"))
    done = subprocess.run(
        [sys.executable, str(script), daemon.admin_token], check=True, capture_output=True, text=True, timeout=60
    )
    first, second = (line for line in done.stdout.splitlines() if not line.startswith("("))
    assert first
    assert "Ada" in second
