"""Where tests write bytecode if the environment forbids to write it beside the code: into pytest's folder.

It is a plugin (``-p`` in pyproject.toml), since plugins are the first modules that pytest rewrites. Each worker, and
the hundreds of processes that tests start, would otherwise compile every module again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
