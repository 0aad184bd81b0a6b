"""Files with secrets: written whole or not at all, and readable by their owner only."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` atomically by a file that other users can never read.

    If it need not be ``durable``, a crash of the machine may leave it empty.

    Raises:
        OSError: It cannot be written; an earlier file stays.
    """
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
