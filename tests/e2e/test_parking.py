"""More sessions than slots on the real model: everybody is remembered, and slower is the worst that can happen."""

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
from tests.e2e.harness import ENDLESS, REPLY_TIMEOUT_S, mounted, run_daemon, talk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon, Talk

NAMES = ["Ada", "Boris", "Clara", "Diego", "Elena", "Felix", "Greta", "Hugo", "Ingrid", "Jonas", "Kenji", "Lara"]
GREEDY = {"temperature": 0.0, "max_tokens": 24}
TOLD = "My name is {}."
ASKED = "What is my name?"
SLOTS = 2
SMALL = {
    "INFERENCECENTER_ENGINE__SLOTS": str(SLOTS),
    "INFERENCECENTER_ENGINE__N_CTX": "1024",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # what is shorter is not worth parking
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
}
CLOCK_TICK_S = 0.01  # by so much a file's time may be behind the clock
TIERS = {"ram": (64, 0), "disk": (0, 64), "both": (1, 64), "none": (0, 0)}


def kv(**settings: object) -> dict[str, str]:
    """Return environment variables for ``[kv]``."""
    return {f"INFERENCECENTER_KV__{name.upper()}": str(value) for name, value in settings.items()}


def tiers(name: str) -> dict[str, str]:
    """Return settings for tiers of so many MiB that one client may use alone."""
    ram_mib, disk_mib = TIERS[name]
    return kv(ram_mib=ram_mib, disk_mib=disk_mib, client_share=1.0)


async def tell(client: Talk, names: list[str]) -> dict[str, str]:
    """Open a session for each name and tell it that, all at once; return the sessions by name."""
    sessions = {name: await client.create() for name in names}
    await all_at_once(client, {session: TOLD.format(name) for name, session in sessions.items()})
    return sessions


async def all_at_once(client: Talk, prompts: dict[str, str]) -> dict[str, dict[str, Any]]:
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


def on_disk(daemon: Daemon, sessions: dict[str, float]) -> int:
    """Return how many of the sessions are in files newer than their last word, whose time they are given with."""
    count = 0
    for path in daemon.state_dir.rglob("kv-*.disk"):
        with suppress(FileNotFoundError):  # replaced meanwhile
            header, written = path.read_bytes()[:4096], path.stat().st_mtime + CLOCK_TICK_S
            count += any(session.encode() in header and written > said for session, said in sessions.items())
    return count


async def everybody_is_remembered(daemon: Daemon, *, seed: int, at_once: int = len(NAMES)) -> int:
    """Tell twelve sessions their names and ask for them in another order; return how many found their KV.

    Without memory to park in, only so many may wait to be written or were read: then one speaks ``at_once``, and the
    next when all that are in no slot are on the disk, however slow that is.
    """
    names = list(NAMES)
    said: dict[str, float] = {}
    async with talk(daemon) as client:
        sessions = {name: await client.create() for name in names}

        async def say(some: list[str], prompt: str) -> dict[str, dict[str, Any]]:
            answers = await all_at_once(client, {sessions[name]: prompt.format(name) for name in some})
            said.update(dict.fromkeys(answers, time.time()))
            deadline = time.monotonic() + REPLY_TIMEOUT_S
            while at_once == 1 and on_disk(daemon, said) < len(said) - SLOTS:
                assert time.monotonic() < deadline, "what is parked is not written in time"
                await asyncio.sleep(0.01)
            return answers

        for at in range(0, len(names), at_once):
            await say(names[at : at + at_once], TOLD)
        random.Random(seed).shuffle(names)
        found = 0
        for at in range(0, len(names), step := min(at_once, 3)):
            some = names[at : at + step]
            answers = await say(some, ASKED)
            for name in some:
                answer = answers[sessions[name]]
                assert name in answer["text"], f"{name} was told {answer['text']!r}"
                found += answer["end"]["stats"]["cached_tokens"] > 0
        for session in sessions.values():
            await client.ask(op="close_session", session_id=session)
    return found


@pytest.mark.parametrize("name", TIERS)
async def test_twelve_sessions_on_two_slots(tmp_path: Path, demo_model_path: Path, name: str) -> None:
    """All answer right, whatever the tiers; with any of them nobody is read again, without only the last two are not.

    A closed session leaves nothing behind.
    """
    with run_daemon(tmp_path / "state", demo_model_path, **SMALL, **tiers(name)) as daemon:
        found = await everybody_is_remembered(daemon, seed=12, at_once=1 if name == "disk" else len(NAMES))
        assert daemon.figure("parked_sessions") == 0
        assert warnings(daemon, "parked") == []
    assert found == 12 if name != "none" else found <= 2
    assert not list((tmp_path / "ram").glob("*/*")), "what was in memory outlived the daemon"


PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Give me a JSON object with a name and an age.",
)


async def test_preemption_does_not_change_an_answer(tmp_path: Path, demo_model_path: Path) -> None:
    """Six greedy answers on two slots, four tokens at a time, are those of six that were never interrupted."""
    params = {"temperature": 0.0, "max_tokens": 32, "n_probs": 2}
    settings = SMALL | {"INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "4"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            alone = []
            for prompt in PROMPTS:
                alone += await ask(client, [await client.create()], [prompt], **params)
            taken_turns = await ask(client, [await client.create() for _ in PROMPTS], PROMPTS, **params)
            ends = [message for message in client.seen if message["op"] == "end"][-len(PROMPTS) :]
    for prompt, one, many in zip(PROMPTS, alone, taken_turns, strict=True):
        assert one.tokens, f"no tokens for {prompt!r}"
        assert one.agrees_with(many), f"{prompt!r}: {one} alone, {many} in turns"
    preempted = [end["stats"]["preempted"] for end in ends]
    assert sum(preempted) >= len(PROMPTS), f"nobody was interrupted, so nothing was compared: {preempted}"


async def test_everybody_streams_in_turns(tmp_path: Path, demo_model_path: Path) -> None:
    """Four endless answers on two slots all speak, again and again; those who wait first are told their place."""
    settings = SMALL | {"INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "8"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            sessions = [await client.create() for _ in range(4)]
            for session in sessions:
                await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=ENDLESS)
            heard = dict.fromkeys(sessions, 0)
            bursts: list[str] = []
            while min(heard.values()) < 40:
                message = await client.receive()
                if message["op"] == "token":
                    heard[message["session_id"]] += 1
                    bursts.append(message["session_id"])
            for session in sessions:
                await client.send(op="abort", session_id=session)
            ends: set[str] = set()
            while len(ends) < len(sessions):
                message = await client.receive()
                ends |= {message["session_id"]} if message["op"] == "end" else set()
        places = {message["position"] for message in client.seen if message["op"] == "queued"}
    assert places >= {0, 1}
    assert max(heard.values()) <= 40 + 3 * 8, f"somebody got more than three quanta more: {heard}"
    assert set(bursts[: len(bursts) // 2]) == set(sessions)


async def test_a_killed_engine_finds_what_was_parked(tmp_path: Path, demo_model_path: Path) -> None:
    """The sessions without a slot go on from memory in the next engine; those with one are read again."""
    names = NAMES[:6]
    with run_daemon(tmp_path / "state", demo_model_path, **SMALL, **tiers("ram")) as daemon:
        async with talk(daemon) as client:
            sessions = await tell(client, names)
            before = daemon.engine_pid()
            os.kill(before, signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert daemon.engine_pid() != before
            answers = await all_at_once(client, {session: ASKED for session in sessions.values()})
    found = 0
    for name, session in sessions.items():
        assert name in answers[session]["text"]
        found += answers[session]["end"]["stats"]["cached_tokens"] > 0
    assert found >= len(names) - 2


def parked_files(directory: Path) -> list[Path]:
    """Return the files there, of all daemons and models."""
    return [path for path in directory.rglob("*") if path.is_file()]


async def test_nothing_stays_parked_of_sessions_that_are_not_kept(tmp_path: Path, demo_model_path: Path) -> None:
    """They end with their daemon, and so does what was parked of them, also when it was killed."""
    settings = {**SMALL, **tiers("ram"), "INFERENCECENTER_SESSIONS__STORE": "false"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            await tell(client, NAMES[:4])
            assert daemon.figure("parked_sessions") >= 2
            daemon.process.kill()
            daemon.process.wait()
    assert parked_files(tmp_path / "ram")
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        assert daemon.figure("parked_sessions") == 0
        assert not parked_files(tmp_path / "ram")


@pytest.mark.parametrize("place", ["/proc/kv", "/dev/null/kv"])
async def test_directories_that_cannot_be_made(tmp_path: Path, demo_model_path: Path, place: str) -> None:
    """A line of the log says so, and the daemon answers as if there was no parking."""
    settings = kv(ram_dir=place, disk_dir=place)
    with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
        assert await everybody_is_remembered(daemon, seed=1) <= 2
        assert warnings(daemon, "KV is parked without a disk tier")


async def test_directories_that_cannot_be_written(tmp_path: Path, demo_model_path: Path) -> None:
    """A file system mounted read-only is no reason not to answer."""
    with mounted(tmp_path / "tmpfs", "-o", "ro") as path:
        settings = kv(ram_dir=path / "ram", disk_dir=path / "disk")
        with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
            assert await everybody_is_remembered(daemon, seed=2) <= 2
            assert warnings(daemon, "KV is parked without")


async def test_directories_that_are_full(tmp_path: Path, demo_model_path: Path) -> None:
    """Memory is clipped to what is free, a full disk costs a line of the log, and what fits is used."""
    with mounted(tmp_path / "tmpfs", "-o", "size=256k") as path:
        settings = kv(ram_dir=path / "ram", disk_dir=path / "disk", client_share=1.0)
        with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
            await everybody_is_remembered(daemon, seed=3)
            assert warnings(daemon, "kv_ram_clipped")


async def test_a_budget_smaller_than_one_session(tmp_path: Path, demo_model_path: Path) -> None:
    """Nothing fits, so nothing is parked."""
    settings = kv(ram_mib=1, disk_mib=1, client_share=0.001)
    with run_daemon(tmp_path / "state", demo_model_path, **(SMALL | settings)) as daemon:
        assert await everybody_is_remembered(daemon, seed=4) <= 2
