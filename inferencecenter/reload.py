"""SIGHUP: what the daemon reads again while it runs, each part by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.config_params import parse_config_params
from inferencecenter.errors import InferenceCenterError
from inferencecenter.models.registry import DAEMON_SETTINGS, read_registry
from inferencecenter.server.clients_file import load_clients
from inferencecenter.settings import setting_fields
from inferencecenter.telemetry import logs
from inferencecenter.telemetry_settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from inferencecenter.auth_settings import AuthSettings
    from inferencecenter.limits import Limits
    from inferencecenter.models.registry import Registry
    from inferencecenter.server.account import StaticClient
    from inferencecenter.server.accounts import Accounts
    from inferencecenter.server.tls import Certificate
    from inferencecenter.settings import Settings

_APPLIED: Final = frozenset(
    {
        *(f"log.{name}" for name in LogSettings.model_fields),
        *("auth.clients_file", "auth.default_max_sessions", "auth.default_priority"),
    }
)

_APPLIED_TABLES: Final = ("limits.", "model.", "models", "engine.")
"""Settings that tokens are limited by, and that each model is run by."""

_AT_START: Final = frozenset(f"engine.{name}" for name in DAEMON_SETTINGS)

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Reload:
    """What can be read again, and those whom it concerns.

    Args:
        started_with: The settings that the daemon was started with.
        read: Reads the settings of now.
        accounts: Where the clients of ``clients.toml`` are.
        certificate: The certificate, if the port speaks TLS.
        close_clients: Closes the sockets of clients, by their ids, that showed an API key.
        limits_changed: Lets other limits hold, those of the settings by default.
        announced: Entered before anything is read, and left when all is done.
        apply_models: Goes over to other models, in its own time.
    """

    started_with: Settings
    read: Callable[[], Settings]
    accounts: Accounts
    certificate: Certificate | None
    close_clients: Callable[[Collection[str]], None]
    limits_changed: Callable[[Limits], None]
    announced: Callable[[], AbstractContextManager[None]]
    apply_models: Callable[[Registry], None]
    _last: Settings = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.started_with

    def run(self) -> None:
        """Read everything again. What is wrong is logged, and stays as it was; the rest is done."""
        with self.announced():
            self._read()

    def _read(self) -> None:
        try:
            self._last = self.read()
        except InferenceCenterError as error:
            _failed("settings", error)
        settings = self._last
        _reload_log(settings)
        self._reload_clients(settings)
        self._reload_limits(settings)
        self._reload_certificate()
        self._reload_models(settings)
        changed = changed_settings(self.started_with, settings) - _APPLIED
        waiting = {name for name in changed if name in _AT_START or not name.startswith(_APPLIED_TABLES)}
        if waiting:
            _log.warning("settings_need_restart", settings=sorted(waiting))
        _log.info("reloaded")

    def _reload_clients(self, settings: Settings) -> None:
        try:
            changed = self.accounts.replace_static(static_clients(settings.auth))
        except InferenceCenterError as error:
            _failed("clients", error)
            return
        self.close_clients(changed)

    def _reload_limits(self, settings: Settings) -> None:
        try:
            self.limits_changed(settings.limits)
        except InferenceCenterError as error:
            _failed("limits", error)

    def _reload_models(self, settings: Settings) -> None:
        try:
            parse_config_params(settings)
            registry = read_registry(settings)
        except InferenceCenterError as error:
            _failed("models", error)
            return
        registry.log_remarks()
        self.apply_models(registry)

    def _reload_certificate(self) -> None:
        if self.certificate is None:
            return
        try:
            self.certificate.reload()
        except InferenceCenterError as error:
            _failed("certificate", error)


def static_clients(settings: AuthSettings) -> dict[str, StaticClient]:
    """Return the clients of ``clients.toml``, by client id; none without such a file.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    if settings.clients_file is None:
        return {}
    return load_clients(
        settings.clients_file,
        default_max_sessions=settings.default_max_sessions,
        default_priority=settings.default_priority,
    )


def changed_settings(before: Settings, after: Settings) -> frozenset[str]:
    """Return the dotted names of the settings that differ."""
    names = [name for name, _ in setting_fields()]
    return frozenset(name for name in names if attrgetter(name)(before) != attrgetter(name)(after))


def _reload_log(settings: Settings) -> None:
    try:
        logs.apply(settings.log)
    except InferenceCenterError as error:
        _failed("log", error)


def _failed(what: str, error: InferenceCenterError) -> None:
    _log.error("not_reloaded", what=what, error=error.message, field=error.field, hint=error.hint)
