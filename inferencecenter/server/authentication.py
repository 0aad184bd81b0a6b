"""From a credential to an account, with failures limited per address."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.attempts import Attempts
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.server.accounts import Account, Accounts
    from inferencecenter.telemetry.metrics import Metrics

_LAST_USED_INTERVAL_S: Final = 60.0

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

    def authenticate(self, credential: Credential, *, address: str) -> Account:
        """Return the account of a credential.

        Raises:
            InferenceCenterError: ``not_authenticated`` when it is wrong, ``rate_limited`` when ``address`` has failed
                too often, right or not this time, ``storage_unavailable`` when nobody can tell.
        """
        retry_after_ms = self._attempts.retry_after_ms(address)
        if retry_after_ms is not None:
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
            _log.warning("login_failed", address=address)
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED,
                "the credential is not valid",
                hint="It may be mistyped, expired or revoked; inferencecenter token create makes a new token.",
            )
        self._write_use_later()
        return account

    def living_tokens(self) -> frozenset[str]:
        """Return the ids of the tokens that would let somebody in now.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        return self._accounts.living_tokens()

    async def close(self) -> None:
        """End the writing of last uses."""
        if self._writing is not None:
            self._writing.cancel()
        await self._tasks.cancel()

    def _write_use_later(self) -> None:
        """Have the last uses written within a minute, by one timer for all logins until then."""
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(_LAST_USED_INTERVAL_S, self._write_use)

    def _write_use(self) -> None:
        self._writing = None
        self._tasks.spawn(asyncio.to_thread(self._accounts.write_last_used), name="last_used")
