"""Authentication of a client id and API key by an external HTTP service. Every failure is a refusal."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import ssl
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx2
import structlog
from pydantic import BaseModel, ConfigDict, Field

from inferencecenter.auth.account import CLIENT_ID, Account
from inferencecenter.auth.authentication import AuthUnavailableError
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import Priority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.config.sections import AuthSettings, ExternalAuthSettings

MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_CACHED: Final = 4096
MAX_WAITING: Final = 256
_KEY: Final = re.compile(r"[!-~]{1,256}")
_REFUSED_STATUSES: Final = frozenset({401, 403, 404})

_log = structlog.get_logger(__name__)


class _ClientTerms(BaseModel):
    """Settings of a client; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    max_sessions: Annotated[int, Field(ge=1, le=100_000)] | None = None
    priority: Priority | None = None
    limits: dict[str, Any] | None = None


class _Answer(_ClientTerms):
    """Response of the service; as with the first InferenceCenter, the terms may be in ``config``."""

    authorized: bool | None = None
    valid: bool | None = None
    client_id: str | None = None
    error: Any = None
    config: _ClientTerms | None = None

    @property
    def is_accepted(self) -> bool:
        verdicts = [each for each in (self.authorized, self.valid) if each is not None]
        return bool(verdicts) and all(verdicts) and not self.error


@dataclass(frozen=True, slots=True)
class _CachedAnswer:
    """A cached answer with its expiry (monotonic seconds); ``None`` is a refusal."""

    account: Account | None
    until_s: float


class ExternalAuth:
    """Queries the service, and caches answers by a hash of the credential. On the event loop.

    Args:
        settings: Settings with a ``url``.
        defaults: Maximum number of sessions and priority class where the answer has none.
        clock: Monotonic seconds.

    Raises:
        InferenceCenterError: ``invalid_config`` for an unusable file.
    """

    def __init__(self, settings: ExternalAuthSettings, *, defaults: AuthSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._defaults = defaults
        self._clock = clock
        self._cache: OrderedDict[bytes, _CachedAnswer] = OrderedDict()
        # Keyed with a secret of this process, as plain hashes of short keys could be reversed.
        self._hash_key = secrets.token_bytes(32)
        self._request_slots = asyncio.Semaphore(settings.max_requests)
        self._n_waiting = 0
        self._failing = False
        self._own_token = _read_token(settings.token_file)
        self._timeout = httpx2.Timeout(
            settings.read_timeout_s, connect=settings.connect_timeout_s, pool=settings.connect_timeout_s
        )
        # Not a client, which would use cookies, proxies of the environment and passwords of netrc files.
        self._transport = httpx2.AsyncHTTPTransport(
            verify=_tls(settings.ca_file),
            trust_env=False,
            limits=httpx2.Limits(max_connections=settings.max_requests, max_keepalive_connections=1),
        )
        # These log whole URLs, and with ``form = "query"`` the key is part of them.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)

    async def verify(self, client_id: str, api_key: str) -> Account | None:
        """Return the account of a client id and its key, ``None`` if refused.

        Raises:
            AuthUnavailableError: There was no valid answer in time.
        """
        if CLIENT_ID.fullmatch(client_id) is None or _KEY.fullmatch(api_key) is None:
            return None
        key = self._hashed(client_id, api_key)
        cached = self._from_cache(key)
        if cached is None:
            cached = await self._query(key, client_id, api_key)
        return cached.account

    def forget(self, client_id: str) -> None:
        """Drop the cached answers about a client."""
        self._cache = OrderedDict(
            (key, cached)
            for key, cached in self._cache.items()
            if cached.account is None or cached.account.client_id != client_id
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def _query(self, key: bytes, client_id: str, api_key: str) -> _CachedAnswer:
        if self._n_waiting >= MAX_WAITING:
            raise AuthUnavailableError("too many requests are waiting for a response")
        settings = self._settings
        self._n_waiting += 1
        try:
            async with asyncio.timeout(settings.connect_timeout_s + settings.read_timeout_s), self._request_slots:
                # Another task may have cached the same answer meanwhile.
                if (cached := self._from_cache(key)) is not None:
                    return cached
                account = self._read(await self._fetch(client_id, api_key), client_id)
        except AuthUnavailableError as error:
            self._note_failure(str(error))
            raise
        except TimeoutError:
            self._note_failure("it timed out")
            raise AuthUnavailableError("it timed out") from None
        finally:
            self._n_waiting -= 1
        self._note_success()
        return self._add_to_cache(key, account)

    async def _fetch(self, client_id: str, api_key: str) -> tuple[int, bytes]:
        """Return status and body of the response; redirections are not followed.

        Raises:
            AuthUnavailableError: There is none, or too much of it.
        """
        with foreign_input(_unavailable, own=AuthUnavailableError):
            response = await self._transport.handle_async_request(self._request(client_id, api_key))
            try:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise AuthUnavailableError("its response is too long")
            finally:
                await response.aclose()
            return response.status_code, bytes(body)

    def _request(self, client_id: str, api_key: str) -> httpx2.Request:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "inferencecenter"}
        if self._own_token is not None:
            headers["Authorization"] = f"Bearer {self._own_token}"
        params = None
        if self._settings.form == "headers":
            headers |= {"X-Client-ID": client_id, "X-API-Key": api_key}
        else:
            params = {"client_id": client_id, "api_key": api_key}
        return httpx2.Request(
            "GET",
            self._settings.url or "",
            params=params,
            headers=headers,
            extensions={"timeout": self._timeout.as_dict()},
        )

    def _read(self, answer: tuple[int, bytes], client_id: str) -> Account | None:
        """Interpret a response about a client.

        Raises:
            AuthUnavailableError: It is neither an acceptance nor a refusal.
        """
        status, body = answer
        if status in _REFUSED_STATUSES:
            return None
        if status != 200:
            raise AuthUnavailableError(f"it responded with status {status}")
        with foreign_input(lambda _: AuthUnavailableError("its response has an invalid format")):
            answered = _Answer.model_validate_json(body)
            if not answered.is_accepted:
                return None
            terms = answered.config or answered
            limits = _limits(terms.limits)
        if answered.client_id not in (None, client_id):
            raise AuthUnavailableError("its response is about another client")
        return Account(
            client_id=client_id,
            max_sessions=terms.max_sessions or self._defaults.default_max_sessions,
            priority=terms.priority or self._defaults.default_priority,
            scopes=frozenset({Scope.USER}),
            limits=limits,
        )

    def _hashed(self, client_id: str, api_key: str) -> bytes:
        # A client id cannot contain the separator.
        return hashlib.blake2b(f"{client_id} {api_key}".encode(), key=self._hash_key, digest_size=32).digest()

    def _from_cache(self, key: bytes) -> _CachedAnswer | None:
        cached = self._cache.get(key)
        if cached is not None and self._clock() >= cached.until_s:
            del self._cache[key]
            return None
        return cached

    def _add_to_cache(self, key: bytes, account: Account | None) -> _CachedAnswer:
        for_s = self._settings.refused_cache_s if account is None else self._settings.cache_s
        cached = _CachedAnswer(account, self._clock() + for_s)
        self._cache[key] = cached
        self._cache.move_to_end(key)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return cached

    def _note_failure(self, reason: str) -> None:
        """Log only the first of consecutive failures."""
        if not self._failing:
            _log.error("external_auth_failing", reason=reason)
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            _log.info("external_auth_mended")
        self._failing = False


def _unavailable(reason: str) -> AuthUnavailableError:
    return AuthUnavailableError(reason.partition(":")[0])


def _limits(given: dict[str, Any] | None) -> AccessLimits:
    """Return the known limits in an answer; unknown ones are ignored."""
    if given is None:
        return NO_LIMITS
    return AccessLimits.model_validate(
        {name: value for name, value in given.items() if name in AccessLimits.model_fields}
    )


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable("token_file", path, error) from error
    if re.fullmatch(r"[!-~]+", token) is None:
        raise _unusable("token_file", path, ValueError("it contains no token"))
    return token


def _tls(path: Path | None) -> ssl.SSLContext:
    if path is None:
        return _system_tls()
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("ca_file", path, error) from error


@cache
def _system_tls() -> ssl.SSLContext:
    """Return the context with the system's authorities, which take 50 ms to read."""
    return ssl.create_default_context()


def _unusable(name: str, path: Path, error: Exception) -> InferenceCenterError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG, f"{path} cannot be used: {reason}", field=f"external_auth.{name}"
    )
