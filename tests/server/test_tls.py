"""Tests of TLS: certificates that are refused, and those that take another's place."""

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
from tests.server.harness import Running, ask, hear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.loop_clock import LoopClock

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

NOW = datetime.now(UTC)


class Files:
    """An authority, and the files that the daemon reads."""

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
        """Read them as the daemon does."""
        return Certificate(self.certfile, self.keyfile)

    def client(self) -> ssl.SSLContext:
        """What a client knows who trusts the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A certificate for this machine."""
    return Files(tmp_path)


async def seen(server: Running, client: ssl.SSLContext) -> tuple[int, str, bytes]:
    """Connect and return the certificate's serial number, the version of TLS and the protocol inside."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client)
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = connection.getpeercert()
    assert certificate is not None
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(str(certificate["serialNumber"]), 16), connection.version() or "", answer.partition(b"\r\n")[0]


async def test_clients_speak_over_tls(serve: Serve, files: Files) -> None:
    """A socket opens, authenticates and has a turn; plain HTTP pages answer too."""
    async with serve(tls=files.certificate().context) as server:
        async with connect(
            f"wss://127.0.0.1:{server.port}/",
            ssl=files.client(),
            additional_headers={"Authorization": f"Bearer {server.token}"},
            subprotocols=[Subprotocol(SUBPROTOCOL)],
        ) as client:
            await hear(client)
            sid = (await ask(client, op="create_session"))["session_id"]
            turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
            server.engine.begin(turn)
            server.engine.say(turn, "x" * 100_000)
            assert len((await hear(client, "token"))["content"]) == 100_000
            server.engine.finish(turn)
            assert (await hear(client, "end"))["finish_reason"] == "stop"
        _, version, status = await seen(server, files.client())
        assert (version, status) == ("TLSv1.3", b"HTTP/1.1 200 OK")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
async def test_old_versions_are_refused(serve: Serve, files: Files) -> None:
    """TLS 1.2 is spoken, TLS 1.1 is not."""
    async with serve(tls=files.certificate().context) as server:
        client = files.client()
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert (await seen(server, client))[1] == "TLSv1.2"
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
        client.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await seen(server, client)


async def test_a_caller_that_speaks_plainly_disturbs_nobody(serve: Serve, files: Files) -> None:
    """Its connection ends; those of others go on."""
    async with serve(tls=files.certificate().context) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(12 * 1024)
        writer.close()
        assert (await seen(server, files.client()))[2] == b"HTTP/1.1 200 OK"


async def test_a_new_certificate_takes_the_old_ones_place(serve: Serve, files: Files) -> None:
    """After ``reload`` new connections see it, and those that were there go on."""
    certificate = files.certificate()
    async with (
        serve(tls=certificate.context) as server,
        connect(f"wss://127.0.0.1:{server.port}/", ssl=files.client()) as client,
    ):
        before = await seen(server, files.client())
        files.issue()
        assert await seen(server, files.client()) == before
        certificate.reload()
        assert (await seen(server, files.client()))[0] != before[0]
        assert (await hear(client))["op"] == "hello"
        assert (await ask(client, op="auth", token=server.token, protocol=1))["op"] == "auth_success"


async def test_a_certificate_of_another_kind_leaves_nothing_of_the_old_one(serve: Serve, files: Files) -> None:
    """A client that asks for the old key type is refused rather than shown the certificate that was replaced."""
    files.issue(key_type=KeyType.RSA)
    certificate = files.certificate()
    wants_rsa = files.client()
    wants_rsa.maximum_version = ssl.TLSVersion.TLSv1_2
    wants_rsa.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    async with serve(tls=certificate.context) as server:
        assert (await seen(server, wants_rsa))[2] == b"HTTP/1.1 200 OK"
        files.issue(key_type=KeyType.ECDSA)
        certificate.reload()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await seen(server, wants_rsa)
        assert (await seen(server, files.client()))[2] == b"HTTP/1.1 200 OK"


async def test_what_cannot_be_reloaded_changes_nothing(serve: Serve, files: Files) -> None:
    """A half-written pair is refused, and the certificate from before is still shown."""
    certificate = files.certificate()
    async with serve(tls=certificate.context) as server:
        before = await seen(server, files.client())
        files.keyfile.write_bytes(files.keyfile.read_bytes()[:40])
        with pytest.raises(InferenceCenterError):
            certificate.reload()
        assert await seen(server, files.client()) == before


def refusal(files: Files) -> InferenceCenterError:
    """Read the files and return why they are refused."""
    with pytest.raises(InferenceCenterError) as caught:
        files.certificate()
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    return caught.value


@pytest.mark.parametrize("name", ["certfile", "keyfile"])
def test_a_file_that_is_not_there_is_named(files: Files, name: str) -> None:
    """The message has the path and the setting."""
    path: Path = getattr(files, name)
    path.unlink()
    error = refusal(files)
    assert str(path) in error.message
    assert error.field == f"server.{name}"


def test_a_key_of_another_certificate_is_refused(files: Files) -> None:
    """The message says that they do not belong together."""
    certificate = files.certfile.read_bytes()
    files.issue()
    files.certfile.write_bytes(certificate)
    assert "is not the key of" in refusal(files).message


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_no_certificate_is_refused(files: Files, content: bytes) -> None:
    """Empty, binary and torn files are named."""
    files.certfile.write_bytes(content)
    assert str(files.certfile) in refusal(files).message


def test_an_encrypted_key_is_refused(files: Files) -> None:
    """Nobody is asked for a passphrase."""
    key = load_pem_private_key(files.keyfile.read_bytes(), password=None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    files.keyfile.write_bytes(encrypted)
    error = refusal(files)
    assert (error.message, error.field) == (f"{files.keyfile} is encrypted", "server.keyfile")


def test_an_expired_certificate_is_refused(files: Files) -> None:
    """The message says so, with the file."""
    files.issue(not_before=NOW - timedelta(days=90), not_after=NOW - timedelta(days=1))
    assert refusal(files).message == f"{files.certfile}: certificate has expired"


def test_one_that_is_not_valid_yet_is_only_a_warning(files: Files) -> None:
    """A machine whose clock starts in the past starts all the same."""
    files.issue(not_before=NOW + timedelta(days=1), not_after=NOW + timedelta(days=90))
    with structlog.testing.capture_logs() as logs:
        files.certificate()
    assert {line["event"] for line in logs} == {"certificate_not_yet_valid"}


async def test_a_handshake_that_does_not_go_on_makes_way(serve: Serve, files: Files) -> None:
    """Beyond as many as may be under way the oldest is closed, and one that goes on gets in."""
    async with serve(tls=files.certificate().context, max_connections=2) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        async with asyncio.timeout(60):
            assert await silent[0][0].read() == b""
            assert (await seen(server, files.client()))[2] == b"HTTP/1.1 200 OK"
        for _, writer in silent:
            writer.close()


async def test_a_handshake_has_as_long_as_a_head(serve: Serve, files: Files, clock: LoopClock) -> None:
    """A peer that connects and says nothing is closed, and what is no TLS is closed at once."""
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
