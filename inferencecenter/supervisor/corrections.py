"""How far plans were off, kept from one start to the next: ``plan.json`` in the state directory."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

if TYPE_CHECKING:
    from pathlib import Path

_MOST_ENTRIES: Final = 256

_log = structlog.get_logger(__name__)


class Correction(msgspec.Struct, frozen=True):
    """What a model took on one GPU beyond the estimate, and both figures of that start."""

    extra_bytes: int
    estimated_bytes: int
    used_bytes: int


class Corrections:
    """The corrections by model and GPU. A file that cannot be read or written costs exactness, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Correction] = {}
        try:
            self._entries = msgspec.json.decode(path.read_bytes(), type=dict[str, Correction])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("corrections_unreadable", path=str(path), reason=str(error))

    def extra_bytes(self, model: str, device: str) -> int:
        """Return what to add to an estimate; 0 for a model that was not loaded on that GPU before."""
        entry = self._entries.get(_key(model, device))
        return entry.extra_bytes if entry else 0

    def put(self, model: str, device: str, *, estimated_bytes: int, used_bytes: int) -> None:
        """Keep what was measured, in place of what was measured before."""
        key = _key(model, device)
        self._entries.pop(key, None)
        self._entries[key] = Correction(used_bytes - estimated_bytes, estimated_bytes, used_bytes)
        self._entries = dict(list(self._entries.items())[-_MOST_ENTRIES:])
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self._entries)))
            os.replace(fresh, self._path)  # noqa: PTH105 - atomic, and one call
        except OSError as error:
            _log.warning("corrections_not_written", path=str(self._path), reason=error.strerror)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)


def _key(model: str, device: str) -> str:
    return f"{model} {device}"
