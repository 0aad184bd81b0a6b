"""``doctor``'s look at the reverse proxy: the daemon that runs says whether one is there that it does not trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from inferencecenter.cli.checks import Check, Verdict
from inferencecenter.cli.reach import fetch
from inferencecenter.errors import InferenceCenterError
from inferencecenter.server.status_pages import PROXY_NOT_TRUSTED

if TYPE_CHECKING:
    from inferencecenter.config.settings import Settings

_TIMEOUT_S: Final = 3


def proxy(settings: Settings) -> Check:
    """Tell which proxies are trusted, and warn where requests come through another one on this machine."""
    trusted = ", ".join(map(str, settings.server.trusted_proxies)) or "none"
    if _sees_untrusted(settings):
        return Check(
            "proxy",
            Verdict.WARNING,
            f"requests come through a proxy on this machine; trusted: {trusted}",
            'Set server.trusted_proxies to its address, as ["127.0.0.1"], and have it send X-Forwarded-For and Host;'
            " until then all behind it share the limits of one address.",
        )
    return Check("proxy", Verdict.OK, f"trusted: {trusted}")


def _sees_untrusted(settings: Settings) -> bool:
    """Ask the daemon, if there is one."""
    try:
        _, body = fetch(settings, "/readyz", timeout_s=_TIMEOUT_S)
        told = orjson.loads(body)
    except (OSError, InferenceCenterError, orjson.JSONDecodeError):  # which the check of the port tells
        return False
    return isinstance(told, dict) and told.get("proxy") == PROXY_NOT_TRUSTED
