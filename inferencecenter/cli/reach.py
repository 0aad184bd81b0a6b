"""Locating the daemon: address, trusted certificate and token, as options with defaults.

Every command builds the daemon's address here, from the daemon's own settings: port, base path and TLS.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, Unpack
from urllib.parse import urlsplit

import typer

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.client import Client, ClientOptions
    from inferencecenter.config.settings import Settings

UrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="INFERENCECENTER_URL",
        help="Address of the daemon, or unix:///path of its socket.",
        show_default=False,
    ),
]
TokenOption: TypeAlias = Annotated[
    str | None, typer.Option("--token", envvar="INFERENCECENTER_TOKEN", help="Bearer token.", show_default=False)
]
TokenFileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token.", show_default="admin.token in the state directory"),
]

_ANYWHERE: Final = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonAccess:
    """Address and credential of the daemon.

    Attributes:
        url: WebSocket URL of the daemon, or ``unix://`` and the path of its socket.
        token: Bearer token; ``None`` on a Unix socket, where the user of this process counts.
        tls: TLS context that verifies the daemon's certificate; ``None`` for a plain address, and for a certificate
            that is verified by the system's authorities.
    """

    url: str
    token: str | None
    tls: ssl.SSLContext | None

    def client(self, **options: Unpack[ClientOptions]) -> Client:
        """Return a client of the daemon, not yet open."""
        # Imported here, so that commands that need no daemon start faster.
        from inferencecenter.client import Client  # noqa: PLC0415

        return Client(self.url, self.token, **(options if self.tls is None else {**options, "tls": self.tls}))


def reach_daemon(settings: Settings, *, url: str | None, token: str | None, token_file: Path | None) -> DaemonAccess:
    """Return the access to the daemon at ``url``, or by default to the daemon of these settings.

    On a Unix socket no token is needed, and only one that is given is sent.

    Raises:
        InferenceCenterError: ``not_authenticated`` when there is no token, ``invalid_config`` when the certificate of
            the settings cannot be read.
    """
    if url is not None and url.lower().startswith("unix:"):
        return DaemonAccess(url=url, token=token or (read_token(token_file) if token_file else None), tls=None)
    own = own_url(settings)
    is_own = url is None or _origin(url) == _origin(own)
    return DaemonAccess(
        url=url or own,
        token=token or read_token(token_file or admin_token_file(settings)),
        tls=own_tls(settings) if is_own else None,
    )


def own_url(settings: Settings, path: str = "/ws", *, scheme: Literal["ws", "http"] = "ws") -> str:
    """Return the local URL of ``path`` at the daemon of these settings."""
    server = settings.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    secure = "s" if server.certfile else ""
    return on_this_machine(f"{scheme}{secure}://{host}:{server.port}{server.base_path}{path}")


def on_this_machine(url: str) -> str:
    """Return a URL with the wildcard address replaced by the loopback address."""
    for everywhere, here in _ANYWHERE.items():
        url = url.replace(everywhere, here, 1)
    return url


def own_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return a TLS context that trusts only the certificate of these settings; ``None`` without a certificate.

    The file is local configuration, so its certificate needs no authority, and is accepted for the loopback address,
    which it rarely names. Only the first certificate of the file is trusted: the others belong to authorities, which
    also sign for other machines.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    certfile = settings.server.certfile
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        match = _CERTIFICATE.search(certfile.read_text(encoding="utf-8"))
        if match is None:
            raise ValueError("it contains no certificate")
        context.load_verify_locations(cadata=match[0])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"{certfile} cannot be read: {reason}",
            field="server.certfile",
            hint="It identifies the trusted daemon. Run this as the daemon's user, or specify an address with --url.",
        ) from error
    return context


def fetch(settings: Settings, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of a page of the daemon of these settings.

    Raises:
        OSError: It does not answer in time, or ``ssl.SSLError`` when its certificate is not the configured one.
        InferenceCenterError: ``invalid_config``; the certificate cannot be read.
    """
    import http.client  # noqa: PLC0415 - most commands only need the address

    url = urlsplit(own_url(settings, path, scheme="http"))
    host, port, tls = url.hostname or "", url.port, own_tls(settings)
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
    )
    with contextlib.closing(connection):
        try:
            connection.request("GET", url.path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the server there does not speak HTTP: {error!r}") from error


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port, equal for the WebSocket and the page of one daemon."""
    parts = urlsplit(on_this_machine(url))
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    try:
        return scheme, host, parts.port or {"ws": 80, "wss": 443}.get(scheme)
    except ValueError:  # an invalid port
        return scheme, host, None


def admin_token_file(settings: Settings) -> Path:
    """Return the token file written by the first start of the daemon of these settings."""
    return settings.state_dir / "admin.token"


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        InferenceCenterError: ``not_authenticated``, naming the file.
    """
    try:
        return path.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a text file"
        raise InferenceCenterError(
            ErrorCode.NOT_AUTHENTICATED,
            f"no token: {path}: {reason}",
            hint="The first `inferencecenter serve` creates it; or use --token, --token-file, INFERENCECENTER_TOKEN.",
        ) from None
