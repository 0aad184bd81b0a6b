"""Turns under suspicion, kept from one daemon to the next: ``suspects.json`` in the state directory.

A stored turn may end the engine and the daemon together, as where both are killed for want of memory; or the engine may
be given up and the daemon end before the turn is found. The next daemon resumes it, and so on. So what is suspected is
written down when it changes, which is after an engine's death and while suspects are tried, and at no other time.
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
    """How often each turn of a model was named by a death, and the tokens that it had then.

    ``alone`` is the one that ran with no other.
    """

    times: dict[str, int] = {}
    n_tokens: dict[str, int] = {}
    alone: str | None = None


class PoisonTurnStore:
    """The suspected turns by model. A file that cannot be read or written costs the memory of them and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models: dict[str, SuspectedTurns] = {}
        try:
            self._models = _read(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - the border to a file that others may have changed
            _log.warning("suspects_unreadable", path=str(path), reason=reason_of(error))

    def of(self, model: str) -> SuspectedTurns:
        """Return what was written last of a model's turns."""
        return self._models.get(model, SuspectedTurns())

    def put(self, model: str, suspected: SuspectedTurns) -> None:
        """Write down what is suspected of a model's turns now."""
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
