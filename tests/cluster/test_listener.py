"""Which connections the listener of hosts accepts."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
import trustme

from inferencecenter import __version__
from inferencecenter.cluster.certificates import FRONT_NAME, ClusterCertificates, client_context
from inferencecenter.cluster.ray_cluster import RayCluster, RayReply, RayRequest, RayStarter
from inferencecenter.ipc.framing import encode
from inferencecenter.ipc.link import (
    MAX_HELLO_BYTES,
    HostBeat,
    HostHello,
    HostRefused,
    HostWelcome,
    LinkTicket,
    to_host_decoder,
)
from inferencecenter.ipc.messages import LogLine
from inferencecenter.supervisor.nodes import LinkTraffic
from inferencecenter.supervisor.remote import HostListener, HostRegistry
from tests.supervisor.harness import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from inferencecenter.ipc.link import FromHost, ToHost


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[HostListener]:
    """A listener on a free port."""
    listener = HostListener(
        ClusterCertificates(tmp_path / "cluster"), HostRegistry(tmp_path / "hosts.json"), lost_after_s=3, orphan_s=30
    )
    await listener.open("127.0.0.1", 0)
    yield listener
    while Peer.left:
        writer = Peer.left.pop()
        writer.close()
        with suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()
    await listener.close()


def hello(ticket: LinkTicket, **changes: object) -> HostHello:
    """Return the hello of a ticket's host."""
    made = HostHello(version=__version__, engine=ticket.engine, epoch=ticket.epoch, key=ticket.key, node="box")
    return msgspec.structs.replace(made, **changes)


class Peer:
    """A client of the listener; the fixture closes its connection."""

    left: ClassVar[list[asyncio.StreamWriter]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.left.append(writer)
        self._decoder = to_host_decoder(max_frame_bytes=MAX_HELLO_BYTES)

    @classmethod
    async def connect(cls, ticket: LinkTicket, context: ssl.SSLContext | None = None) -> Peer:
        """Connect as the host of a ticket, or with a context of one's own."""
        host, port = ticket.address
        return cls(
            *await asyncio.open_connection(
                host, port, ssl=context or client_context(ticket), server_hostname=FRONT_NAME
            )
        )

    async def exchange(self, message: FromHost) -> ToHost | None:
        """Send a message, and return the answer; ``None`` if the connection is closed without one."""
        self._writer.write(encode(message))
        async with asyncio.timeout(TIMEOUT_S):
            while data := await self._reader.read(65_536):
                if messages := self._decoder.feed(data):
                    return messages[0]
        return None


async def test_key_is_valid_once(listener: HostListener) -> None:
    """The welcome brings the key for later connections, which stays valid."""
    ticket = listener.ticket("a")
    welcome = await (await Peer.connect(ticket)).exchange(hello(ticket))
    assert isinstance(welcome, HostWelcome)
    assert isinstance(await (await Peer.connect(ticket)).exchange(hello(ticket)), HostRefused)
    for _ in range(2):
        assert await (await Peer.connect(ticket)).exchange(hello(ticket, key=welcome.resume_key)) == welcome


async def test_new_ticket_revokes_earlier_ones(listener: HostListener) -> None:
    """Neither an unused ticket nor a host that was connected is accepted; other engines are not affected."""
    unused, other = listener.ticket("a"), listener.ticket("b")
    used = listener.ticket("a")
    connected = await Peer.connect(used)
    welcome = await connected.exchange(hello(used))
    assert isinstance(welcome, HostWelcome)
    latest = listener.ticket("a")
    for refused in (hello(unused), hello(used), hello(used, key=welcome.resume_key)):
        assert isinstance(await (await Peer.connect(used)).exchange(refused), HostRefused)
    for accepted in (latest, other):
        assert isinstance(await (await Peer.connect(accepted)).exchange(hello(accepted)), HostWelcome)


@pytest.mark.parametrize(
    "changes", [{"key": "0" * 64}, {"key": ""}, {"epoch": 1}, {"engine": "b"}, {"version": "0.0.0"}]
)
async def test_wrong_hello_is_refused(listener: HostListener, changes: dict[str, object]) -> None:
    """A certificate of the authority alone is not enough; the ticket is not used up by that."""
    ticket = listener.ticket("a")
    assert isinstance(await (await Peer.connect(ticket)).exchange(hello(ticket, **changes)), HostRefused)
    assert isinstance(await (await Peer.connect(ticket)).exchange(hello(ticket)), HostWelcome)


async def test_first_message_must_be_a_small_hello(listener: HostListener) -> None:
    """Other messages and large ones close the connection without an answer."""
    ticket = listener.ticket("a")
    for message in (HostBeat(), LogLine("info", "x", "y"), hello(ticket, node="x" * MAX_HELLO_BYTES)):
        assert await (await Peer.connect(ticket)).exchange(message) is None


async def test_certificate_of_another_authority_is_refused(listener: HostListener) -> None:
    """As is a client without one: in TLS, before a message is read."""
    ticket = listener.ticket("a")
    foreign = client_context(ticket)
    trustme.CA().issue_cert("box").configure_cert(foreign)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=ticket.authority)
    for context in (foreign, bare):
        answer = None
        with suppress(ssl.SSLError, ConnectionError):  # in TLS 1.3 a client may connect before it is refused
            answer = await (await Peer.connect(ticket, context)).exchange(hello(ticket))
        assert answer is None
    assert listener.ticket("a").epoch > ticket.epoch
    assert not listener.may_return("a")


async def test_host_accepts_only_its_front(listener: HostListener, tmp_path: Path) -> None:
    """A listener with another authority is no front of the ticket, nor is another host with its certificate."""
    ticket = listener.ticket("a")
    other = ClusterCertificates(tmp_path / "other")
    certificate, key = ClusterCertificates(tmp_path / "cluster").issue("b/1")
    client_only = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = tmp_path / "host.pem"
    pem.write_text(certificate + key)
    client_only.load_cert_chain(pem)
    for context in (other.server_context(), client_only):
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ssl.SSLCertVerificationError):
                await Peer.connect(msgspec.structs.replace(ticket, address=("127.0.0.1", port)))


async def test_registry_survives_the_daemon(listener: HostListener, tmp_path: Path) -> None:
    """The next daemon accepts the host that this one accepted, by digests: no key is stored."""
    ticket = listener.ticket("a")
    welcome = await (await Peer.connect(ticket)).exchange(hello(ticket))
    assert isinstance(welcome, HostWelcome)
    stored = (tmp_path / "hosts.json").read_text()
    assert welcome.resume_key not in stored
    assert ticket.key not in stored
    registry = HostRegistry(tmp_path / "hosts.json")
    assert registry.may_return("a")
    assert registry.admit(hello(ticket)) is None
    assert registry.admit(hello(ticket, key=welcome.resume_key)) == welcome.resume_key


def test_damaged_registry_accepts_no_host(tmp_path: Path) -> None:
    """Epochs rise nevertheless, so that a host of the lost file stays refused."""
    path = tmp_path / "hosts.json"
    epoch, _ = HostRegistry(path).issue("a")
    path.write_text("{")
    registry = HostRegistry(path)
    assert not registry.may_return("a")
    assert registry.issue("a")[0] > epoch


def test_private_files(tmp_path: Path) -> None:
    """Only the owner reads the authority's key."""
    ClusterCertificates(tmp_path / "cluster")
    HostRegistry(tmp_path / "hosts.json").issue("a")
    for path in (tmp_path / "cluster", tmp_path / "cluster" / "authority.pem", tmp_path / "hosts.json"):
        assert path.stat().st_mode & 0o077 == 0


async def test_traffic_outlives_connections(listener: HostListener) -> None:
    """Bytes are counted over all connections of an engine, and each but the first is made again."""
    assert listener.traffic("m/0") == LinkTraffic()
    ticket = listener.ticket("m/0")
    peer = await Peer.connect(ticket)
    welcome = await peer.exchange(hello(ticket))
    assert isinstance(welcome, HostWelcome)
    first = listener.traffic("m/0")
    assert first.sent_bytes >= len(encode(welcome))
    assert first.received_bytes == len(encode(hello(ticket)))
    assert first.reconnects == 0
    again = await Peer.connect(ticket)
    await again.exchange(hello(ticket, key=welcome.resume_key))
    second = listener.traffic("m/0")
    assert second.sent_bytes > first.sent_bytes
    assert second.received_bytes >= first.received_bytes + len(encode(hello(ticket, key=welcome.resume_key)))
    assert second.reconnects == 1
    assert listener.traffic("other/0") == LinkTraffic()


async def test_ticket_names_the_node(listener: HostListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log lines about a host have the name that the configuration has, not that of the machine."""
    sent = []

    async def request(_cluster: RayCluster, request: RayRequest) -> RayReply:
        sent.append(request)
        return RayReply(number=request.number)

    monkeypatch.setattr(RayCluster, "_request", request)
    await RayStarter(RayCluster("127.0.0.1:1"), "box2", module="host").start(listener.ticket("m/0"))
    (asked,) = sent
    ticket = msgspec.json.decode(asked.ticket, type=LinkTicket)
    assert (asked.node, ticket.node, ticket.engine) == ("box2", "box2", "m/0")
