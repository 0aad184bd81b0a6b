"""Share links: read-only snapshots of conversations that other accounts of the daemon open.

A share is a copy of the messages, so later messages of the conversation are not shared. Only a hash of the link's
secret is stored. Shares are not held in memory: each request reads them once the client's earlier writes are committed,
and changes of one client are serialized. The store deletes a session's shares with the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import Share
from inferencecenter.sessions.archive import ArchiveStore
from inferencecenter.sessions.history import chars_of
from inferencecenter.sessions.journal import ShareDeleted, ShareRecorded, check_writable

if TYPE_CHECKING:
    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.protocol.requests import CreateShare, RevokeShare
    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.archive import SessionArchive
    from inferencecenter.sessions.context import Principal, SessionServices
    from inferencecenter.sessions.journal import Journal, StoredShare
    from inferencecenter.sessions.table import SessionTable


MAX_SHARE_CHARS: Final = 2 * 1024 * 1024
"""Maximum number of characters of a share, which is written by one statement."""
_TITLE: Final = "title"
_MAX_TITLE_CHARS: Final = 200
_SECRET_BYTES: Final = 32


def check_share_links(settings: ServerSettings) -> None:
    """Refuse share links unless the operator allows them.

    Raises:
        InferenceCenterError: ``forbidden``.
    """
    if not settings.share_links:
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN, "share links are off", hint="The operator can set server.share_links."
        )


class ShareStore(Protocol):
    """Storage of shares. All methods block and are called on one thread."""

    def shares(self, client_id: str) -> tuple[StoredShare, ...]:
        """Return the shares of a client, oldest first."""

    def share(self, share_id: str) -> StoredShare | None: ...

    def shared_messages(self, share_id: str) -> str | None:
        """Return the messages of a share as JSON."""


class SessionReader(ArchiveStore, ShareStore, Protocol):
    """Reads archived sessions and shares."""


@dataclass(frozen=True, slots=True)
class OpenedShare:
    """A share that was opened: ``messages`` is a JSON list."""

    share: StoredShare
    messages: str

    def has_image(self, digest: str) -> bool:
        """Return whether a message names an image; quotation marks in texts are escaped, so a text is no name."""
        return f'"digest":"{digest}"' in self.messages and '"' not in digest


class SessionShares:
    """Creates, lists, revokes and opens shares.

    Args:
        store: Storage of shares; ``None`` if sessions are not stored.
        journal: Records changes.
        services: The services of the daemon.
        table: The live sessions.
        archive: Loads archived sessions, and runs reads after pending writes.
    """

    def __init__(
        self,
        store: ShareStore | None,
        *,
        journal: Journal,
        services: SessionServices,
        table: SessionTable,
        archive: SessionArchive,
    ) -> None:
        self._store = store
        self._journal = journal
        self._services = services
        self._table = table
        self._archive = archive
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(self, client: Principal, request: CreateShare, *, max_shares: int) -> events.ShareCreated:
        """Share a client's own session as it is now, without its system prompt.

        Raises:
            InferenceCenterError: ``session_not_found``, ``invalid_request`` for a session that is not stored, is empty
                or too long, ``quota_exceeded``, ``storage_unavailable`` or ``overloaded``.
        """
        client_id, session_id = client.client_id, request.session_id
        lock = self._locks.setdefault(client_id, asyncio.Lock())  # a reference keeps it in the table
        async with lock:
            n_shares = len(await self._valid(client_id))
            if n_shares >= max_shares:
                raise InferenceCenterError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"this client has {n_shares} share links; {max_shares} are allowed",
                    field="session_id",
                    hint="Revoke one (list_shares, revoke_share), or have the operator raise server.max_share_links.",
                )
            await self._archive.load(client, session_id)
            session = self._table.get_owned(client, session_id)
            journal = self._journal.of_client(client_id)
            check_writable(journal)
            messages = tuple(each for each in session.history.messages if each.role != "system")
            _check_shareable(messages, is_stored=session.config.store)
            secret, now = secrets.token_urlsafe(_SECRET_BYTES), self._services.clock()
            record = ShareRecorded(
                share_id=self._services.new_id("sh_"),
                session_id=session_id,
                client_id=client_id,
                secret_sha256=_hash(secret),
                title=session.config.metadata.get(_TITLE, "")[:_MAX_TITLE_CHARS],
                created_at=now,
                expires_at=None if request.expires_in_s is None else now + request.expires_in_s,
                n_messages=len(messages),
                messages=messages,
            )
            journal.write(record, flush=True)
        return events.ShareCreated(share=_share(record), share_token=secret)

    async def list(self, client: Principal) -> events.Shares:
        """Return a client's own shares, oldest first.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        return events.Shares(shares=tuple(map(_share, await self._valid(client.client_id))))

    async def revoke(self, client: Principal, request: RevokeShare) -> events.ShareRevoked:
        """Revoke a client's own share.

        Raises:
            InferenceCenterError: ``share_not_found``, ``storage_unavailable`` or ``overloaded``.
        """
        client_id, share_id = client.client_id, request.share_id
        lock = self._locks.setdefault(client_id, asyncio.Lock())
        async with lock:
            if not any(each.share_id == share_id for each in await self._valid(client_id)):
                raise InferenceCenterError(ErrorCode.SHARE_NOT_FOUND)
            journal = self._journal.of_client(client_id)
            check_writable(journal)
            journal.write(ShareDeleted(share_id=share_id, client_id=client_id), flush=True)
        return events.ShareRevoked(share_id=share_id)

    async def open(self, client: Principal, share_id: str, secret: str) -> OpenedShare:
        """Return a share to any client that has its secret.

        Raises:
            InferenceCenterError: ``share_not_found``, also for a wrong secret, or ``storage_unavailable``.
        """
        if self._store is not None:
            share = await self._archive.run(client.client_id, partial(self._store.share, share_id))
            # A wrong secret costs no read of the messages.
            if share is not None and self._admits(share, secret):
                messages = await self._archive.run(client.client_id, partial(self._store.shared_messages, share_id))
                if messages is not None:
                    return OpenedShare(share, messages)
        raise InferenceCenterError(ErrorCode.SHARE_NOT_FOUND)

    def _admits(self, share: StoredShare, secret: str) -> bool:
        return hmac.compare_digest(share.secret_sha256, _hash(secret)) and not share.is_expired(self._services.clock())

    async def _valid(self, client_id: str) -> tuple[StoredShare, ...]:
        """Return a client's shares, and delete the expired ones."""
        if self._store is None:
            return ()
        found = await self._archive.run(client_id, partial(self._store.shares, client_id))
        now, journal = self._services.clock(), self._journal.of_client(client_id)
        for each in found:
            if each.is_expired(now) and journal.fault is None:
                journal.write(ShareDeleted(share_id=each.share_id, client_id=client_id), flush=False)
        return tuple(each for each in found if not each.is_expired(now))


def _check_shareable(messages: tuple[ChatMessage, ...], *, is_stored: bool) -> None:
    n_chars = sum(map(chars_of, messages))
    if not is_stored:
        reason, hint = "a session that is not stored cannot be shared", "Open a session with store true."
    elif not messages:
        reason, hint = "the session has no messages to share", "Share it after its first answer."
    elif n_chars > MAX_SHARE_CHARS:
        reason = f"the session has {n_chars} characters; {MAX_SHARE_CHARS} can be shared"
        hint = "Fork it at an earlier turn, and share the fork."
    else:
        return
    raise InferenceCenterError(ErrorCode.INVALID_REQUEST, reason, field="session_id", hint=hint)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _share(share: StoredShare) -> Share:
    return Share(
        share_id=share.share_id,
        session_id=share.session_id,
        title=share.title,
        created_at=share.created_at,
        expires_at=share.expires_at,
        messages=share.n_messages,
    )
