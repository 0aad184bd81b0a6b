"""The directory of a daemon's models, from and into which operators delete and pull them while it runs.

Downloads run in threads that the daemon does not wait for when it ends: another pull resumes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Final, Literal

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.files import copy, find_model, remove
from inferencecenter.models.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from inferencecenter.models.files import ModelFiles
    from inferencecenter.models.pull import Pulled, PullProgress

MAX_DOWNLOADS: Final = 4
"""Maximum number of downloads at once."""
MAX_ENDED_DOWNLOADS: Final = 16
"""Ended downloads whose outcome is kept."""

_log = structlog.get_logger(__name__)


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
            ErrorCode.INVALID_REQUEST, f"{name} is not a file in models_dir", field="name", hint=hint
        )


class _AbortedError(Exception):
    """The download was aborted."""


class ModelDownload:
    """A download in a thread of its own.

    Attributes:
        reference: What is downloaded, as of ``parse_reference``.
        client_id: The client that requested it.
        progress: As last reported; ``None`` before the first chunk.
        model: Name of the model when it is complete.
        error: Why it failed.
    """

    def __init__(self, library: ModelLibrary, reference: str, client_id: str) -> None:
        self.reference = reference
        self.client_id = client_id
        self.progress: PullProgress | None = None
        self.model: str | None = None
        self.error: InferenceCenterError | None = None
        self._library = library
        self._aborted = False
        self._thread = Thread(target=self._run, name="pull", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def phase(self) -> Literal["running", "done", "failed", "cancelled"]:
        if not self.over:
            return "running"
        if self.error is not None:
            return "failed"
        return "cancelled" if self.model is None else "done"

    def abort(self) -> None:
        """Stop at the next chunk; received data is kept, and another download continues with it."""
        self._aborted = True

    def _run(self) -> None:
        try:
            self.model = self._library.pull(self.reference, self._report).model.name
        except _AbortedError:
            pass
        except InferenceCenterError as error:
            self.error = error
        except Exception:  # noqa: BLE001 - boundary: a defect must not be taken for success
            _log.exception("pull_failed", reference=self.reference)
            self.error = InferenceCenterError(ErrorCode.INTERNAL)

    def _report(self, progress: PullProgress) -> None:
        if self._aborted:
            raise _AbortedError
        self.progress = progress


class ModelDownloads:
    """The downloads of a daemon, whichever API requested them; on the event loop."""

    def __init__(self, library: ModelLibrary) -> None:
        self._library = library
        self._downloads: dict[str, ModelDownload] = {}

    def __iter__(self) -> Iterator[ModelDownload]:
        """All that run, and the latest that have ended, oldest first."""
        return iter(tuple(self._downloads.values()))

    def start(self, reference: str, client_id: str) -> ModelDownload:
        """Start a download.

        Raises:
            InferenceCenterError: ``invalid_request`` for a malformed reference or one that is being downloaded;
                ``queue_full`` if too many are.
        """
        parse_reference(reference)
        running = [each for each in self if not each.over]
        if any(each.reference == reference for each in running):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{reference} is being downloaded already",
                field="reference",
                hint="Wait until it ends, or cancel it.",
            )
        if len(running) >= MAX_DOWNLOADS:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                f"{len(running)} models are being downloaded, and at most {MAX_DOWNLOADS} are at once",
                hint="Wait until one of them ends, or cancel it.",
            )
        self._downloads.pop(reference, None)
        ended = [each for each in self if each.over]
        for each in ended[: max(0, len(ended) - MAX_ENDED_DOWNLOADS + 1)]:
            del self._downloads[each.reference]
        download = self._downloads[reference] = ModelDownload(self._library, reference, client_id)
        return download

    def cancel(self, reference: str) -> ModelDownload:
        """Abort a download that runs.

        Raises:
            InferenceCenterError: ``invalid_request`` if none of this reference runs.
        """
        found = self._downloads.get(reference)
        if found is None or found.over:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"reference is {reference!r}, which is not being downloaded",
                field="reference",
                hint="list_pulls lists the downloads.",
            )
        found.abort()
        return found
