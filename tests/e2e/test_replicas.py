"""A model with several engines: turns spread, sessions return to their KV, and a lost engine costs no text."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.tasks import TaskGroup
from tests.e2e.harness import ENDLESS, Daemon, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.harness import SocketClient

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "5",
    "INFERENCECENTER_MODEL__NAME": "twin",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
}
LONG = "a conversation " * 20
SHORT: dict[str, Any] = {"max_tokens": 4}


def replicas(folder: Path, number: int) -> dict[str, str]:
    """Return the settings of a model with so many replicas of two slots each."""
    path = folder / "replicas.toml"
    path.write_text(f"[models.twin]\nreplicas = {number}\nslots = 2\n")
    return {"INFERENCECENTER_CONFIG": str(path)}


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two echo engines of two slots each."""
    with run_daemon(tmp_path / "state", None, **ECHO, **replicas(tmp_path, 2)) as running:
        yield running


def engine_pids(daemon: Daemon) -> list[int]:
    """Return the pids of the daemon's engines, oldest first."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return [
        int(pid) for pid in sorted(children, key=int) if b"engine\0--fd\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def states(daemon: Daemon) -> list[str]:
    """Return the states of the replicas, from the metrics."""
    page = daemon.get("/metrics")[1]
    lines = [line for line in page.splitlines() if line.startswith("inferencecenter_replica_state{")]
    current = [line for line in lines if line.endswith(" 1.0")]
    return [line.split('state="')[1].split('"')[0] for line in current]


def wait_until_ready(daemon: Daemon, number: int) -> None:
    """Wait until so many replicas are ready."""
    while states(daemon) != ["ready"] * number:
        assert daemon.process.poll() is None


async def ask_all(client: SocketClient, prompts: dict[str, str], **params: Any) -> None:
    """Submit one prompt to each session."""
    for session, prompt in prompts.items():
        await client.send(op="infer", session_id=session, prompt=prompt, params=params)


async def ends_of(client: SocketClient, sessions: list[str]) -> dict[str, dict[str, Any]]:
    """Wait for the ends of these sessions' turns."""
    ends: dict[str, dict[str, Any]] = {}
    while len(ends) < len(sessions):
        message = await client.receive()
        assert message["op"] != "error", message
        if message["op"] == "end":
            assert message["session_id"] not in ends
            ends[message["session_id"]] = message
    return ends


@pytest.mark.slow
async def test_turns_spread_and_sessions_return_to_their_kv(echo: Daemon) -> None:
    """Four turns fill both engines; each session's next turn finds its history, whichever engine has it."""
    async with connect_client(echo) as client:
        sessions = [await client.create() for _ in range(4)]
        await ask_all(client, dict.fromkeys(sessions, LONG))
        running: set[float] = set()
        while running != {2.0}:
            running = {echo.metric("replica_running_turns", replica=each) for each in ("0", "1")}
        await ends_of(client, sessions)
        for _ in range(2):
            await ask_all(client, dict.fromkeys(sessions, "Again?"), **SHORT)
            ends = await ends_of(client, sessions)
            assert all(end["stats"]["cached_tokens"] > len(LONG) / 2 for end in ends.values())
        fork = (await client.ask(op="fork_session", session_id=sessions[3]))["session_id"]
        _, end = await client.turn(fork, "And you?", **SHORT)
        assert end["stats"]["cached_tokens"] > len(LONG) / 2
        (model,) = (await client.ask(op="list_models"))["models"]
    assert [(each["state"], each["running"]) for each in model["replicas"]] == [("loaded", 0)] * 2
    assert model["slots"] == 4
    assert echo.metric("placed_turns_total", kind="new") == 4
    assert echo.metric("placed_turns_total", kind="kv") == 9
    assert echo.metric("slots") == 4


@pytest.mark.slow
async def test_killed_replica_costs_no_text(echo: Daemon) -> None:
    """After SIGKILL of one engine in mid-answer all turns end once with the whole text, and it is used again."""
    async with connect_client(echo) as client:
        sessions = [await client.create() for _ in range(4)]
        first = {session: f"{number} {LONG}" for number, session in enumerate(sessions)}
        await ask_all(client, first)
        told = {session: 0 for session in sessions}
        while min(told.values()) < 3:
            message = await client.receive()
            if message["op"] == "token":
                told[message["session_id"]] += 1
        lost = engine_pids(echo)[0]
        os.kill(lost, signal.SIGKILL)
        await ends_of(client, sessions)
        for session in sessions:
            tokens = [each for each in client.seen if each["op"] == "token" and each["session_id"] == session]
            assert "".join(each["content"] for each in tokens).strip() == first[session].strip()
        while states(echo) != ["ready", "ready"]:
            assert echo.ready()
        assert lost not in engine_pids(echo)
        assert echo.metric("replica_restarts_total") == echo.metric("engine_restarts_total") == 1
        await ask_all(client, dict.fromkeys(sessions, "Again?"), **SHORT)
        await ends_of(client, sessions)
    assert [message["state"] for message in client.seen if message["op"] == "engine"] == []


async def test_ready_while_one_replica_serves(echo: Daemon) -> None:
    """Readiness and greetings concern the model, not each of its engines."""
    os.kill(engine_pids(echo)[1], signal.SIGKILL)
    status, body = echo.get("/readyz")
    assert (status, json.loads(body)["state"]) == (200, "ready")
    async with connect_client(echo) as client:
        assert (await client.ask(op="hello"))["status"] == "ready"


@pytest.mark.slow
async def test_replicas_have_their_own_kv_and_locks(tmp_path: Path) -> None:
    """The first has those of a model without replicas; what is left of the others is deleted when they are gone."""
    state_dir = tmp_path / "state"
    for number, left in ((2, 2), (1, 1)):
        with run_daemon(state_dir, None, **ECHO, **replicas(tmp_path, number)) as daemon:
            async with connect_client(daemon) as client:
                sessions = [await client.create() for _ in range(4)]
                await ask_all(client, dict.fromkeys(sessions, LONG), **SHORT)
                await ends_of(client, sessions)
        (folder,) = (state_dir / "kv").iterdir()
        names = sorted(path.name for path in folder.iterdir())
        assert names == [names[0], f"{names[0]}-1"][:left]
        assert {path.name for path in state_dir.glob("engine-*.lock")} == {
            f"engine-{names[0]}.lock",
            f"engine-{names[0]}-1.lock",
        }


@pytest.mark.slow
async def test_greedy_answer_of_a_killed_replica_is_that_of_an_undisturbed_run(
    tmp_path: Path, demo_model_path: Path
) -> None:
    """The other engine prefills question and partial answer, and continues with the next token."""
    path = tmp_path / "models.toml"
    path.write_text(f'[models.twin]\nreplicas = 2\nslots = 2\npath = "{demo_model_path}"\n')
    params = {**ENDLESS, "max_tokens": 200}
    settings = {"INFERENCECENTER_CONFIG": str(path), "INFERENCECENTER_MODEL__NAME": "twin"}
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            undisturbed, _ = await client.turn(await client.create(), "Count from 1 to 100.", **params)
            session = await client.create()
            pids = engine_pids(daemon)
            await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=params)
            begin = len(client.seen)
            await client.until(lambda message: message["op"] == "token")
            busy = int(daemon.metric("replica_running_turns", replica="1"))
            os.kill(pids[busy], signal.SIGKILL)
            end = await client.until(lambda message: message["op"] in ("error", "end"))
            tokens = [each["content"] for each in client.seen[begin:] if each["op"] == "token"]
    assert (end["op"], end["usage"]["completion_tokens"]) == ("end", 200)
    assert "".join(tokens) == undisturbed


async def talk(daemon: Daemon, over: asyncio.Event, texts: list[str]) -> None:
    """Run turns, each in a session of its own, until it is ``over``; each ends once, as ``turn`` asserts."""
    async with connect_client(daemon) as client:
        while not over.is_set():
            session = await client.create()
            text, end = await client.turn(session, "Count from 1 to 100.", **ENDLESS, max_tokens=80)
            assert end["usage"]["completion_tokens"] == 80
            texts.append(text)
            await client.ask(op="close_session", session_id=session)
        ends = [frame["turn_id"] for frame in client.seen if frame["op"] == "end"]
        assert len(ends) == len(set(ends))


@pytest.mark.slow
async def test_rolling_change_under_load_costs_no_text(tmp_path: Path, demo_model_path: Path) -> None:
    """Settings, the file and the number change while clients generate, and a damaged file changes nothing.

    All answers are those of an undisturbed run, and one replica at most is missing at any time.
    """
    config, copied, damaged = tmp_path / "models.toml", tmp_path / "copied.gguf", tmp_path / "damaged.gguf"
    shutil.copy(demo_model_path, copied)
    shutil.copy(demo_model_path, damaged)
    os.truncate(damaged, 200_000)

    def choose(path: Path, *, replicas: int = 3, n_ctx: int = 2048) -> None:
        config.write_text(
            f'[models.twin]\npath = "{path}"\nreplicas = {replicas}\nslots = 2\nn_ctx = {n_ctx}\n'
            "[engine]\nswap_patience_s = 0.2\n"
        )

    choose(demo_model_path)
    settings = {"INFERENCECENTER_CONFIG": str(config), "INFERENCECENTER_MODEL__NAME": "twin"}
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        wait_until_ready(daemon, 3)
        async with connect_client(daemon) as client:
            undisturbed, _ = await client.turn(await client.create(), "Count from 1 to 100.", **ENDLESS, max_tokens=80)

            async def model() -> dict[str, Any]:
                entries = (await client.ask(op="list_models"))["models"]
                twin: dict[str, Any] = next(each for each in entries if each["name"] == "twin")
                return twin

            async def reload(wanted: Callable[[dict[str, Any]], bool], *, of: int = 3) -> list[int]:
                """Reload, and return the engines once the list of models is as wanted."""
                before = daemon.log.read_text().count("replicas_roll")
                daemon.process.send_signal(signal.SIGHUP)
                while True:
                    has_begun = daemon.log.read_text().count("replicas_roll") > before
                    twin = await model()
                    loaded = sum(each["state"] == "loaded" for each in twin["replicas"])
                    assert loaded >= of - 1
                    if has_begun and loaded == of and wanted(twin):
                        return engine_pids(daemon)

            over = asyncio.Event()
            texts: list[list[str]] = [[] for _ in range(4)]
            tasks = TaskGroup("test")
            clients = [tasks.spawn(talk(daemon, over, each), name="client") for each in texts]
            pids = [engine_pids(daemon)]
            choose(demo_model_path, n_ctx=1024)
            pids.append(await reload(lambda twin: "roll" not in twin and twin["n_ctx"] == 1024))
            choose(copied, n_ctx=1024)
            pids.append(await reload(lambda twin: "roll" not in twin))
            choose(damaged, n_ctx=1024)
            pids.append(await reload(lambda twin: twin.get("roll", {}).get("failed", False)))
            assert (await model())["roll"]["detail"]
            choose(copied, n_ctx=1024, replicas=2)
            await reload(lambda twin: len(twin["replicas"]) == 2 and "roll" not in twin, of=2)
            over.set()
            await asyncio.gather(*clients)
    assert set().union(*texts) == {undisturbed}
    assert all(len(each) > 1 for each in texts)
    assert all(set(pids[index]).isdisjoint(pids[index + 1]) for index in range(2))
    assert len(set(pids[2]) & set(pids[3])) == 2
