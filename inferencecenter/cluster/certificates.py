"""The certificates between this daemon and the hosts of its engines: an authority of its own, and what it signs."""

from __future__ import annotations

import datetime
import os
import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from inferencecenter.core.private_file import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.ipc.link import LinkTicket

FRONT_NAME: Final = "inferencecenter-front"
"""The name in the front's certificate, which hosts verify instead of an address."""
_YEARS: Final = datetime.timedelta(days=3650)
_SKEW: Final = datetime.timedelta(days=1)
"""Clocks of two machines may differ by this much."""


class ClusterCertificates:
    """An authority whose key is kept in a directory; implements ``supervisor.remote.Certificates``.

    Args:
        directory: Where the authority is, or will be after the first call.

    Raises:
        OSError: It cannot be read or written.
        ValueError: Its files are damaged.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        path = directory / "authority.pem"
        try:
            pem = path.read_bytes()
        except FileNotFoundError:
            pem = _new_authority()
            write_private(path, pem)
        key = serialization.load_pem_private_key(pem, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{path} has a key of another kind")
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(pem)
        self.authority = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the listener, which demands a certificate of its clients."""
        return server_context(self.authority, *self.issue_server())

    def issue_server(self) -> tuple[str, str]:
        """Return PEM of a new certificate of a listener and of its private key."""
        return self._issue(FRONT_NAME, ExtendedKeyUsageOID.SERVER_AUTH)

    def issue(self, name: str) -> tuple[str, str]:
        """Return PEM of a new client certificate and of its private key."""
        return self._issue(name, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(self, name: str, usage: x509.ObjectIdentifier) -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(self._certificate.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(FRONT_NAME)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode(), _pem(key).decode()


def server_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return the context of a listener: it accepts only clients with a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    _load_pair(context, certificate, key)
    return context


def client_context(ticket: LinkTicket) -> ssl.SSLContext:
    """Return the context with which a host connects: it accepts only the front that issued the ticket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ticket.authority)
    _load_pair(context, ticket.certificate, ticket.certificate_key)
    return context


def _new_authority() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    name = _name("inferencecenter cluster authority")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load a certificate and its key. The ssl module takes them only from files; this one is never on a disk."""
    fd = os.memfd_create("inferencecenter-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, (certificate + key).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
