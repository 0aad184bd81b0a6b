"""A daemon whose model uses the devices of a node of a real Ray cluster, on this machine, through the tunnel."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.test_ray import TIMEOUT_S, Cluster
from tests.e2e.harness import connect_client, run_daemon
from tests.gpu.daemons import SETTINGS, plan_of, unload
from tests.ports import free_port
from tests.rpc.server import use_libraries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Daemon, SocketClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PARAMS = {"temperature": 0.0, "max_tokens": 60}
PROMPT = "Count from 1 to 15."
LISTENING = "0A"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of two nodes, with llama.cpp's libraries that have RPC."""
    use_libraries(monkeypatch)
    with ExitStack() as held:
        cluster = Cluster(tmp_path, f"127.0.0.1:{free_port()}")
        held.callback(cluster.kill)
        cluster.add("one")
        cluster.add("two")
        yield cluster


def settings_of(cluster: Cluster, demo: Path) -> dict[str, str]:
    """Return the environment of a daemon whose model uses the devices of the node ``two``."""
    path = cluster.folder / "daemon.toml"
    path.write_text(
        f'[cluster]\naddress = "{cluster.address}"\ntoken_file = "{cluster.folder / "token"}"\nport = {cluster.port}\n'
        f'rpc_port = {free_port()}\n[models.demo]\npath = "{demo}"\nrpc_nodes = ["two"]\n'
    )
    return SETTINGS | {"INFERENCECENTER_CONFIG": str(path), "INFERENCECENTER_ENGINE__N_GPU_LAYERS": "-1"}


async def answer(client: SocketClient) -> str:
    """Return the answer to ``PROMPT`` in a new session."""
    text, _ = await client.turn(await client.create(), PROMPT, **PARAMS)
    return text


async def local_answer(folder: Path, demo: Path) -> str:
    """Return the same of a daemon that uses no devices."""
    with run_daemon(folder, demo, **SETTINGS) as daemon:
        async with connect_client(daemon) as client:
            assert (await plan_of(client))["n_gpu_layers"] == 0
            return await answer(client)


async def is_on_node(client: SocketClient) -> bool:
    """Return whether all layers are on the node's devices, or none is."""
    plan = await plan_of(client)
    if plan["n_gpu_layers"] == 0:
        return False
    assert plan["n_gpu_layers"] == plan["layers"]
    assert [device["id"] for device in plan["devices"]] == ["RPC0[two]"]
    return True


def listening_addresses(pid: int) -> set[str]:
    """Return the IPv4 addresses at which a process listens, in the notation of the kernel."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if found := re.match(r"socket:\[(\d+)\]", str(link.readlink())):
            sockets.add(found[1])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {each[1].split(":")[0] for each in fields if each[3] == LISTENING and each[9] in sockets}


async def interrupted(client: SocketClient, harm: object) -> str:
    """Start a turn, do ``harm`` to its engine in mid-answer, and return the whole answer."""
    session, seen = await client.create(), len(client.seen)
    await client.send(op="infer", session_id=session, prompt=PROMPT, params=PARAMS)
    await client.until(lambda message: message["op"] == "token")
    harm()  # type: ignore[operator]
    end = await client.until(lambda message: message["op"] in ("error", "end"))
    assert end["op"] == "end", end
    assert [each["op"] for each in client.seen[seen:]].count("end") == 1
    return "".join(each["content"] for each in client.seen[seen:] if each["op"] == "token")


def is_running(pid: int) -> bool:
    """Return whether there is such a process that has not ended."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    until_s = time.monotonic() + TIMEOUT_S
    while is_running(pid):
        assert time.monotonic() < until_s
        await asyncio.sleep(0.1)


def planned_by_doctor(cluster: Cluster, model: Path) -> list[str]:
    """Return the devices in the plan of ``doctor``, beside the running daemon."""
    environment = os.environ | settings_of(cluster, model)
    command = [sys.executable, "-m", "inferencecenter", "doctor", "--plan", str(model), "--json"]
    state = ["--state-dir", str(cluster.folder / "state")]
    done = subprocess.run(
        [*command, *state], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [device["id"] for device in json.loads(done.stdout)["devices"]]


async def test_texts_and_losses(cluster: Cluster, tmp_path: Path, demo_model_path: Path) -> None:
    """Texts equal those without devices, also after SIGKILL of the server, its host, and all of the node."""
    expected = await local_answer(tmp_path / "alone", demo_model_path)
    with run_daemon(tmp_path / "state", None, **settings_of(cluster, demo_model_path)) as daemon:
        async with connect_client(daemon) as client:
            assert await answer(client) == expected
            assert await is_on_node(client)
            two = cluster.nodes["two"]
            assert listening_addresses(two.find("llama.rpc_server")) == {"0100007F"}
            assert listening_addresses(two.find("cluster.rpc_host")) == set()
            for part in ("llama.rpc_server", "cluster.rpc_host"):
                victim = two.find(part)
                server = two.find("llama.rpc_server")
                assert await interrupted(client, lambda pid=victim: os.kill(pid, signal.SIGKILL)) == expected
                await gone(server)
                assert await is_on_node(client)
            assert await interrupted(client, two.kill) == expected
            assert not await is_on_node(client)
            cluster.add("two")
            await unload(client)
            assert await answer(client) == expected
            assert await is_on_node(client)
            assert planned_by_doctor(cluster, demo_model_path) == ["RPC0[two]"]
            last = cluster.nodes["two"].find("llama.rpc_server")
            await unload(client)
            await gone(last)
    check_log(daemon)


async def drained(client: SocketClient) -> None:
    """Wait until the node is drained."""
    until_s = time.monotonic() + TIMEOUT_S
    while (await client.ask(op="list_nodes"))["nodes"][-1]["drain"] != "drained":
        assert time.monotonic() < until_s
        await asyncio.sleep(0.2)


async def used_again(client: SocketClient) -> None:
    """Wait until the model is on the node without a request that needs it."""
    until_s = time.monotonic() + TIMEOUT_S
    while not await is_on_node(client):
        assert time.monotonic() < until_s
        await asyncio.sleep(0.5)


async def test_node_returns_to_an_idle_engine_and_is_drained(
    cluster: Cluster, tmp_path: Path, demo_model_path: Path
) -> None:
    """Texts are equal in mid-answer of both; a drained node has no server, and none is started there."""
    with run_daemon(tmp_path / "state", None, **settings_of(cluster, demo_model_path)) as daemon:
        async with connect_client(daemon) as client:
            expected = await answer(client)
            assert await is_on_node(client)
            assert await interrupted(client, cluster.nodes["two"].kill) == expected
            assert not await is_on_node(client)
            cluster.add("two")
            await used_again(client)
            assert await answer(client) == expected
            server = cluster.nodes["two"].find("llama.rpc_server")
            session, seen = await client.create(), len(client.seen)
            await client.send(op="infer", session_id=session, prompt=PROMPT, params=PARAMS)
            await client.until(lambda message: message["op"] == "token")
            await client.ask(op="drain_node", node="two")
            await client.until(lambda message: message["op"] == "end")
            assert "".join(each["content"] for each in client.seen[seen:] if each["op"] == "token") == expected
            await drained(client)
            await gone(server)
            assert await answer(client) == expected
            assert not await is_on_node(client)
            await client.ask(op="undrain_node", node="two")
            await used_again(client)
            assert await answer(client) == expected
    for event in ("task_failed", "task_restarts", "engine_given_up", "turns_quarantined"):
        assert event not in daemon.log.read_text()


def check_log(daemon: Daemon) -> None:
    """No loss counted as a crash of the engine's own, and no task failed."""
    log = daemon.log.read_text()
    assert "the RPC server was killed by SIGKILL" in log
    assert "the RPC server on two was lost" in log
    for event in ("task_failed", "task_restarts", "engine_given_up", "turns_quarantined"):
        assert event not in log


async def test_restarted_daemon_has_new_servers(cluster: Cluster, tmp_path: Path, demo_model_path: Path) -> None:
    """A server ends with the daemon that it is for, even if that was killed, and the next one starts its own."""
    settings = settings_of(cluster, demo_model_path)
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            expected = await answer(client)
            assert await is_on_node(client)
        server = cluster.nodes["two"].find("llama.rpc_server")
        daemon.process.kill()
        daemon.process.wait(TIMEOUT_S)
    await gone(server)
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            assert await answer(client) == expected
            assert await is_on_node(client)
