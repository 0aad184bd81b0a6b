"""A tunnel to an RPC server: its bytes, who may connect, and what ends it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
import uvloop

from inferencecenter import __version__
from inferencecenter.cluster import rpc_tunnel
from inferencecenter.cluster.certificates import ClusterCertificates, client_context
from inferencecenter.cluster.rpc_tunnel import ExpectHost, ForgetHost
from inferencecenter.ipc.framing import encode
from inferencecenter.ipc.link import MAX_HELLO_BYTES
from inferencecenter.ipc.rpc_tunnel import (
    RpcServerEnded,
    StreamBytes,
    TunnelBeat,
    TunnelHello,
    TunnelRefused,
    TunnelWelcome,
    to_rpc_host_decoder,
)
from tests.cluster.tunnel import KEY, NAME, EchoServer, TunnelBench
from tests.supervisor.harness import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from inferencecenter.ipc.link import LinkTicket
    from inferencecenter.ipc.rpc_tunnel import FromRpcHost, ToRpcHost


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[TunnelBench]:
    """Tunnels without a host."""
    bench = await TunnelBench.open(tmp_path)
    yield bench
    await bench.close()


async def at_end(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives until the connection is closed or reset."""
    with suppress(ConnectionError, ssl.SSLError):
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    return b""


def hello(**changes: object) -> TunnelHello:
    """Return the hello of the expected host."""
    return msgspec.structs.replace(TunnelHello(version=__version__, name=NAME, key=KEY, node="box"), **changes)


async def ask(bench: TunnelBench, ticket: LinkTicket, message: FromRpcHost) -> ToRpcHost | None:
    """Connect with a ticket's certificate, and return the answer to a message; ``None`` if there is none."""
    reader, writer = await bench.connect(ticket.address, client_context(ticket))
    writer.write(encode(message))
    decoder = to_rpc_host_decoder()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while data := await reader.read(65_536):
                if messages := decoder.feed(data):
                    return messages[0]
    except ConnectionError:
        pass
    return None


async def test_bytes_arrive_whole_and_in_order(bench: TunnelBench) -> None:
    """Several times the windows of all buffers, both ways at once."""
    server = EchoServer()
    _, _, port = await bench.connected(server)
    reader, writer = await bench.engine(port)
    sent = os.urandom(2**20) * 24

    async def write() -> None:
        writer.write(sent)
        await writer.drain()

    bench.spawn(write())
    received = await asyncio.wait_for(reader.readexactly(len(sent)), TIMEOUT_S)
    assert hashlib.sha256(received).digest() == hashlib.sha256(sent).digest()
    writer.close()
    await asyncio.wait_for(server.closed.wait(), TIMEOUT_S)


@pytest.mark.slow
async def test_server_that_does_not_read_holds_the_engine_back(bench: TunnelBench) -> None:
    """What an engine can write is bounded, and the tunnel outlives that without heartbeats read."""
    server = EchoServer()
    server.reads.clear()
    _, _, port = await bench.connected(server)
    reader, writer = await bench.engine(port)
    sent = bytes(128 * 2**20)
    writer.write(sent)
    writing = bench.spawn(writer.drain())
    await asyncio.wait_for(server.connected.wait(), TIMEOUT_S)
    assert not (await asyncio.wait([writing], timeout=4.0))[0]  # longer than the silence that loses a host
    assert writer.transport.get_write_buffer_size() > 64 * 2**20
    server.reads.set()
    assert len(await asyncio.wait_for(reader.readexactly(len(sent)), TIMEOUT_S)) == len(sent)


async def test_connections_follow_each_other(bench: TunnelBench) -> None:
    """llama.cpp's engines connect several times: to look for the server, for its devices, and to compute."""
    server = EchoServer()
    _, _, port = await bench.connected(server)
    for number in range(5):
        reader, writer = await bench.engine(port)
        writer.write(b"%d" % number)
        assert await asyncio.wait_for(reader.readexactly(1), TIMEOUT_S) == b"%d" % number
        writer.close()
    assert len(server.connections) == 5


async def test_connection_closed_by_the_server(bench: TunnelBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's is closed, and the next one works."""
    monkeypatch.setattr("inferencecenter.cluster.rpc_host._DEATH_S", 0.01)
    server = EchoServer()
    _, _, port = await bench.connected(server)
    reader, _ = await bench.engine(port)
    await asyncio.wait_for(server.connected.wait(), TIMEOUT_S)
    server.connections[0].close()
    assert await at_end(reader) == b""
    reader, writer = await bench.engine(port)
    writer.write(b"x")
    assert await asyncio.wait_for(reader.readexactly(1), TIMEOUT_S) == b"x"


async def test_server_that_ends_is_reported_before_its_connections(bench: TunnelBench) -> None:
    """The daemon can tell a crash of the server from a lost node."""
    server = EchoServer()
    _, host, port = await bench.connected(server)
    reader, _ = await bench.engine(port)
    await asyncio.wait_for(server.connected.wait(), TIMEOUT_S)
    server.connections[0].transport.abort()
    server.end.set_result(RpcServerEnded(detail="the RPC server was killed by SIGKILL", from_outside=True))
    assert await at_end(reader) == b""
    assert (await bench.lost()).server == server.end.result()
    await asyncio.wait_for(host, TIMEOUT_S)


def test_engine_may_send_until_it_knows_that_the_server_has_closed(tmp_path: Path) -> None:
    """What it sends is discarded; the end of the server, which is noticed later, is reported all the same.

    On uvloop, as in the processes: it raises where a closed socket is written, and asyncio does not.
    """

    async def run() -> None:
        bench, server = await TunnelBench.open(tmp_path), EchoServer()
        try:
            host, _, port = await bench.connected(server)
            reader, writer = await bench.engine(port)
            await asyncio.wait_for(server.connected.wait(), TIMEOUT_S)
            server.connections[0].transport.abort()
            enough = host.channel.received_bytes + 20_000
            async with asyncio.timeout(TIMEOUT_S):
                while host.channel.received_bytes < enough and bench.events.empty():
                    writer.write(bytes(1000))
                    await asyncio.sleep(0.001)
            server.end.set_result(RpcServerEnded(detail="the RPC server was killed by SIGKILL", from_outside=True))
            assert await at_end(reader) == b""
            assert (await bench.lost()).server == server.end.result()
        finally:
            await bench.close()

    uvloop.run(run())


async def test_lost_host_closes_the_engines_connection(bench: TunnelBench) -> None:
    """No engine waits for a server that is gone, and no other engine reaches the port."""
    host, _, port = await bench.connected(EchoServer())
    reader, _ = await bench.engine(port)
    host.channel.abort()
    assert await at_end(reader) == b""
    lost = await bench.lost()
    assert (lost.name, lost.server) == (NAME, None)
    with pytest.raises(ConnectionError):
        await bench.engine(port)


@pytest.mark.slow
async def test_silent_host_is_lost(tmp_path: Path) -> None:
    """A machine that vanishes closes no connection."""
    bench = await TunnelBench.open(tmp_path, lost_after_s=1.0)
    ticket = bench.ticket()
    _, writer = await bench.connect(ticket.address, client_context(ticket))
    writer.write(encode(hello()))
    await bench.next(rpc_tunnel.HostConnected)
    assert (await bench.lost()).reason == "no heartbeat for 1 s"
    await bench.close()


@pytest.mark.parametrize("command", [ForgetHost(NAME), ExpectHost(NAME, "0" * 64)])
async def test_host_that_is_not_wanted_ends(bench: TunnelBench, command: ForgetHost | ExpectHost) -> None:
    """Its engine has ended, or another host takes its place."""
    _, host, _ = await bench.connected(EchoServer())
    bench.send(command)
    await asyncio.wait_for(host, TIMEOUT_S)
    assert bench.events.empty()


@pytest.mark.parametrize("changes", [{"key": ""}, {"key": "b"}, {"name": "other"}, {"version": "0.0.0"}])
async def test_wrong_hello_is_refused(bench: TunnelBench, changes: dict[str, str]) -> None:
    """A certificate of the authority alone is not enough; the ticket is not used up by that."""
    ticket = bench.ticket()
    assert isinstance(await ask(bench, ticket, hello(**changes)), TunnelRefused)
    assert isinstance(await ask(bench, ticket, hello()), TunnelWelcome)


async def test_key_is_valid_once(bench: TunnelBench) -> None:
    """Nothing connects with it again, not even its host."""
    ticket = bench.ticket()
    assert isinstance(await ask(bench, ticket, hello()), TunnelWelcome)
    assert isinstance(await ask(bench, ticket, hello()), TunnelRefused)


async def test_first_message_must_be_a_small_hello(bench: TunnelBench) -> None:
    """Others close the connection without an answer."""
    ticket = bench.ticket()
    for message in (TunnelBeat(), StreamBytes(1, b"x"), hello(node="x" * MAX_HELLO_BYTES)):
        assert await ask(bench, ticket, message) is None


async def test_certificate_is_required(bench: TunnelBench, tmp_path: Path) -> None:
    """Of this authority."""
    ticket = bench.ticket()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=ticket.authority)
    foreign = client_context(ticket)
    other = ClusterCertificates(tmp_path / "other")
    certificate, key = other.issue(NAME)
    foreign = client_context(msgspec.structs.replace(ticket, certificate=certificate, certificate_key=key))
    for context in (bare, foreign):
        reader, writer = await bench.connect(ticket.address, context)
        writer.write(encode(hello()))
        assert await at_end(reader) == b""
    assert isinstance(await ask(bench, ticket, hello()), TunnelWelcome)


async def test_other_users_of_the_machine_do_not_reach_the_server(
    bench: TunnelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection to the loopback port is closed unless it is of this user."""
    server = EchoServer()
    _, _, port = await bench.connected(server)
    monkeypatch.setattr(rpc_tunnel, "_owner", lambda _address: os.getuid() + 1)
    reader, _ = await bench.engine(port)
    assert await at_end(reader) == b""
    assert not server.connections
