"""The file of images: each is stored once by its digest, with the clients that may use it.

It is not the session file: files of several MiB in that one's log would delay the commits that clients wait for. A
session's messages name images by their digests (the table ``message_images`` of the session file), as do those of
shares, and an image that no stored message of a client names is deleted once the client has not used it for
``GRACE_S``.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core import sqlite_file
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import MessageImage
from inferencecenter.sessions.journal import RETRY_LATER_MS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.core.sqlite_file import Steps

IMAGES_NAME: Final = "images.sqlite3"
"""Name of the file in the state directory."""
GRACE_S: Final = 24 * 3600.0
"""Seconds that an image is kept after its last use although no stored message names it."""
_COLLECTED: Final = 1000

IMAGES_STEPS: Final[Steps] = (
    (
        """
        CREATE TABLE images (
            digest TEXT PRIMARY KEY,
            media_type TEXT NOT NULL,
            width INTEGER NOT NULL,
            height INTEGER NOT NULL,
            size INTEGER NOT NULL,
            file BLOB NOT NULL
        ) STRICT
        """,
        # The clients that may use an image; ``used_at`` is in Unix seconds.
        """
        CREATE TABLE owners (
            client_id TEXT NOT NULL,
            digest TEXT NOT NULL REFERENCES images,
            used_at REAL NOT NULL,
            PRIMARY KEY (client_id, digest)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX owners_by_digest ON owners (digest)",
        "CREATE INDEX owners_by_use ON owners (used_at)",
    ),
)

_log = structlog.get_logger(__name__)


class ImageFile:
    """The open file. All methods block, and are called on one thread.

    Args:
        path: Its path.
        sessions: Path of the session file, where messages name images.

    Raises:
        InferenceCenterError: Each method: ``storage_unavailable``.
    """

    def __init__(self, path: Path, *, sessions: Path) -> None:
        self._path = path
        self._sessions = sessions
        with self._mapped_errors():
            sqlite_file.make_private(path)
            self._database = sqlite_file.connect(path)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA foreign_keys = ON")
            sqlite_file.limit_wal(self._database)
            sqlite_file.migrate(self._database, IMAGES_STEPS, path=path)

    def close(self) -> None:
        self._database.close()

    def add(self, client_id: str, image: MessageImage, file: bytes, *, now: float, max_bytes: int) -> None:
        """Store an image for a client whose images may have ``max_bytes`` together.

        Raises:
            InferenceCenterError: ``quota_exceeded``.
        """
        with self._mapped_errors(), sqlite_file.transaction(self._database):
            (n_bytes,) = self._database.execute(
                "SELECT coalesce(sum(size), 0) FROM owners JOIN images USING (digest)"
                " WHERE client_id = ? AND digest <> ?",
                (client_id, image.digest),
            ).fetchone()
            if n_bytes + len(file) > max_bytes:
                raise too_many_bytes(n_bytes + len(file), max_bytes)
            self._database.execute(
                "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?, ?)",
                (image.digest, image.media_type, image.width, image.height, len(file), file),
            )
            self._database.execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?)", (client_id, image.digest, now))

    def find(self, client_id: str, digest: str, *, now: float) -> MessageImage | None:
        """Return an image that the client may use, and record the use."""
        with self._mapped_errors():
            row = self._database.execute(
                "SELECT digest, width, height, media_type FROM owners JOIN images USING (digest)"
                " WHERE client_id = ? AND digest = ?",
                (client_id, digest),
            ).fetchone()
            if row is None:
                return None
            self._use(client_id, digest, now=now)
        digest, width, height, media_type = row
        return MessageImage(digest=digest, width=width, height=height, media_type=media_type)

    def read(self, digest: str) -> bytes | None:
        """Return the file of an image."""
        with self._mapped_errors():
            row = self._database.execute("SELECT file FROM images WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else bytes(row[0])

    def forget_client(self, client_id: str) -> None:
        """Delete the images of a deleted client, unless others use them."""
        with self._mapped_errors(), sqlite_file.transaction(self._database):
            self._database.execute("DELETE FROM owners WHERE client_id = ?", (client_id,))
            self._delete_unowned()

    def collect(self, *, now: float) -> int:
        """Delete images that no stored message names and that were not used for ``GRACE_S``; return their number."""
        with self._mapped_errors():
            due = self._database.execute(
                "SELECT client_id, digest FROM owners WHERE used_at < ? ORDER BY used_at LIMIT ?",
                (now - GRACE_S, _COLLECTED),
            ).fetchall()
            if not due:
                return 0
            with contextlib.closing(sqlite_file.connect_reading(self._sessions)) as sessions:
                named = [self._is_named(sessions, client_id, digest) for client_id, digest in due]
            with sqlite_file.transaction(self._database):
                for (client_id, digest), is_named in zip(due, named, strict=True):
                    if is_named:  # examined again after another ``GRACE_S``
                        self._use(client_id, digest, now=now)
                    else:
                        self._database.execute(
                            "DELETE FROM owners WHERE client_id = ? AND digest = ?", (client_id, digest)
                        )
                return self._delete_unowned()

    def _use(self, client_id: str, digest: str, *, now: float) -> None:
        self._database.execute(
            "UPDATE owners SET used_at = ? WHERE client_id = ? AND digest = ?", (now, client_id, digest)
        )

    def _delete_unowned(self) -> int:
        return self._database.execute(
            "DELETE FROM images WHERE NOT EXISTS (SELECT 1 FROM owners WHERE owners.digest = images.digest)"
        ).rowcount

    @staticmethod
    def _is_named(sessions: sqlite3.Connection, client_id: str, digest: str) -> bool:
        row = sessions.execute(
            "SELECT EXISTS (SELECT 1 FROM message_images JOIN sessions ON sessions.id = message_images.session"
            " WHERE digest = ?1 AND client_id = ?2) OR EXISTS (SELECT 1 FROM orders WHERE instr(request, ?1))"
            " OR EXISTS (SELECT 1 FROM shares WHERE client_id = ?2 AND instr(messages, ?1))",
            (digest, client_id),
        ).fetchone()
        return bool(row[0])

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            _log.error("images_unusable", path=str(self._path), reason=str(error))
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                "images cannot be stored or read at the moment",
                hint="Try again when the operator has fixed it.",
                retry_after_ms=RETRY_LATER_MS,
            ) from error


def too_many_bytes(n_bytes: int, max_bytes: int) -> InferenceCenterError:
    """Return the error for a client whose images would have ``n_bytes`` together."""
    return InferenceCenterError(
        ErrorCode.QUOTA_EXCEEDED,
        f"the images of this client would have {n_bytes} bytes; {max_bytes} are allowed",
        field="messages",
        hint="Close sessions with images that are no longer needed; their images are deleted a day later.",
    )
