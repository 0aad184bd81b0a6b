"""The command line."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]


def main() -> None:
    """Run the command line; see ``app.main``."""
    with _faster_start():
        from inferencecenter.cli import app  # noqa: PLC0415 - imported beside the engine's interpreter

        app.main()


@contextmanager
def _faster_start() -> Iterator[None]:
    """For ``serve``, spawn the engine's interpreter first, and disable garbage collection during the imports.

    Imports create hardly any garbage, and collections take a tenth of their time. The daemon collects once it listens.
    Nor does pydantic, here or in the engine, look for plugins in the metadata of every installed package, unless the
    environment says which of them it may load.
    """
    if sys.argv[1:2] != ["serve"] or "--help" in sys.argv:
        yield
        return
    from inferencecenter.ipc.engine_child import prespawned  # noqa: PLC0415 - other commands start no engine

    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()
    try:
        with prespawned():
            yield
    finally:
        gc.enable()
