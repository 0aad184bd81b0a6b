"""Small files of the state directory without which the daemon runs as well: losing one costs only what it remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
import structlog

from inferencecenter.core.errors import reason_of
from inferencecenter.core.private_file import write_private

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES: Final = 2**20
_Value = TypeVar("_Value")
_log = structlog.get_logger(__name__)


class JsonFile(Generic[_Value]):
    """One value in a file of JSON.

    Args:
        path: The file.
        value_type: Its type.
        name: What it is, in the log's events ``<name>_unreadable`` and ``<name>_not_written``.
    """

    def __init__(self, path: Path, value_type: type[_Value], *, name: str) -> None:
        self._path = path
        self._value_type = value_type
        self._name = name

    def read(self) -> _Value | None:
        """Return the value; ``None`` for a file that is not there, or damaged."""
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=self._value_type)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - other programs may have changed the file
            _log.warning(f"{self._name}_unreadable", path=str(self._path), reason=reason_of(error))
            return None

    def write(self, value: _Value) -> None:
        """Replace the file atomically; a failure is logged, and the earlier file stays."""
        try:
            write_private(self._path, msgspec.json.format(msgspec.json.encode(value)), durable=False)
        except (OSError, ValueError) as error:  # texts of drivers may be no Unicode
            _log.warning(f"{self._name}_not_written", path=str(self._path), reason=reason_of(error))
