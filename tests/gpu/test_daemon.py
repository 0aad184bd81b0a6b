"""A daemon whose model is on a GPU: answers, KV that comes back, and an engine that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.answers import ask
from tests.e2e.harness import REPLY_TIMEOUT_S, connect_client, run_daemon
from tests.e2e.test_fork_and_rewind import (
    test_fork_and_parent_keep_separate_histories,
    test_rewound_turn_is_replaced,
)
from tests.e2e.test_long_conversations import test_context_shift_during_an_answer
from tests.e2e.test_speculation import GREEDY as DRAFTED
from tests.e2e.test_speculation import drafted_frames
from tests.gpu.daemons import GREEDY, QUESTION, SETTINGS, plan_of, settings_on, told_name, unload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.hardware.placement import Device
    from tests.e2e.harness import Daemon

__all__ = [  # tests of any daemon, which run here on this module's
    "test_context_shift_during_an_answer",
    "test_fork_and_parent_keep_separate_histories",
    "test_rewound_turn_is_replaced",
]

PROMPTS = ("My name is Ada. I have a cat.", "Count from 5 to 19.", "What is 7 plus 8?", "Name four colors.")


@pytest.fixture(scope="module")
def daemon(
    devices: tuple[Device, ...], tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[Daemon]:
    """A daemon with all layers on a GPU, which drafts tokens."""
    settings = settings_on(devices) | {"INFERENCECENTER_ENGINE__SPECULATIVE": "lookup"}
    with run_daemon(tmp_path_factory.mktemp("gpu") / "state", demo_model_path, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def on_processor(
    devices: tuple[Device, ...], tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[Daemon]:
    """A daemon of the same build with no layer on a GPU."""
    assert devices
    settings = SETTINGS | {"INFERENCECENTER_ENGINE__N_GPU_LAYERS": "0"}
    with run_daemon(tmp_path_factory.mktemp("processor") / "state", demo_model_path, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def small_context(daemon: Daemon) -> Daemon:
    """The daemon, by its name in the tests of long conversations."""
    return daemon


async def test_all_layers_are_on_one_gpu(daemon: Daemon) -> None:
    """The plan places them there, and the memory in use is known."""
    async with connect_client(daemon) as client, asyncio.timeout(REPLY_TIMEOUT_S):
        plan = await plan_of(client)
        while plan["devices"][0]["used_bytes"] is None:
            plan = await plan_of(client)
    (device,) = plan["devices"]
    assert device["layers"] == plan["n_gpu_layers"] == plan["layers"]
    assert device["used_bytes"] >= device["weight_bytes"] + device["kv_bytes"]


async def test_answers_are_those_of_the_processor(daemon: Daemon, on_processor: Daemon) -> None:
    """Four prompts share two slots: each answer is equal, or first different where two tokens were nearly equal."""
    answers = []
    for each in (on_processor, daemon):
        async with connect_client(each) as client:
            sessions = [await client.create() for _ in PROMPTS]
            answers.append(await ask(client, sessions, PROMPTS, temperature=0.0, max_tokens=16, n_probs=2))
    for prompt, expected, found in zip(PROMPTS, *answers, strict=True):
        assert expected.agrees_with(found), f"{prompt!r}: {expected} on the processor, {found} on the GPU"


async def test_parked_kv_returns_to_the_gpu(daemon: Daemon) -> None:
    """Turns of more sessions than slots, and turns after the engine has ended, find their KV again."""
    async with connect_client(daemon) as client:
        recorders = [await told_name(client) for _ in range(3)]
        for recorder in recorders:
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert recorder.end["stats"]["cached_tokens"] > 0
        await unload(client)
        for recorder in recorders:
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert recorder.end["stats"]["cached_tokens"] > 0
        assert (plan := await plan_of(client))["n_gpu_layers"] == plan["layers"]


async def test_killed_engine_returns_to_the_gpu(daemon: Daemon) -> None:
    """After SIGKILL amid an answer the turn ends as it would have, and all layers are on the GPU again."""
    params = {"temperature": 0.0, "max_tokens": 60}
    prompt = "Count from 1 to 15."
    async with connect_client(daemon) as client:
        expected, _ = await client.turn(await client.create(), prompt, **params)
        session, seen, pid = await client.create(), len(client.seen), daemon.engine_pid()
        await client.send(op="infer", session_id=session, prompt=prompt, params=params)
        await client.until(lambda message: message["op"] == "token")
        os.kill(pid, signal.SIGKILL)
        end = await client.until(lambda message: message["op"] in ("error", "end"))
        text = "".join(message["content"] for message in client.seen[seen:] if message["op"] == "token")
        assert (end["op"], text) == ("end", expected)
        assert daemon.engine_pid() != pid
        assert (plan := await plan_of(client))["n_gpu_layers"] == plan["layers"]


async def test_accepted_drafts_share_a_frame(
    devices: tuple[Device, ...], tmp_path: Path, demo_model_path: Path
) -> None:
    """At least at first: where a row costs as much as a decode, as on a software device, the engine stops drafting.

    It learns this cost from all turns, so this is the first turn of a daemon.
    """
    settings = settings_on(devices) | {"INFERENCECENTER_ENGINE__SPECULATIVE": "lookup"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as running:
        assert await drafted_frames(running) < DRAFTED["max_tokens"]
