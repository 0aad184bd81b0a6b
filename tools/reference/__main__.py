"""Writes the generated documentation: ``python -m tools.reference``; ``--check`` tells which of it is stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.reference.pages import documents

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Return the exit code: 1 where a file is stale and only checked."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is stale")
    check = parser.parse_args().check
    stale = {name: text for name, text in documents().items() if _read(ROOT / name) != text}
    for name, text in stale.items():
        if not check:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text, encoding="utf-8")
        print(f"{name}: {'stale; `make docs` writes it' if check else 'written'}")
    return int(check and bool(stale))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
