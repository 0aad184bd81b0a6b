"""Corrections of VRAM estimates by measured usage, kept between starts: ``plan.json`` in the state directory."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import structlog

from inferencecenter.core.errors import reason_of

if TYPE_CHECKING:
    from pathlib import Path

_MOST_ENTRIES: Final = 256
PLAN_FILE: Final = "plan.json"
_MAX_FILE_BYTES: Final = 2**20
_MAX_BYTES: Final = 2**50
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]

_log = structlog.get_logger(__name__)


class VramCorrection(msgspec.Struct, frozen=True):
    """By how much a model's usage of one GPU exceeded the estimate, and both figures of that start."""

    extra_bytes: Annotated[int, msgspec.Meta(ge=-_MAX_BYTES, le=_MAX_BYTES)]
    estimated_bytes: _Bytes
    used_bytes: _Bytes


class VramCalibration:
    """The corrections by model and GPU. A file that cannot be read or written only costs accuracy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, VramCorrection] = {}
        try:
            self._entries = _read(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - other programs may have changed the file
            _log.warning("corrections_unreadable", path=str(path), reason=reason_of(error))

    def extra_bytes(self, model: str, device: str) -> int:
        """Return the correction of an estimate; 0 for a model that was never loaded on that GPU."""
        entry = self._entries.get(_key(model, device))
        return entry.extra_bytes if entry else 0

    def put(self, model: str, device: str, *, estimated_bytes: int, used_bytes: int) -> None:
        """Store a measurement in place of the previous one."""
        key = _key(model, device)
        self._entries.pop(key, None)
        self._entries[key] = VramCorrection(used_bytes - estimated_bytes, estimated_bytes, used_bytes)
        self._entries = dict(list(self._entries.items())[-_MOST_ENTRIES:])
        fresh = self._path.with_suffix(".new")
        try:
            # Keys contain texts of drivers.
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self._entries)))
            os.replace(fresh, self._path)  # noqa: PTH105 - atomic, and one call
        except (OSError, ValueError) as error:
            _log.warning("corrections_not_written", path=str(self._path), reason=reason_of(error))
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, VramCorrection]:
    with path.open("rb") as file:
        entries = msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=dict[str, VramCorrection])
    return dict(list(entries.items())[-_MOST_ENTRIES:])


def _key(model: str, device: str) -> str:
    return f"{model} {device}"
