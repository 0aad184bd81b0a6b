"""The directory of a daemon's models, from and into which operators delete and pull them while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.files import copy, find_model, remove

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inferencecenter.models.files import ModelFiles
    from inferencecenter.models.pull import Pulled, PullProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLibrary:
    """The models in ``directory``; its methods block.

    Attributes:
        directory: The directory.
        configured: Returns the files that settings name, with the name of the setting.
        environment: Names the hub and its token, see ``hub_of``.
    """

    directory: Path
    configured: Callable[[], Mapping[Path, str]]
    environment: Mapping[str, str]

    def pull(self, reference: str, report: Callable[[PullProgress], None]) -> Pulled:
        """Download a model.

        Raises:
            InferenceCenterError: See ``models.pull.pull``.
        """
        # The daemon starts faster without the hub's library.
        from inferencecenter.models.hub import hub_of  # noqa: PLC0415
        from inferencecenter.models.pull import pull  # noqa: PLC0415

        return pull(hub_of(self.environment), reference, directory=self.directory, report=report)

    def copy(self, name: str, path: Path, destination: str) -> None:
        """Give a model that is loaded from ``path`` a second name.

        Raises:
            InferenceCenterError: ``invalid_request`` if that is not in the directory; see ``models.files.copy``.
        """
        copy(self._own(name, path, hint="Others get further names by aliases in [models.NAME]."), destination)

    def remove(self, name: str, path: Path) -> ModelFiles:
        """Delete the files of a model that is loaded from ``path``.

        Raises:
            InferenceCenterError: ``invalid_request`` if that is not in the directory, or configured; see
                ``models.files.remove``.
        """
        self._own(name, path, hint="Only models in that directory are deleted.")
        return remove(self.directory, name, configured=self.configured())

    def _own(self, name: str, path: Path, *, hint: str) -> ModelFiles:
        if path.parent == self.directory and path in (model := find_model(self.directory, name)).paths:
            return model
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{name} is not a file in models_dir", field="model", hint=hint
        )
