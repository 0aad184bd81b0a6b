"""Resources that a failed test leaves open, which a fixture closes after it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

leftovers: Final = ExitStack()
"""What is to be called after the test that runs, the last first; what has been closed by then is closed once more."""
