"""What is found of RPC servers: their devices with their memory, and nothing of servers that do not answer."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware import ggml
from inferencecenter.hardware.devices import find_devices
from tests.rpc.server import serving, use_libraries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rpc.server import RpcServer

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RpcServer]:
    """A server of two devices."""
    with serving(monkeypatch, devices=2) as running:
        yield running


def test_devices_are_named_by_their_server(server: RpcServer) -> None:
    """Settings select them by these names; each reports the server's memory."""
    names = [f"RPC{number}[{server.address}]" for number in range(2)]
    found = find_devices(rpc_servers=[server.address])
    assert [device.id for device in found] == names
    assert all(device.remote and 0 < device.free_bytes <= device.total_bytes for device in found)
    assert [device.id for device in find_devices(names[1:], [server.address])] == names[1:]


def test_unreachable_server_has_no_devices(server: RpcServer) -> None:
    """Others are used."""
    server.kill()
    assert find_devices(rpc_servers=[server.address]) == ()


def test_server_of_another_program_has_no_devices(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves one client at a time; a probe meanwhile ends after a short timeout."""
    monkeypatch.setattr(ggml, "_SERVER_TIMEOUT_S", 3.0)
    with server.connected():
        assert find_devices(rpc_servers=[server.address]) == ()


def test_other_servers_have_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp exits the probing process, not this one."""
    use_libraries(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.listen(1)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(ggml, "_SERVER_TIMEOUT_S", 3.0)
        assert find_devices(rpc_servers=[address]) == ()
