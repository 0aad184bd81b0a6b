"""Persists suspected poison turns across restarts of the daemon: ``suspects.json`` in the state directory.

A stored turn may kill the engine and the daemon together, for example when both run out of memory; or the daemon may
end before the turn is identified. The next daemon resumes the turn and would fail again. So suspicions are written when
they change, which is only after an engine's death and while suspects run in isolation.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from inferencecenter.core.errors import reason_of

if TYPE_CHECKING:
    from pathlib import Path

_MAX_FILE_BYTES: Final = 2**20

_log = structlog.get_logger(__name__)


class SuspectedTurns(msgspec.Struct, frozen=True):
    """By turn of a model: the deaths it was suspected of, and the tokens it had generated at the last one.

    ``alone`` is the turn that ran in isolation.
    """

    times: dict[str, int] = {}
    n_tokens: dict[str, int] = {}
    alone: str | None = None


class PoisonTurnStore:
    """The suspected turns by model. A file that cannot be read or written only loses the suspicions."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models: dict[str, SuspectedTurns] = {}
        try:
            self._models = _read(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - other programs may have changed the file
            _log.warning("suspects_unreadable", path=str(path), reason=reason_of(error))

    def of(self, model: str) -> SuspectedTurns:
        """Return the suspicions stored for a model."""
        return self._models.get(model, SuspectedTurns())

    def put(self, model: str, suspected: SuspectedTurns) -> None:
        """Store a model's suspicions if they have changed."""
        if suspected == self.of(model):
            return
        self._models[model] = suspected
        self._models = {name: each for name, each in self._models.items() if each.times}
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.encode(self._models))
            os.replace(fresh, self._path)  # noqa: PTH105 - atomic, and one call
        except OSError as error:
            _log.warning("suspects_not_written", path=str(self._path), reason=reason_of(error))
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, SuspectedTurns]:
    with path.open("rb") as file:
        return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=dict[str, SuspectedTurns])
