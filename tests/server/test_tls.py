"""TLS: certificates that are refused, and their replacement."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from trustme import KeyType
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.server.tls import Certificate
from tests.server.harness import Running, ask, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.loop_clock import LoopClock

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

NOW = datetime.now(UTC)


class CertificateFiles:
    """A certificate authority, and the files that the daemon reads."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self.issue()

    def issue(self, **options: Any) -> None:
        """Write a new certificate and its key."""
        issued = self.authority.issue_cert("127.0.0.1", **options)
        self.certfile.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        self.keyfile.write_bytes(issued.private_key_pem.bytes())

    def certificate(self) -> Certificate:
        """Load them as the daemon does."""
        return Certificate(self.certfile, self.keyfile)

    def client(self) -> ssl.SSLContext:
        """The TLS context of a client that trusts the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    """A certificate for this machine."""
    return CertificateFiles(tmp_path)


async def peer_certificate(server: Running, client: ssl.SSLContext) -> tuple[int, str, bytes]:
    """Connect and return the certificate's serial number, the TLS version and the protocol."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client)
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = connection.getpeercert()
    assert certificate is not None
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(str(certificate["serialNumber"]), 16), connection.version() or "", answer.partition(b"\r\n")[0]


async def test_clients_connect_over_tls(serve: Serve, files: CertificateFiles) -> None:
    """A socket authenticates and has a turn; HTTP pages work too."""
    async with serve(tls=files.certificate().context) as server:
        async with connect(
            f"wss://127.0.0.1:{server.port}/",
            ssl=files.client(),
            additional_headers={"Authorization": f"Bearer {server.token}"},
            subprotocols=[Subprotocol(SUBPROTOCOL)],
        ) as client:
            await receive(client)
            sid = (await ask(client, op="create_session"))["session_id"]
            turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
            server.engine.begin(turn)
            server.engine.say(turn, "x" * 100_000)
            assert len((await receive(client, "token"))["content"]) == 100_000
            server.engine.finish(turn)
            assert (await receive(client, "end"))["finish_reason"] == "stop"
        _, version, status = await peer_certificate(server, files.client())
        assert (version, status) == ("TLSv1.3", b"HTTP/1.1 200 OK")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
async def test_tls_1_1_is_refused(serve: Serve, files: CertificateFiles) -> None:
    """TLS 1.2 is accepted."""
    async with serve(tls=files.certificate().context) as server:
        client = files.client()
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert (await peer_certificate(server, client))[1] == "TLSv1.2"
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
        client.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await peer_certificate(server, client)


async def test_plaintext_connection_is_closed(serve: Serve, files: CertificateFiles) -> None:
    """Other connections continue."""
    async with serve(tls=files.certificate().context) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(12 * 1024)
        writer.close()
        assert (await peer_certificate(server, files.client()))[2] == b"HTTP/1.1 200 OK"


async def test_reload_replaces_the_certificate(serve: Serve, files: CertificateFiles) -> None:
    """New connections get it, and open ones continue."""
    certificate = files.certificate()
    async with (
        serve(tls=certificate.context) as server,
        connect(f"wss://127.0.0.1:{server.port}/", ssl=files.client()) as client,
    ):
        before = await peer_certificate(server, files.client())
        files.issue()
        assert await peer_certificate(server, files.client()) == before
        certificate.reload()
        assert (await peer_certificate(server, files.client()))[0] != before[0]
        assert (await receive(client))["op"] == "hello"
        assert (await ask(client, op="auth", token=server.token, protocol=1))["op"] == "auth_success"


async def test_reload_with_another_key_type(serve: Serve, files: CertificateFiles) -> None:
    """A client that requires the old key type is refused."""
    files.issue(key_type=KeyType.RSA)
    certificate = files.certificate()
    wants_rsa = files.client()
    wants_rsa.maximum_version = ssl.TLSVersion.TLSv1_2
    wants_rsa.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    async with serve(tls=certificate.context) as server:
        assert (await peer_certificate(server, wants_rsa))[2] == b"HTTP/1.1 200 OK"
        files.issue(key_type=KeyType.ECDSA)
        certificate.reload()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await peer_certificate(server, wants_rsa)
        assert (await peer_certificate(server, files.client()))[2] == b"HTTP/1.1 200 OK"


async def test_failed_reload_keeps_the_certificate(serve: Serve, files: CertificateFiles) -> None:
    """A half-written pair is refused."""
    certificate = files.certificate()
    async with serve(tls=certificate.context) as server:
        before = await peer_certificate(server, files.client())
        files.keyfile.write_bytes(files.keyfile.read_bytes()[:40])
        with pytest.raises(InferenceCenterError):
            certificate.reload()
        assert await peer_certificate(server, files.client()) == before


def refusal(files: CertificateFiles) -> InferenceCenterError:
    """Load the files and return the error."""
    with pytest.raises(InferenceCenterError) as caught:
        files.certificate()
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    return caught.value


@pytest.mark.parametrize("name", ["certfile", "keyfile"])
def test_missing_file_is_named(files: CertificateFiles, name: str) -> None:
    """The message has the path and the setting."""
    path: Path = getattr(files, name)
    path.unlink()
    error = refusal(files)
    assert str(path) in error.message
    assert error.field == f"server.{name}"


def test_mismatched_key_is_refused(files: CertificateFiles) -> None:
    """The message states the mismatch."""
    certificate = files.certfile.read_bytes()
    files.issue()
    files.certfile.write_bytes(certificate)
    assert "is not the key of" in refusal(files).message


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_invalid_certificate_is_refused(files: CertificateFiles, content: bytes) -> None:
    """Empty, binary and truncated files are named."""
    files.certfile.write_bytes(content)
    assert str(files.certfile) in refusal(files).message


def test_encrypted_key_is_refused(files: CertificateFiles) -> None:
    """There is no prompt for a passphrase."""
    key = load_pem_private_key(files.keyfile.read_bytes(), password=None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    files.keyfile.write_bytes(encrypted)
    error = refusal(files)
    assert (error.message, error.field) == (f"{files.keyfile} is encrypted", "server.keyfile")


def test_expired_certificate_is_refused(files: CertificateFiles) -> None:
    """The message has the file."""
    files.issue(not_before=NOW - timedelta(days=90), not_after=NOW - timedelta(days=1))
    assert refusal(files).message == f"{files.certfile}: certificate has expired"


def test_future_certificate_is_a_warning(files: CertificateFiles) -> None:
    """A machine with a wrong clock still starts."""
    files.issue(not_before=NOW + timedelta(days=1), not_after=NOW + timedelta(days=90))
    with structlog.testing.capture_logs() as logs:
        files.certificate()
    assert {line["event"] for line in logs} == {"certificate_not_yet_valid"}


async def test_oldest_stalled_handshake_is_evicted(serve: Serve, files: CertificateFiles) -> None:
    """This happens at the limit; an active handshake completes."""
    async with serve(tls=files.certificate().context, max_connections=2) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        async with asyncio.timeout(60):
            assert await silent[0][0].read() == b""
            assert (await peer_certificate(server, files.client()))[2] == b"HTTP/1.1 200 OK"
        for _, writer in silent:
            writer.close()


async def test_handshake_timeout(serve: Serve, files: CertificateFiles, clock: LoopClock) -> None:
    """A silent peer is closed, and one that does not speak TLS at once."""
    async with serve(tls=files.certificate().context, head_timeout_s=20) as server:
        silent, quiet = await asyncio.open_connection("127.0.0.1", server.port)
        plain, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            await plain.read()
            await clock.go_on(20)
            assert await silent.read() == b""
        for each in (quiet, writer):
            each.close()
