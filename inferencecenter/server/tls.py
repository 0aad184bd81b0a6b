"""The TLS certificate: loaded, checked before use, and reloaded without dropping connections."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from pathlib import Path

_CERTIFICATE_NOT_YET_VALID: Final = 9  # X509_V_ERR_CERT_NOT_YET_VALID

_log = structlog.get_logger(__name__)


class Certificate:
    """A certificate and its key; ``context`` is for the listener and stays the same across reloads.

    Args:
        certfile: PEM file with the certificate and its chain.
        keyfile: PEM file with its private key, unencrypted.

    Raises:
        InferenceCenterError: ``invalid_config``; the files cannot be read, do not match or have expired.
    """

    def __init__(self, certfile: Path, keyfile: Path) -> None:
        self._certfile = certfile
        self._keyfile = keyfile
        self._current = _loaded(certfile, keyfile)
        self.context = _loaded(certfile, keyfile)
        # Loading into the context in use would keep a replaced certificate of another key type, for clients that
        # request that type.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Reload the files; connections made from now on use them.

        Raises:
            InferenceCenterError: ``invalid_config``; the previous certificate stays in use.
        """
        self._current = _loaded(self._certfile, self._keyfile)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        """Set the current certificate of a connection. OpenSSL calls this also without a server name."""
        connection.context = self._current


def _loaded(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for path, field in ((certfile, "server.certfile"), (keyfile, "server.keyfile")):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise _invalid(f"{path} cannot be read: {error.strerror}", field) from error
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except _EncryptedKeyError:
        raise _invalid(
            f"{keyfile} is encrypted",
            "server.keyfile",
            hint="The daemon starts unattended: provide the key without a passphrase.",
        ) from None
    except ssl.SSLError as error:
        raise _not_a_pair(certfile, keyfile, error) from error
    _check_validity(context, certfile)
    return context


class _EncryptedKeyError(Exception):
    """A private key that requires a passphrase."""


def _refuse_password() -> str:
    raise _EncryptedKeyError


def _not_a_pair(certfile: Path, keyfile: Path, error: ssl.SSLError) -> InferenceCenterError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return _invalid(f"{keyfile} is not the key of {certfile}", "server.keyfile")
    return _invalid(
        f"{certfile} and {keyfile} are no certificate and key: {error.reason or error}",
        "server.certfile",
        hint="Both are PEM files: first the certificate, then the chain to its authority.",
    )


def _check_validity(context: ssl.SSLContext, certfile: Path) -> None:
    """Check the certificate with a client context that trusts only it.

    Raises:
        InferenceCenterError: ``invalid_config``; every client would reject it.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certfile)
    try:
        _shake_hands(context, client)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _CERTIFICATE_NOT_YET_VALID:
            # A machine without a battery-backed clock starts in the past.
            _log.warning("certificate_not_yet_valid", certfile=str(certfile))
            return
        raise _invalid(f"{certfile}: {error.verify_message}", "server.certfile", hint="Renew it.") from None


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    waiting = [client, server]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)


def _invalid(message: str, field: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field=field, hint=hint)
