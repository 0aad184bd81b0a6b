"""Authentication: from a credential to an account, with failures limited per address."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.auth.audit import AuditEvent, audit_entry
from inferencecenter.auth.rate_limits import AddressRateLimiter, rate_limit_key
from inferencecenter.auth.tokens import public_id
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inferencecenter.auth.account import Account
    from inferencecenter.auth.accounts import Accounts
    from inferencecenter.auth.audit import AuditEntry
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.telemetry.metrics import DaemonMetrics

_FLUSH_AFTER_S: Final = 1.0
_RETRY_AFTER_S: Final = 30.0
_UNAVAILABLE_RETRY_MS: Final = 1000
_MAX_CLAIM_CHARS: Final = 64
_REFUSED_HINT: Final = "It may be mistyped, expired or revoked; inferencecenter token create makes a new token."
_REFUSED_USER_HINT: Final = "auth.unix_users lists the users that need no token, with their accounts; send a token."
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


@dataclass(frozen=True, slots=True)
class UnixCredential:
    """User id of a peer on the Unix socket, from the kernel."""

    uid: int


Credential = TokenCredential | KeyCredential | UnixCredential


class ExternalAuthProvider(Protocol):
    """An external service that authenticates clients, implemented by ``ExternalAuth``."""

    async def verify(self, client_id: str, api_key: str) -> Account | None:
        """Return the account of a client id and its key, ``None`` if refused.

        Raises:
            AuthUnavailableError: No valid answer.
        """

    def forget(self, client_id: str) -> None:
        """Drop the cached answers about a client."""

    async def close(self) -> None:
        """Cancel requests in progress and release resources."""


class AuthUnavailableError(Exception):
    """A key cannot be checked; ``str()`` is the reason, without secrets."""


class Authenticator:
    """Checks credentials; used on the event loop.

    Args:
        accounts: Local accounts.
        limits_of: Returns the effective limits of an account, for the addresses that it allows.
        external: Checks keys of clients without a local account.
        unix_accounts: Client ids of the users that need no token on the Unix socket, by user id.
        attempts_per_minute: Failures allowed per address.
        clock: Monotonic seconds.
        metrics: Where failures are counted.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        accounts: Accounts,
        *,
        limits_of: Callable[[AccessLimits], AccessLimits] = lambda own: own,
        external: ExternalAuthProvider | None = None,
        unix_accounts: Mapping[int, str] = MappingProxyType({}),
        attempts_per_minute: int,
        clock: Callable[[], float],
        metrics: DaemonMetrics,
    ) -> None:
        self._accounts = accounts
        self._limits_of = limits_of
        self._external = external
        self._unix_accounts = unix_accounts
        self._attempts = AddressRateLimiter(at_once=attempts_per_minute, per_s=attempts_per_minute / 60, clock=clock)
        self._metrics = metrics
        self._tasks = TaskGroup("authenticator")
        self._flush_timer: asyncio.TimerHandle | None = None
        self._has_buffered = False
        self._warned = False
        self._unreadable = False

    def authenticate(self, credential: Credential, *, address: str) -> Account:
        """Return the account of a credential, local accounts only.

        Raises:
            InferenceCenterError: ``not_authenticated`` for a wrong credential, ``rate_limited`` after too many failures
                of ``address``, whether the credential is right or not, ``storage_unavailable`` if it cannot be checked.
        """
        self._check_attempts(address)
        account = self._verify(credential)
        if account is None or not self._is_allowed_from(account, address):
            self._attempts.count(address)
            raise self._refused(credential, address=address)
        return self._admitted(account, address=address)

    def needs_external(self, credential: Credential) -> bool:
        """Return whether ``authenticate_anywhere`` has to wait for the external service about a credential.

        Never for a client with a local account, nor for text in the form of this daemon's tokens.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        if self._external is None or not isinstance(credential, KeyCredential):
            return False
        with self._accounts_errors():
            return public_id(credential.api_key) is None and not self._accounts.knows(credential.client_id)

    async def authenticate_anywhere(self, credential: Credential, *, address: str) -> Account:
        """As ``authenticate``, and query the external service about clients without a local account.

        Raises:
            InferenceCenterError: See ``authenticate``; ``not_authenticated`` also while the service is unavailable.
        """
        if self._external is None or not isinstance(credential, KeyCredential) or not self.needs_external(credential):
            return self.authenticate(credential, address=address)
        self._check_attempts(address)
        # Counted before the answer arrives, so that concurrent guesses are limited like sequential ones.
        self._attempts.count(address)
        try:
            account = await self._external.verify(credential.client_id, credential.api_key)
        except AuthUnavailableError as error:
            self._attempts.refund(address)
            self.audit(refusal(credential, address=address, detail=f"cannot be checked: {error}"))
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED,
                "the credential cannot be checked at the moment",
                hint="Try again later.",
                retry_after_ms=_UNAVAILABLE_RETRY_MS,
            ) from None
        if account is None or not self._is_allowed_from(account, address):
            raise self._refused(credential, address=address)
        self._attempts.refund(address)
        return self._admitted(account, address=address, detail="known elsewhere")

    def admit_local(self, client_id: str, *, address: str) -> Account:
        """Return the account that programs on this machine use without a credential; its scope is ``user`` only.

        Raises:
            InferenceCenterError: ``not_authenticated`` if it does not exist or allows no local address,
                ``storage_unavailable`` if it cannot be read.
        """
        with self._accounts_errors():
            account = self._accounts.account_of(client_id)
        if account is None or not self._is_allowed_from(account, address):
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED,
                "the account for requests without a token cannot be used",
                hint="An operator sets it by server.ollama_account.",
            )
        return self._admitted(
            replace(account, scopes=account.scopes & {Scope.USER}), address=address, detail="without a token"
        )

    def unix_credential(self, uid: int | None) -> UnixCredential | None:
        """Return the credential of a peer that needs no token, given its user id; ``None`` if it needs one."""
        return UnixCredential(uid) if uid is not None and uid in self._unix_accounts else None

    def current_unix_account(self, account: Account) -> Account | None:
        """Return the present account of the user that was authenticated as ``account``, ``None`` without one.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        return None if account.unix_uid is None else self._verify(UnixCredential(account.unix_uid))

    def forget(self, client_id: str) -> None:
        """Drop the external service's cached answers about a client."""
        if self._external is not None:
            self._external.forget(client_id)

    async def close(self) -> None:
        """Stop the writer of buffered entries; closing the accounts writes the rest."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        await self._tasks.cancel()
        if self._external is not None:
            await self._external.close()

    def _check_attempts(self, address: str) -> None:
        retry_after_ms = self._attempts.retry_after_ms(address)
        if retry_after_ms is not None:
            self.audit(
                audit_entry(AuditEvent.LOGIN_REFUSED, address=rate_limit_key(address), detail="too many attempts")
            )
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED, "too many failed logins from this address", retry_after_ms=retry_after_ms
            )

    def _verify(self, credential: Credential) -> Account | None:
        with self._accounts_errors():
            match credential:
                case TokenCredential(token):
                    return self._accounts.verify_token(token)
                case KeyCredential(client_id, api_key):
                    return self._accounts.verify_key(client_id, api_key)
                case UnixCredential(uid):
                    return self._of_user(uid)

    def _of_user(self, uid: int) -> Account | None:
        client_id = self._unix_accounts.get(uid)
        account = None if client_id is None else self._accounts.account_of(client_id)
        return None if account is None else replace(account, unix_uid=uid)

    @contextmanager
    def _accounts_errors(self) -> Iterator[None]:
        """Log once why accounts cannot be read, and hide the reason from the caller."""
        try:
            yield
        except InferenceCenterError as error:
            if not self._unreadable:
                _log.error("accounts_unreadable", error=error.message, hint=error.hint)
            self._unreadable = True
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                "accounts cannot be read at the moment",
                hint="Retry once the operator has repaired it.",
                retry_after_ms=_UNAVAILABLE_RETRY_MS,
            ) from None
        self._unreadable = False

    def _is_allowed_from(self, account: Account, address: str) -> bool:
        return self._limits_of(account.limits).allows_address(address)

    def _refused(self, credential: Credential, *, address: str) -> InferenceCenterError:
        """Record a counted refusal and return its error, which does not reveal what was wrong."""
        self._metrics.login_failures.inc()
        self.audit(refusal(credential, address=address))
        _log.warning("login_failed", address=address)
        return InferenceCenterError(
            ErrorCode.NOT_AUTHENTICATED,
            "the credential is not valid",
            hint=_REFUSED_USER_HINT if isinstance(credential, UnixCredential) else _REFUSED_HINT,
        )

    def _admitted(self, account: Account, *, address: str, detail: str = "") -> Account:
        client_id, token_id = account.client_id, account.token_id or None
        self.audit(
            audit_entry(AuditEvent.LOGIN, client_id=client_id, token_id=token_id, address=address, detail=detail)
        )
        return account

    def audit(self, line: AuditEntry) -> None:
        """Buffer an audit line; it is written within a second, together with all others until then."""
        self._accounts.buffer_audit(line)
        self._has_buffered = True
        if self._flush_timer is None:
            self._schedule_flush(_FLUSH_AFTER_S)

    def _schedule_flush(self, delay_s: float) -> None:
        self._flush_timer = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._tasks.spawn(self._flush(), name="flush_audit")
        )

    async def _flush(self) -> None:
        """Write the buffered entries. Logins do not depend on it: a failure is logged once, and retried."""
        self._has_buffered = False
        try:
            await asyncio.to_thread(self._accounts.flush_audit)
        except Exception as error:  # noqa: BLE001 - a defect must not end the writing for good
            if not self._warned:
                _log.warning("logins_unwritten", error=str(error), hint=getattr(error, "hint", None))
            self._warned = True
            self._schedule_flush(_RETRY_AFTER_S)
            return
        self._warned = False
        # Only now, so that a slow disk does not accumulate threads.
        self._flush_timer = None
        if self._has_buffered:
            self._schedule_flush(_FLUSH_AFTER_S)


def refusal(credential: Credential, *, address: str, detail: str = "") -> AuditEntry:
    """Return the audit entry of a refused credential: the claimed identity, without anything that may be secret."""
    match credential:
        case TokenCredential(token):
            return audit_entry(AuditEvent.LOGIN_REFUSED, token_id=public_id(token), address=address, detail=detail)
        case UnixCredential():
            return audit_entry(AuditEvent.LOGIN_REFUSED, address=address, detail=detail)
        case KeyCredential(client_id, api_key):
            return audit_entry(
                AuditEvent.LOGIN_REFUSED,
                client_id=_claim(client_id, api_key),
                token_id=public_id(api_key),
                address=address,
                detail=detail,
            )


def _claim(client_id: str, api_key: str) -> str | None:
    """Return a claimed client id unless it may be a key in the wrong field."""
    if api_key in client_id or _LIKE_A_SECRET.search(client_id):
        return None
    return client_id[:_MAX_CLAIM_CHARS]
