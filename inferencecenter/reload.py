"""Reload, by SIGHUP or `inferencecenter reload`: what the daemon rereads while it runs, each part independently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.auth.clients_file import load_clients
from inferencecenter.config.sections import LogSettings
from inferencecenter.config.settings import setting_fields
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.registry import DAEMON_SETTINGS, read_registry
from inferencecenter.server.control import ReloadProblem, ReloadReport
from inferencecenter.sessions.context import parse_config_params
from inferencecenter.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from inferencecenter.auth.accounts import Accounts
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.config.settings import Settings
    from inferencecenter.models.registry import Registry
    from inferencecenter.server.tls import Certificate

_APPLIED: Final = frozenset(
    {
        *(f"log.{name}" for name in LogSettings.model_fields),
        *("auth.clients_file", "auth.default_max_sessions", "auth.default_priority"),
    }
)

_APPLIED_TABLES: Final = ("limits.", "mcp", "model.", "models", "engine.")
"""Settings that affect the limits of tokens, MCP servers, and the options of models."""

_AT_START: Final = frozenset(f"engine.{name}" for name in DAEMON_SETTINGS)

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class ConfigReloader:
    """Rereads the configuration and passes each changed part to its component.

    Args:
        started_with: Settings that the daemon was started with.
        read: Reads the current settings.
        accounts: Accounts, which include the clients of ``clients.toml``.
        certificate: The certificate, if the port uses TLS.
        close_clients: Closes the sockets of the given client ids that authenticated with an API key.
        limits_changed: Applies other limits, by default those of the settings.
        announced: Context manager that is entered before the reload and exited after it.
        apply_models: Applies other models asynchronously.
        apply_mcp: Applies the declared MCP servers.
    """

    started_with: Settings
    read: Callable[[], Settings]
    accounts: Accounts
    certificate: Certificate | None
    close_clients: Callable[[Collection[str]], None]
    limits_changed: Callable[[AccessLimits], None]
    announced: Callable[[], AbstractContextManager[None]]
    apply_models: Callable[[Registry], None]
    apply_mcp: Callable[[Settings], None]
    _last: Settings = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.started_with

    def run(self) -> ReloadReport:
        """Reread everything. Invalid parts are logged, reported and left unchanged; the others are applied."""
        attempt = _Attempt()
        with self.announced():
            self._read(attempt)
        if not attempt.problems:
            _log.info("reloaded")
        return ReloadReport(tuple(attempt.problems), attempt.needs_restart)

    def _read(self, attempt: _Attempt) -> None:
        with attempt.part("settings"):
            self._last = self.read()
        settings = self._last
        with attempt.part("log"):
            logs.apply(settings.log)
        with attempt.part("clients"):
            self.close_clients(self.accounts.replace_static(load_clients(settings.auth)))
        with attempt.part("limits"):
            self.limits_changed(settings.limits)
        if self.certificate is not None:
            with attempt.part("certificate"):
                self.certificate.reload()
        with attempt.part("models"):
            self._reload_models(settings)
        with attempt.part("mcp"):
            self.apply_mcp(settings)
        changed = changed_settings(self.started_with, settings) - _APPLIED
        waiting = {name for name in changed if name in _AT_START or not name.startswith(_APPLIED_TABLES)}
        attempt.needs_restart = tuple(sorted(waiting))
        if waiting:
            _log.warning("settings_need_restart", settings=attempt.needs_restart)

    def _reload_models(self, settings: Settings) -> None:
        parse_config_params(settings)
        registry = read_registry(settings)
        registry.log_remarks()
        self.apply_models(registry)


@dataclass(slots=True)
class _Attempt:
    """Result of one reload."""

    problems: list[ReloadProblem] = field(default_factory=list)
    needs_restart: tuple[str, ...] = ()

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Record errors of one part, so that the other parts are still read."""
        try:
            yield
        except InferenceCenterError as error:
            _log.error("not_reloaded", what=what, error=error.message, field=error.field, hint=error.hint)
            self.problems.append(ReloadProblem(what, error.code, error.message, error.field, error.hint))
        except Exception as error:  # noqa: BLE001 - files that are edited by hand must not keep the other parts back
            _log.exception("not_reloaded", what=what, error=repr(error))
            self.problems.append(
                ReloadProblem(what, ErrorCode.INTERNAL, f"{what}: {error!r}", None, "The daemon's log has the stack.")
            )


def changed_settings(before: Settings, after: Settings) -> frozenset[str]:
    """Return the dotted names of the settings that differ."""
    names = [name for name, _ in setting_fields()]
    return frozenset(name for name in names if attrgetter(name)(before) != attrgetter(name)(after))
