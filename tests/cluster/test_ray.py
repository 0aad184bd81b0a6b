"""A daemon whose engines run on nodes of a real Ray cluster, all on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Daemon, connect_client, run_daemon, stopped
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.e2e.harness import SocketClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 120.0
LONG = "a conversation " * 40


def children(pid: int) -> dict[int, str]:
    """Return the processes below a process, deepest last, each with its command line."""
    found: dict[int, str] = {}
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return found
    for child in map(int, listed.split()):
        try:
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except FileNotFoundError:
            continue
        found |= children(child)
    return found


@dataclass
class ClusterNode:
    """A node in a process of its own, with everything that Ray starts for it."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def pids(self) -> list[int]:
        """All of its processes."""
        return [self.process.pid, *children(self.process.pid)]

    def find(self, part: str) -> int:
        """Return the process of this node with this in its command line, when there is one."""
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            for pid, command in children(self.process.pid).items():
                if part in command:
                    return pid
            time.sleep(0.1)
        raise AssertionError(f"{self.name} has no {part}")

    def kill(self) -> None:
        """Kill all of its processes, as a machine that loses power does."""
        stopped: set[int] = set()
        while running := [pid for pid in self.pids if pid not in stopped]:
            for pid in running:
                with suppress(ProcessLookupError):  # it has ended since the list was read
                    os.kill(pid, signal.SIGSTOP)
            stopped.update(running)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(TIMEOUT_S)


@dataclass
class Cluster:
    """A head, which is the node ``one``, and further nodes."""

    folder: Path
    address: str
    nodes: dict[str, ClusterNode] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def add(self, name: str, *, within: tuple[str, ...] = ()) -> ClusterNode:
        """Start a node, and wait until it has joined; ``within`` makes a command run in a network namespace."""
        verb = "join" if self.nodes else "head"
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", "inferencecenter", "node", verb, self.address, "--name", name]
        where = ["--token-file", str(self.folder / "token"), "--directory", str(self.folder / name)]
        with log.open("wb") as output:
            process = subprocess.Popen([*within, *command, *where], stdout=output, stderr=output)
        self.nodes[name] = ClusterNode(name, process)
        until_s = time.monotonic() + TIMEOUT_S
        while "monitored" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        return self.nodes[name]

    def kill(self) -> None:
        """Kill all nodes, the head last."""
        for node in reversed(self.nodes.values()):
            if node.process.poll() is None:
                node.kill()

    def daemon_settings(self, *nodes: str, delay_ms: int = 5, slots: int = 2) -> dict[str, str]:
        """Return the environment of a daemon whose model has a replica on each of these nodes, or on all."""
        where = f"nodes = {list(nodes)}" if nodes else 'replicas = "all"'
        path = self.folder / "daemon.toml"
        path.write_text(
            f'[cluster]\naddress = "{self.address}"\ntoken_file = "{self.folder / "token"}"\n'
            f"port = {self.port}\nfiles_port = 0\n"
            f"[models.twin]\nslots = {slots}\n{where}\n"
        )
        return {
            "INFERENCECENTER_CONFIG": str(path),
            "INFERENCECENTER_ENGINE__BACKEND": "echo",
            "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": str(delay_ms),
            "INFERENCECENTER_MODEL__NAME": "twin",
            "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
        }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two nodes."""
    with ExitStack() as held:
        cluster = Cluster(tmp_path, f"127.0.0.1:{free_port()}")
        held.callback(cluster.kill)
        cluster.add("one")
        cluster.add("two")
        yield cluster


async def begin(client: SocketClient, number: int, text: str = LONG) -> dict[str, str]:
    """Start turns in new sessions, and wait until each has some text; return their prompts."""
    sessions = [await client.create() for _ in range(number)]
    prompts = {session: f"{index} {text}" for index, session in enumerate(sessions)}
    for session, prompt in prompts.items():
        await client.send(op="infer", session_id=session, prompt=prompt)
    told = dict.fromkeys(sessions, 0)
    while min(told.values()) < 3:
        message = await client.receive()
        if message["op"] == "token":
            told[message["session_id"]] += 1
    return prompts


async def check_texts(client: SocketClient, prompts: dict[str, str]) -> None:
    """Wait for the ends, one for each turn, and compare all that was received with what echo engines answer."""
    seen = [message["session_id"] for message in client.seen if message["op"] == "end"]
    ended = [session for session in seen if session in prompts]
    while len(ended) < len(prompts):
        message = await client.receive()
        assert message["op"] != "error", message
        if message["op"] == "end":
            ended.append(message["session_id"])
    assert sorted(ended) == sorted(prompts)
    for session, prompt in prompts.items():
        tokens = [each for each in client.seen if each["op"] == "token" and each["session_id"] == session]
        assert "".join(each["content"] for each in tokens).strip() == prompt.strip()


async def close(client: SocketClient, sessions: Iterable[str]) -> None:
    """Close sessions."""
    for session in sessions:
        await client.ask(op="close_session", session_id=session)


async def check_use(daemon: Daemon, client: SocketClient, node: str) -> None:
    """Check that turns run on a node."""
    before = daemon.metric("node_generated_tokens_total", node=node)
    await check_texts(client, await begin(client, 4, "a short conversation"))
    assert daemon.metric("node_generated_tokens_total", node=node) > before


def states(daemon: Daemon) -> list[str]:
    """Return the states of the replicas."""
    page = daemon.get("/metrics")[1]
    lines = [line for line in page.splitlines() if line.startswith("inferencecenter_replica_state{")]
    return [line.split('state="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")]


async def until_ready(daemon: Daemon, number: int = 2) -> None:
    """Wait until so many replicas are ready."""
    until_s = time.monotonic() + TIMEOUT_S
    while states(daemon).count("ready") < number:
        assert time.monotonic() < until_s, (states(daemon), daemon.log.read_text())
        await asyncio.sleep(0.1)


async def test_lost_processes_cost_no_text(cluster: Cluster, tmp_path: Path) -> None:
    """Stopped or killed processes of a node: turns continue, and it is used again.

    A stopped raylet or actor disturbs no turn. All of a node are stopped; the engine, its host, its actor, the raylet
    and all of a node are killed.
    """
    with run_daemon(tmp_path / "state", None, **cluster.daemon_settings("one", "two")) as daemon:
        async with connect_client(daemon) as client:
            for part in ("raylet/raylet", "ray::HostActor", ""):
                await until_ready(daemon)
                before = daemon.metric("node_engine_restarts_total", node="two")
                prompts = await begin(client, 4)
                two = cluster.nodes["two"]
                with ExitStack() as held:
                    for pid in [two.find(part)] if part else two.pids:
                        held.enter_context(stopped(pid))
                    await check_texts(client, prompts)
                assert (daemon.metric("node_engine_restarts_total", node="two") == before) == bool(part)
                await close(client, prompts)
            await until_ready(daemon)
            await check_use(daemon, client, "two")
            for part in ("engine --fd", "engine_host", "ray::HostActor", "raylet/raylet", ""):
                await until_ready(daemon)
                prompts = await begin(client, 4)
                two = cluster.nodes["two"]
                if part:
                    os.kill(two.find(part), signal.SIGKILL)
                else:
                    two.kill()
                await check_texts(client, prompts)
                await close(client, prompts)
                if part in ("raylet/raylet", ""):
                    if two.process.poll() is None:
                        two.kill()
                    cluster.add("two")
            await until_ready(daemon)
            await check_use(daemon, client, "two")


async def test_lost_head_costs_no_text(cluster: Cluster, tmp_path: Path) -> None:
    """SIGSTOP of the head's control service disturbs no turn, and neither does SIGKILL; then a new cluster is used."""
    settings = cluster.daemon_settings("local", "two") | {"INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "1"}
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            await until_ready(daemon)
            service = cluster.nodes["one"].find("gcs_server")
            for which in (signal.SIGSTOP, signal.SIGKILL):
                prompts = await begin(client, 4)
                os.kill(service, which)
                await check_texts(client, prompts)
                if which is signal.SIGSTOP:
                    os.kill(service, signal.SIGCONT)
            assert daemon.metric("node_engine_restarts_total", node="two") == 0
        cluster.kill()
        cluster.nodes.clear()
        cluster.add("one")
        cluster.add("two")
        await until_ready(daemon)
        async with connect_client(daemon) as client:
            await check_use(daemon, client, "two")


async def test_restarted_daemon_continues_with_the_engines(cluster: Cluster, tmp_path: Path) -> None:
    """After SIGKILL of the daemon the next one has the same engines, and turns go on at the exact character."""
    settings: dict[str, Any] = cluster.daemon_settings("one", "two", delay_ms=10)
    engines: list[int] = []
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        await until_ready(daemon)
        engines = [node.find("engine --fd") for node in cluster.nodes.values()]
        async with connect_client(daemon) as client:
            prompts = await begin(client, 4)
            daemon.process.kill()
            daemon.process.wait(TIMEOUT_S)
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        await until_ready(daemon)
        assert [node.find("engine --fd") for node in cluster.nodes.values()] == engines
        async with connect_client(daemon) as client:
            for session, prompt in prompts.items():
                until_s = time.monotonic() + TIMEOUT_S
                answer = ""
                while answer.strip() != prompt.strip():
                    assert time.monotonic() < until_s, answer
                    found = await client.ask(op="get_session", session_id=session)
                    answer = next((m["content"] for m in found["transcript"] if m["role"] == "assistant"), "")
                    await asyncio.sleep(0.1)


async def test_drained_node_is_empty(cluster: Cluster, tmp_path: Path) -> None:
    """Turns end elsewhere with their whole texts, also across a restart of the daemon, until it is used again."""
    settings = cluster.daemon_settings("one", "two", delay_ms=10)
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        await until_ready(daemon)
        async with connect_client(daemon) as client:
            refused = await client.ask(op="drain_node", node="three")
            assert refused["field"] == "node"
            prompts = await begin(client, 4)
            await client.ask(op="drain_node", node="two")
            refused = await client.ask(op="drain_node", node="one")
            assert "twin would have no machine that is not drained" in refused["message"]
            await check_texts(client, prompts)
            until_s = time.monotonic() + TIMEOUT_S
            while (await client.ask(op="list_nodes"))["nodes"][2]["drain"] != "drained":
                assert time.monotonic() < until_s
                await asyncio.sleep(0.1)
            while any("engine_host" in each for each in children(cluster.nodes["two"].process.pid).values()):
                assert time.monotonic() < until_s
                await asyncio.sleep(0.1)
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        await until_ready(daemon, 1)
        async with connect_client(daemon) as client:
            await check_texts(client, await begin(client, 2))
            assert sorted(states(daemon)) == ["ready", "stopped"]
            await client.ask(op="undrain_node", node="two")
            await until_ready(daemon)


async def test_replicas_follow_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """One on this machine, and on each other one that joins; that of a node that is killed ends, and it returns."""
    with run_daemon(tmp_path / "state", None, **cluster.daemon_settings()) as daemon:
        await until_ready(daemon, 2)  # this one, of which node one is a part, and node two
        cluster.add("three")
        await until_ready(daemon, 3)
        async with connect_client(daemon) as client:
            prompts = await begin(client, 6)
            cluster.nodes["two"].kill()
            await check_texts(client, prompts)
            until_s = time.monotonic() + TIMEOUT_S
            while "stopped" not in states(daemon):
                assert time.monotonic() < until_s
                await asyncio.sleep(0.1)
            cluster.add("two")
            await until_ready(daemon, 3)


async def test_reload_changes_engines_and_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Other settings one node after the other, then fewer, other and more nodes; no change costs text."""
    settings = cluster.daemon_settings("one", "two", delay_ms=10) | {"INFERENCECENTER_ENGINE__SWAP_PATIENCE_S": "0.2"}
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        await until_ready(daemon)
        async with connect_client(daemon) as client:
            changes = [(("one", "two"), 3, 6), (("one",), 3, 3), (("two",), 3, 3), (("two", "one"), 3, 6)]
            for nodes, slots, of_all in changes:
                prompts = await begin(client, 4)
                cluster.daemon_settings(*nodes, slots=slots)
                daemon.process.send_signal(signal.SIGHUP)
                until_s = time.monotonic() + TIMEOUT_S
                while True:
                    assert time.monotonic() < until_s, daemon.log.read_text()
                    (twin,) = (await client.ask(op="list_models"))["models"]
                    loaded = [each["node"] for each in twin["replicas"] if each["state"] == "loaded"]
                    if slots == 3 and nodes == ("one", "two"):
                        assert loaded
                    if "roll" not in twin and (loaded, twin.get("slots")) == ([*nodes], of_all):
                        break
                    await asyncio.sleep(0.1)
                await check_texts(client, prompts)
    log = daemon.log.read_text()
    assert [log.count(f"replica_{what}") for what in ("replaced", "removed", "added")] == [2, 1, 1]


async def test_missing_node_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    """The other replica serves, the log names the node, and its replica starts when it joins."""
    with run_daemon(tmp_path / "state", None, **cluster.daemon_settings("one", "three")) as daemon:
        await until_ready(daemon, 1)
        async with connect_client(daemon) as client:
            await check_texts(client, await begin(client, 1))
        assert "no node three is in the cluster" in daemon.log.read_text()
        cluster.add("three")
        await until_ready(daemon)


def test_doctor_examines_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """On the front and on a node it finds a good cluster good, a wrong token, and a node that has not joined."""
    env = {
        **os.environ,
        **cluster.daemon_settings("local", "two"),
        "INFERENCECENTER_STATE_DIR": str(tmp_path / "state"),
    }
    good = doctor(env)
    assert {name: check["verdict"] for name, check in good.items() if re.match("cluster|node", name)} == {
        "cluster token": "ok",
        "cluster listener": "ok",
        "cluster files listener": "ok",
        "cluster head": "ok",
        "cluster authentication": "ok",
        "node one": "ok",
        "node two": "ok",
    }
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    wrong.chmod(0o600)
    as_node = doctor(env, "--node", cluster.address, "--token-file", str(wrong))
    assert as_node["cluster head"]["verdict"] == "failed"
    assert "refuses the token" in as_node["cluster head"]["detail"]
    config = Path(env["INFERENCECENTER_CONFIG"])
    config.write_text(config.read_text().replace("'two'", "'two', 'three'"))
    assert doctor(env)["node three"]["detail"] == "has not joined"


def doctor(environment: dict[str, str], *options: str) -> dict[str, dict[str, str]]:
    """Return the checks of ``doctor`` by name."""
    command = [sys.executable, "-m", "inferencecenter", "doctor", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return {check["name"]: check for check in json.loads(done.stdout)}
