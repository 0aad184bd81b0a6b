"""Corrections of VRAM estimates by measured usage, kept between starts: ``plan.json`` in the state directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from inferencecenter.core.json_file import JsonFile

if TYPE_CHECKING:
    from pathlib import Path

_MOST_ENTRIES: Final = 256
PLAN_FILE: Final = "plan.json"
_MAX_BYTES: Final = 2**50
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]


class VramCorrection(msgspec.Struct, frozen=True):
    """By how much a model's usage of one GPU exceeded the estimate, and both figures of that start."""

    extra_bytes: Annotated[int, msgspec.Meta(ge=-_MAX_BYTES, le=_MAX_BYTES)]
    estimated_bytes: _Bytes
    used_bytes: _Bytes


class VramCalibration:
    """The corrections by model and GPU. A file that cannot be read or written only costs accuracy."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, VramCorrection], name="corrections")
        self._entries = _latest(self._file.read() or {})

    def extra_bytes(self, model: str, device: str) -> int:
        """Return the correction of an estimate; 0 for a model that was never loaded on that GPU."""
        entry = self._entries.get(_key(model, device))
        return entry.extra_bytes if entry else 0

    def put(self, model: str, device: str, *, estimated_bytes: int, used_bytes: int) -> None:
        """Store a measurement in place of the previous one."""
        key = _key(model, device)
        self._entries.pop(key, None)
        self._entries[key] = VramCorrection(used_bytes - estimated_bytes, estimated_bytes, used_bytes)
        self._entries = _latest(self._entries)
        self._file.write(self._entries)


def _latest(entries: dict[str, VramCorrection]) -> dict[str, VramCorrection]:
    return dict(list(entries.items())[-_MOST_ENTRIES:])


def _key(model: str, device: str) -> str:
    return f"{model} {device}"
