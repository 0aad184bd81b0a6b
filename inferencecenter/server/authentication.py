"""From a credential to an account, with failures limited per address."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.attempts import Attempts, site
from inferencecenter.server.audit import AuditEvent, entry
from inferencecenter.server.tokens import public_id
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.server.account import Account
    from inferencecenter.server.accounts import Accounts
    from inferencecenter.server.audit import Entry
    from inferencecenter.telemetry.metrics import Metrics

_WRITE_AFTER_S: Final = 1.0
_RETRY_AFTER_S: Final = 30.0
_MAX_CLAIM_CHARS: Final = 64
_LIKE_A_SECRET: Final = re.compile(r"[0-9A-Fa-f]{32}|[A-Za-z0-9+/_-]{40}")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenCredential:
    """``ic_<id>_<secret>``."""

    token: str


@dataclass(frozen=True, slots=True)
class KeyCredential:
    """A client id with its API key."""

    client_id: str
    api_key: str


Credential = TokenCredential | KeyCredential


class Authenticator:
    """Checks credentials; used on the event loop.

    Args:
        accounts: Who may come in.
        attempts_per_minute: Failures one address may have.
        clock: Monotonic seconds.
        metrics: Where failures are counted.
    """

    def __init__(
        self, accounts: Accounts, *, attempts_per_minute: int, clock: Callable[[], float], metrics: Metrics
    ) -> None:
        self._accounts = accounts
        self._attempts = Attempts(per_minute=attempts_per_minute, clock=clock)
        self._metrics = metrics
        self._tasks = TaskGroup("authenticator")
        self._writing: asyncio.TimerHandle | None = None
        self._to_write = False
        self._warned = False

    def authenticate(self, credential: Credential, *, address: str) -> Account:
        """Return the account of a credential.

        Raises:
            InferenceCenterError: ``not_authenticated`` when it is wrong, ``rate_limited`` when ``address`` has failed
                too often, right or not this time, ``storage_unavailable`` when nobody can tell.
        """
        retry_after_ms = self._attempts.retry_after_ms(address)
        if retry_after_ms is not None:
            self.note(entry(AuditEvent.LOGIN_REFUSED, address=site(address), detail="too many attempts"))
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED, "too many failed logins from this address", retry_after_ms=retry_after_ms
            )
        match credential:
            case TokenCredential(token):
                account = self._accounts.verify_token(token)
            case KeyCredential(client_id, api_key):
                account = self._accounts.verify_key(client_id, api_key)
        if account is None:
            self._attempts.failed(address)
            self._metrics.login_failures.inc()
            self.note(refusal(credential, address=address))
            _log.warning("login_failed", address=address)
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED,
                "the credential is not valid",
                hint="It may be mistyped, expired or revoked; inferencecenter token create makes a new token.",
            )
        self.note(entry(AuditEvent.LOGIN, client_id=account.client_id, token_id=account.token_id, address=address))
        return account

    def living_tokens(self) -> frozenset[str]:
        """Return the ids of the tokens that would let somebody in now.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        return self._accounts.living_tokens()

    async def close(self) -> None:
        """End the writing of what was noted; closing the accounts writes the rest."""
        if self._writing is not None:
            self._writing.cancel()
        await self._tasks.cancel()

    def note(self, line: Entry) -> None:
        """Have a line written within a second, with the last uses, by one timer for all until then."""
        self._accounts.note(line)
        self._to_write = True
        if self._writing is None:
            self._write_after(_WRITE_AFTER_S)

    def _write_after(self, delay_s: float) -> None:
        self._writing = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._tasks.spawn(self._write(), name="write_noted")
        )

    async def _write(self) -> None:
        """Write what was noted. Nobody's login depends on it: a failure is told once, and it is tried again."""
        self._to_write = False
        try:
            await asyncio.to_thread(self._accounts.write_noted)
        except InferenceCenterError as error:
            if not self._warned:
                _log.warning("logins_unwritten", error=error.message, hint=error.hint)
            self._warned = True
            self._write_after(_RETRY_AFTER_S)
            return
        self._warned = False
        # Not before: a disk that takes long must not gather threads.
        self._writing = None
        if self._to_write:
            self._write_after(_WRITE_AFTER_S)


def refusal(credential: Credential, *, address: str) -> Entry:
    """Return what the audit log says of a refused credential: whom it claimed, and nothing that may be secret."""
    match credential:
        case TokenCredential(token):
            return entry(AuditEvent.LOGIN_REFUSED, token_id=public_id(token), address=address)
        case KeyCredential(client_id, api_key):
            return entry(
                AuditEvent.LOGIN_REFUSED,
                client_id=_claim(client_id, api_key),
                token_id=public_id(api_key),
                address=address,
            )


def _claim(client_id: str, api_key: str) -> str | None:
    """Return a claimed client id unless it may be a key that was put in the wrong field."""
    if api_key in client_id or _LIKE_A_SECRET.search(client_id):
        return None
    return client_id[:_MAX_CLAIM_CHARS]
