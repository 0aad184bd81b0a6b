"""``inferencecenter healthcheck``: health of the daemon of these settings, for containers and scripts."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Annotated

import orjson
import typer

from inferencecenter.cli.options import ConfigOption, given
from inferencecenter.cli.reach import fetch, own_url
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError


def healthcheck(
    *,
    ready: Annotated[bool, typer.Option("--ready", help="Check readiness (turns can run), not only liveness.")] = (
        False
    ),
    timeout: Annotated[float, typer.Option(help="Timeout in seconds.", min=0.1, max=60)] = 4.0,
    config: ConfigOption = None,
) -> None:
    """Check the health of the daemon of these settings; prints nothing and exits with 0 when it is healthy."""
    settings = load_settings(config, given())
    path = "/readyz" if ready else "/healthz"
    url = own_url(settings, path, scheme="http")
    try:
        status, body = fetch(settings, path, timeout_s=timeout)
    except OSError as error:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.strerror or error
        raise InferenceCenterError(
            ErrorCode.DAEMON_UNREACHABLE, f"{url}: {reason}", hint="`inferencecenter doctor` checks the port."
        ) from error
    if status == HTTPStatus.OK:
        return
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, f"{url}: {_reason(body)}")
    raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"{url} answers {status}")


def _reason(body: bytes) -> str:
    """Return the message of the readiness page, if it has one."""
    try:
        page = orjson.loads(body)
    except orjson.JSONDecodeError:
        page = None
    return f"{page.get('state')}: {page.get('detail')}" if isinstance(page, dict) else "not ready"
