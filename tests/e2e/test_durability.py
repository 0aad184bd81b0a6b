"""The demo model still knows what it was told, and says what it would have said, whatever was killed in between."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import Daemon, run_daemon, start_daemon, stopped, talk
from tests.e2e.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Talk

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
TOLD = "My name is Ada. I live in Vienna."
ASKED = "What is my name?"
PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Name four colours.",
    "Give me a JSON object with a name and an age.",
    "Hello, who are you?",
)
SETTINGS = {
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.1",
    "INFERENCECENTER_ENGINE__MAX_RESTARTS": "100",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # what is shorter is not worth parking
}
CROWDED = SETTINGS | {
    "INFERENCECENTER_ENGINE__SLOTS": "2",
    "INFERENCECENTER_KV__RAM_MIB": "0",
    "INFERENCECENTER_KV__CLIENT_SHARE": "1.0",
}
"""Two slots, and nothing but the disk for who has none."""


class House:
    """A state directory in which one daemon lives after the other."""

    def __init__(self, state_dir: Path, model: Path, settings: dict[str, str]) -> None:
        self._state_dir, self._model = state_dir, model
        self._settings = settings
        self.start()

    def start(self) -> None:
        """Start a daemon where the one before it has ended."""
        self.daemon = start_daemon(self._state_dir, self._model, **self._settings)
        self.daemon.wait_ready()

    def kill(self) -> None:
        """End the daemon without a word, and start another."""
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.start()

    def restart(self) -> None:
        """Stop the daemon in order, and start another."""
        assert self.daemon.stop() == 0
        self.start()

    def kill_engine(self) -> None:
        """End the engine without a word."""
        os.kill(self.daemon.engine_pid(), signal.SIGKILL)


@contextlib.contextmanager
def house(state_dir: Path, model: Path, settings: dict[str, str]) -> Iterator[House]:
    """Have a daemon that is stopped at the end."""
    found = House(state_dir, model, settings)
    try:
        yield found
    finally:
        if found.daemon.process.poll() is None:
            found.daemon.stop()


async def crowd(client: Talk) -> None:
    """Have others take all slots, again and again, so that whoever had one is parked."""
    for number in range(3):
        await ask(
            client,
            [await client.create() for _ in range(2)],
            [f"{number}: What is the capital of Japan?"] * 2,
            **GREEDY,
            n_probs=2,
        )


async def knows(witness: Witness) -> bool:
    """Ask for the name that was told."""
    return "Ada" in await witness.turn(ASKED, **GREEDY)


async def fork(witness: Witness, **request: Any) -> Witness:
    """Open another session with the same beginning."""
    created = await witness.client.ask(op="fork_session", session_id=witness.session_id, **request)
    assert created["parent"] == witness.session_id
    forked = Witness(witness.client, created["session_id"], created["epoch"])
    witness.client.listeners.append(forked.see)
    return forked


@pytest.mark.slow
async def test_the_life_of_a_session(tmp_path: Path, demo_model_path: Path) -> None:
    """Parked to disk and back, forked, rewound, and its engine and daemons killed and stopped: it knows the name.

    So does the fork; and every time all that was shown is what the session holds.
    """
    with house(tmp_path / "state", demo_model_path, CROWDED) as home:
        async with talk(home.daemon) as client:
            witness = await Witness.open(client)
            await witness.turn(TOLD, **GREEDY)
            told = next(iter(witness.turns))
            await crowd(client)
            assert await knows(witness)
            assert witness.end["stats"]["cached_tokens"] > 0, "it was not parked"
            forked = await fork(witness)
            await crowd(client)
            assert await knows(forked)
            rewound = await client.ask(op="rewind_session", session_id=witness.session_id, turn=told)
            assert rewound["op"] == "session_rewound"
            witness.turns = {told: witness.turns[told]}
            assert await knows(witness)
            home.kill_engine()
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert await knows(forked)
            assert await knows(witness)
        for end in (home.kill, home.restart, home.kill):
            end()
            async with talk(home.daemon) as client:
                for each in (witness, forked):
                    assert (await each.resume(client))["resumed"] is (end == home.restart)
                    assert await knows(each)
                    assert await knows(await fork(each, turn=next(iter(each.turns))))
                    await each.described()
                await crowd(client)
                home.kill_engine()
                assert await knows(witness)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon whose engine is left alone, or is not."""
    with run_daemon(tmp_path_factory.mktemp("undisturbed") / "state", demo_model_path, **SETTINGS) as running:
        yield running


LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 120, "n_probs": 2}
LONGER = LONG | {"max_tokens": 600}


async def alone(client: Talk, *prompts: str, **params: Any) -> list[Answer]:
    """Answer each prompt in a session of its own, one after the other."""
    return [(await ask(client, [await client.create()], [prompt], **params))[0] for prompt in prompts]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_the_engine_is_killed_under_eight_streams(undisturbed: Daemon, seed: int) -> None:
    """At whatever moment: no token is lost or said twice, and each answer is what it would have been."""
    kill_at = random.Random(seed).randrange(8 * LONG["max_tokens"])
    async with talk(undisturbed) as client:
        expected = await alone(client, *PROMPTS, **LONG)
        witnesses = [await Witness.open(client) for _ in PROMPTS]
        begin = len(client.seen)
        for witness, prompt in zip(witnesses, PROMPTS, strict=True):
            params = {name: value for name, value in LONG.items() if name != "n_probs"}
            await witness.infer(prompt, n_probs=2, **params)
        for _ in range(kill_at):
            await client.receive()
        assert not all(witness.is_over for witness in witnesses)
        os.kill(undisturbed.engine_pid(), signal.SIGKILL)
        for witness in witnesses:
            await witness.finish()
        answers = answers_of(client.seen[begin:])
        for witness, one in zip(witnesses, expected, strict=True):
            assert witness.end["usage"]["completion_tokens"] == LONG["max_tokens"]
            assert len(answers[witness.session_id].tokens) == LONG["max_tokens"]
            assert one.agrees_with(answers[witness.session_id])
            await witness.described()
            await witness.turn("What is 7 plus 8?", **GREEDY)


def agrees(text: str, spelled: list[tuple[str, float]]) -> bool:
    """Tell whether a text is what the tokens spell, up to the first whose choice was close if it is not."""
    at = 0
    for token, margin in spelled:
        if not text.startswith(token, at):
            return margin <= 0.1
        at += len(token)
    return at == len(text)


async def spelled(client: Talk, prompt: str) -> list[tuple[str, float]]:
    """Answer a prompt with nobody in the way: each token's text, and how far it was above the next best."""
    begin = len(client.seen)
    await ask(client, [await client.create()], [prompt], **LONGER)
    sampled = [each for message in client.seen[begin:] for each in message.get("logprobs", ())]
    return [(each["token"], each["top"][0]["logprob"] - each["top"][1]["logprob"]) for each in sampled]


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "restart"])
async def test_the_daemon_is_gone_in_the_middle_of_an_answer(tmp_path: Path, demo_model_path: Path, stop: str) -> None:
    """The answer goes on by itself in the next daemon, and is what it would have been."""
    settings = SETTINGS | {"INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0.05"}
    with house(tmp_path / "state", demo_model_path, settings) as home:
        async with talk(home.daemon) as client:
            expected = await spelled(client, "Count from 5 to 19.")
            witness = await Witness.open(client)
            await witness.infer("Count from 5 to 19.", **{**LONGER, "n_probs": 0})
            while len(witness.turns) < 1 or len(witness.text) < 60:
                await client.receive()
            with stopped(home.daemon.engine_pid()):  # so that the answer is not over before the daemon is gone
                (home.daemon.process.kill if stop == "kill" else home.daemon.process.terminate)()
                await witness.drain()
            home.daemon.process.wait()
            home.start()
        assert witness.last.end is None
        async with talk(home.daemon) as client:
            await witness.resume(client)
            assert agrees(await witness.finish(), expected), witness.text
            assert witness.end["finish_reason"] == "length"
            await witness.described()


DRAWN: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 20,
    "min_p": 0.05,
    "seed": 11,
    "max_tokens": 600,
    "ignore_eos": True,
}


@pytest.mark.slow
async def test_the_rest_of_a_drawn_answer_is_what_it_would_have_been(tmp_path: Path, demo_model_path: Path) -> None:
    """The daemon is killed after any of its text: the next one draws the rest with the same numbers."""
    with house(tmp_path / "state", demo_model_path, SETTINGS) as home:
        async with talk(home.daemon) as client:
            whole = await (await Witness.open(client)).turn("Tell me a story.", **DRAWN)
            other = await (await Witness.open(client)).turn("Tell me a story.", **DRAWN | {"seed": 12})
        assert whole != other
        for least_chars in (1, len(whole) // 4):
            async with talk(home.daemon) as client:
                witness = await Witness.open(client)
                await witness.infer("Tell me a story.", **DRAWN)
                while not witness.turns or len(witness.text) < least_chars:
                    await client.receive()
                with stopped(home.daemon.engine_pid()):  # so that the answer is not over before the daemon is gone
                    home.daemon.process.kill()
                    await witness.drain()
                home.daemon.process.wait()
                home.start()
            assert witness.last.end is None
            async with talk(home.daemon) as client:
                await witness.resume(client)
                assert await witness.finish() == whole


@pytest.mark.slow
async def test_a_long_session_comes_from_disk(tmp_path: Path, demo_model_path: Path) -> None:
    """After a restart the first token of a session of a thousand tokens does not wait for them to be read."""
    with house(tmp_path / "state", demo_model_path, SETTINGS) as home:
        async with talk(home.daemon) as client:
            witness = await Witness.open(client)
            await witness.turn("My name is Ada. " + "The sea is blue and the sky is wide. " * 100, **GREEDY)
        home.restart()
        async with talk(home.daemon) as client:
            assert (await witness.resume(client))["resumed"] is True
            await witness.turn(ASKED, **GREEDY)
            stats = witness.end["stats"]
            assert stats["prompt_tokens"] > 1000
            assert stats["prompt_tokens"] - stats["cached_tokens"] < 100
            await witness.described()
