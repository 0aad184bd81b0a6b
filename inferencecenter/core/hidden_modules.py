"""Hides optional modules from a package that imports them only because they are installed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@contextmanager
def hidden_modules(*names: str) -> Iterator[None]:
    """Have imports of these modules fail within the block, as if they were not installed; for the main thread."""
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    before = {name: modules.get(name) for name in names}
    modules.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del modules[name]
            else:
                modules[name] = module
