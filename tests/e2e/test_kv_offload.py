"""More sessions than slots on the real model: every session is remembered, at worst after another prefill."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import ask
from tests.e2e.harness import ENDLESS, REPLY_TIMEOUT_S, connect_client, mounted, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon, SocketClient

NAMES = ["Ada", "Boris", "Clara", "Diego", "Elena", "Felix", "Greta", "Hugo", "Ingrid", "Jonas", "Kenji", "Lara"]
GREEDY = {"temperature": 0.0, "max_tokens": 24}
STATEMENT = "My name is {}."
QUESTION = "What is my name?"
SLOTS = 2
QUANTUM = 4
SMALL = {
    "INFERENCECENTER_ENGINE__SLOTS": str(SLOTS),
    "INFERENCECENTER_ENGINE__N_CTX": "1024",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
}
CLOCK_TICK_S = 0.01  # by this a file's time may lag the clock
TIERS = {"ram": (64, 0), "disk": (0, 64), "both": (1, 64), "none": (0, 0)}


def kv_settings(**settings: object) -> dict[str, str]:
    """Return environment variables for ``[kv]``."""
    return {f"INFERENCECENTER_KV__{name.upper()}": str(value) for name, value in settings.items()}


def tier_settings(name: str) -> dict[str, str]:
    """Return settings for tiers of so many MiB that one client may use alone."""
    ram_mib, disk_mib = TIERS[name]
    return kv_settings(ram_mib=ram_mib, disk_mib=disk_mib, client_share=1.0)


async def state_names(client: SocketClient, names: list[str]) -> dict[str, str]:
    """Create a session for each name and state that name, concurrently; return the sessions by name."""
    sessions = {name: await client.create() for name in names}
    await run_turns(client, {session: STATEMENT.format(name) for name, session in sessions.items()})
    return sessions


async def run_turns(client: SocketClient, prompts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Send every session its prompt, and return the answers' ``text`` and ``end`` by session."""
    for session, prompt in prompts.items():
        await client.send(op="infer", session_id=session, prompt=prompt, params=GREEDY)
    answers: dict[str, dict[str, Any]] = {session: {"text": ""} for session in prompts}
    while not all("end" in answer for answer in answers.values()):
        message = await client.receive()
        assert message["op"] != "error", message
        if message["op"] == "token":
            answers[message["session_id"]]["text"] += message["content"]
        elif message["op"] == "end":
            answers[message["session_id"]]["end"] = message
    return answers


def warnings(daemon: Daemon, part: str) -> list[str]:
    """Return the daemon's warnings so far that contain ``part``."""
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line["event"] for line in lines if line["level"] == "warning" and part in line["event"]]


def count_on_disk(daemon: Daemon, sessions: dict[str, float]) -> int:
    """Return how many sessions are in files newer than their last turn, of which the time is given."""
    count = 0
    for path in daemon.state_dir.rglob("kv-*.disk"):
        with suppress(FileNotFoundError):  # replaced in the meantime
            header, written = path.read_bytes()[:4096], path.stat().st_mtime + CLOCK_TICK_S
            count += any(session.encode() in header and written > ended for session, ended in sessions.items())
    return count


async def recall_names(daemon: Daemon, *, seed: int, at_once: int = len(NAMES)) -> int:
    """State twelve names to twelve sessions and ask for them in another order; return how many found their KV.

    Without RAM to offload to, few sessions can wait to be written. Then one turn runs at a time (``at_once``), and
    the next starts when every session without a slot is on disk, however slow that is.
    """
    names = list(NAMES)
    finished: dict[str, float] = {}
    async with connect_client(daemon) as client:
        sessions = {name: await client.create() for name in names}

        async def run(some: list[str], prompt: str) -> dict[str, dict[str, Any]]:
            """Run the turns."""
            answers = await run_turns(client, {sessions[name]: prompt.format(name) for name in some})
            finished.update(dict.fromkeys(answers, time.time()))
            deadline = time.monotonic() + REPLY_TIMEOUT_S
            while at_once == 1 and count_on_disk(daemon, finished) < len(finished) - SLOTS:
                assert time.monotonic() < deadline, "offloaded KV is not written in time"
                await asyncio.sleep(0.01)
            return answers

        for at in range(0, len(names), at_once):
            await run(names[at : at + at_once], STATEMENT)
        random.Random(seed).shuffle(names)
        found = 0
        for at in range(0, len(names), step := min(at_once, 3)):
            some = names[at : at + step]
            answers = await run(some, QUESTION)
            for name in some:
                answer = answers[sessions[name]]
                assert name in answer["text"], f"{name} was answered {answer['text']!r}"
                found += answer["end"]["stats"]["cached_tokens"] > 0
        for session in sessions.values():
            await client.ask(op="close_session", session_id=session)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TIERS)
async def test_twelve_sessions_on_two_slots(tmp_path: Path, demo_model_path: Path, name: str) -> None:
    """All answers are right with any tiers; with a tier no session is prefilled again.

    A closed session leaves nothing behind.
    """
    with run_daemon(tmp_path / "state", demo_model_path, **SMALL, **tier_settings(name)) as daemon:
        found = await recall_names(daemon, seed=12, at_once=1 if name == "disk" else len(NAMES))
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while daemon.metric("parked_sessions"):  # the engine reports it a moment after the sessions are closed
            assert time.monotonic() < deadline, "the KV of closed sessions is kept"
            await asyncio.sleep(0.01)
        assert warnings(daemon, "parked") == []
    assert found == 12 if name != "none" else found <= 2
    assert not list((tmp_path / "ram").glob("*/*")), "KV in RAM outlived the daemon"


PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Give me a JSON object with a name and an age.",
)


@pytest.fixture(scope="module")
def small_daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon of two slots with short quanta, which offloads to RAM."""
    settings = {**SMALL, **tier_settings("ram"), "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": str(QUANTUM)}
    with run_daemon(tmp_path_factory.mktemp("small") / "state", demo_model_path, **settings) as daemon:
        yield daemon


async def test_preemption_does_not_change_answers(small_daemon: Daemon) -> None:
    """Six greedy answers on two slots, four tokens at a time, equal those without preemption."""
    params = {"temperature": 0.0, "max_tokens": 32, "n_probs": 2}
    async with connect_client(small_daemon) as client:
        alone = []
        for prompt in PROMPTS:
            alone += await ask(client, [await client.create()], [prompt], **params)
        concurrent = await ask(client, [await client.create() for _ in PROMPTS], PROMPTS, **params)
        ends = [message for message in client.seen if message["op"] == "end"][-len(PROMPTS) :]
    for prompt, one, many in zip(PROMPTS, alone, concurrent, strict=True):
        assert one.tokens, f"no tokens for {prompt!r}"
        assert one.agrees_with(many), f"{prompt!r}: {one} alone, {many} concurrently"
    preempted = [end["stats"]["preempted"] for end in ends]
    assert sum(preempted) >= len(PROMPTS), f"no turn was preempted, so nothing was compared: {preempted}"


async def test_time_sharing_serves_every_turn(small_daemon: Daemon) -> None:
    """Four endless answers on two slots all make progress; turns that wait get their queue positions."""
    async with connect_client(small_daemon) as client:
        sessions = [await client.create() for _ in range(4)]
        for session in sessions:
            await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=ENDLESS)
        received = dict.fromkeys(sessions, 0)
        bursts: list[str] = []
        while min(received.values()) < 40:
            message = await client.receive()
            if message["op"] == "token":
                received[message["session_id"]] += 1
                bursts.append(message["session_id"])
        for session in sessions:
            await client.send(op="abort", session_id=session)
        ends: set[str] = set()
        while len(ends) < len(sessions):
            message = await client.receive()
            ends |= {message["session_id"]} if message["op"] == "end" else set()
    places = {message["position"] for message in client.seen if message["op"] == "queued"}
    assert places >= {0, 1}
    assert max(received.values()) <= 40 + 3 * QUANTUM, f"one turn got more than three quanta more: {received}"
    assert set(bursts[: len(bursts) // 2]) == set(sessions)


async def test_next_engine_restores_offloaded_kv(small_daemon: Daemon) -> None:
    """After an engine kill sessions without a slot are restored from RAM; the others are prefilled again."""
    names = NAMES[:6]
    async with connect_client(small_daemon) as client:
        sessions = await state_names(client, names)
        before = small_daemon.engine_pid()
        os.kill(before, signal.SIGKILL)
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
        assert small_daemon.engine_pid() != before
        answers = await run_turns(client, {session: QUESTION for session in sessions.values()})
    found = 0
    for name, session in sessions.items():
        assert name in answers[session]["text"]
        found += answers[session]["end"]["stats"]["cached_tokens"] > 0
    assert found >= len(names) - 2


def offloaded_files(directory: Path) -> list[Path]:
    """Return the files there, of all daemons and models."""
    return [path for path in directory.rglob("*") if path.is_file()]


async def test_kv_of_unstored_sessions_is_removed(tmp_path: Path, demo_model_path: Path) -> None:
    """Sessions that are not stored end with their daemon, and their KV is removed, also after a kill."""
    settings = {**SMALL, **tier_settings("ram"), "INFERENCECENTER_SESSIONS__STORE": "false"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            await state_names(client, NAMES[:4])
            assert daemon.metric("parked_sessions") >= 2
            daemon.process.kill()
            daemon.process.wait()
    assert offloaded_files(tmp_path / "ram")
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        assert daemon.metric("parked_sessions") == 0
        assert not offloaded_files(tmp_path / "ram")


async def test_kv_directories_that_cannot_be_created(tmp_path: Path, demo_model_path: Path) -> None:
    """The daemon logs a warning for each and answers without offloading."""
    settings = kv_settings(ram_dir="/dev/null/kv", disk_dir="/proc/kv")
    with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
        assert await recall_names(daemon, seed=1) <= 2
        for tier in ("RAM", "disk"):
            assert warnings(daemon, f"KV is parked without a {tier} tier")


@pytest.mark.slow
async def test_kv_directories_that_cannot_be_written(tmp_path: Path, demo_model_path: Path) -> None:
    """On a read-only file system the daemon answers without offloading."""
    with mounted(tmp_path / "tmpfs", "-o", "ro") as path:
        settings = kv_settings(ram_dir=path / "ram", disk_dir=path / "disk")
        with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
            assert await recall_names(daemon, seed=2) <= 2
            assert warnings(daemon, "KV is parked without")


async def test_full_kv_directories(tmp_path: Path, demo_model_path: Path) -> None:
    """RAM is clipped to the free space, a full disk costs a warning, and what fits is used."""
    with mounted(tmp_path / "tmpfs", "-o", "size=256k") as path:
        settings = kv_settings(ram_dir=path / "ram", disk_dir=path / "disk", client_share=1.0)
        with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
            await recall_names(daemon, seed=3)
            assert warnings(daemon, "kv_ram_clipped")


@pytest.mark.slow
async def test_kv_budget_smaller_than_one_session(tmp_path: Path, demo_model_path: Path) -> None:
    """Nothing fits, so nothing is offloaded."""
    settings = kv_settings(ram_mib=1, disk_mib=1, client_share=0.001)
    with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
        assert await recall_names(daemon, seed=4) <= 2
