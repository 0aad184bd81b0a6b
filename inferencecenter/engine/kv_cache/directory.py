"""The directory of a tier: it must be owned by this user; only files with our names in it are touched."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from inferencecenter.engine.kv_cache.record import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_Adopted = TypeVar("_Adopted")
_NAME = re.compile(r"kv-[0-9a-f]{32}\.(ram|disk|part)")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare(path: Path) -> None:
    """Create the directory if it does not exist.

    Raises:
        OSError: It cannot be created or used, or other users may write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"others may write to {path}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"no access to {path}")


def list_parked(path: Path, *suffixes: str) -> tuple[list[Path], list[Path]]:
    """Return our files with one of ``suffixes``: those that may hold parked KV, and those that cannot.

    Raises:
        OSError: The directory cannot be read.
    """
    sound: list[Path] = []
    strange: list[Path] = []
    for each in sorted(path.iterdir()):
        if not _NAME.fullmatch(each.name) or each.suffix not in suffixes:
            continue
        status = each.lstat()
        regular = stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_uid == os.geteuid()
        (sound if regular else strange).append(each)
    return sound, strange


def adopt(path: Path, *suffixes: str, read: Callable[[Path], _Adopted]) -> tuple[list[_Adopted], list[str]]:
    """Read our files with one of ``suffixes``; return what ``read`` made of them, and why the others were deleted.

    Raises:
        OSError: The directory cannot be read.
    """
    adopted: list[_Adopted] = []
    faults: list[str] = []
    sound, strange = list_parked(path, *suffixes)
    for each in strange:
        delete(each)
        faults.append("it is no plain file")
    for each in sound:
        try:
            adopted.append(read(each))
        except (RecordError, OSError) as error:
            delete(each)
            faults.append(str(error))
    return adopted, faults


def clear(path: Path, *suffixes: str) -> None:
    """Delete our files with one of ``suffixes``.

    Raises:
        OSError: The directory cannot be read.
    """
    for files in list_parked(path, *suffixes):
        for each in files:
            delete(each)


def delete(path: Path) -> None:
    """Delete a file, ignoring errors."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
