"""Conversations and answers of the demo model survive kills of engine and daemon."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import Daemon, connect_client, run_daemon, start_daemon, stopped
from tests.e2e.recording_client import RecordingClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import SocketClient

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
STATEMENT = "My name is Ada. I live in Vienna."
QUESTION = "What is my name?"
PROMPTS = (
    "My name is Ada. I have a cat.",
    "Count from 5 to 19.",
    "What is the capital of Japan?",
    "Tell me a short story.",
    "What is 7 plus 8?",
    "Name four colors.",
    "Give me a JSON object with a name and an age.",
    "Hello, who are you?",
)
SETTINGS = {
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.1",
    "INFERENCECENTER_ENGINE__MAX_RESTARTS": "100",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
}
CROWDED = SETTINGS | {
    "INFERENCECENTER_ENGINE__SLOTS": "2",
    "INFERENCECENTER_KV__RAM_MIB": "0",
    "INFERENCECENTER_KV__CLIENT_SHARE": "1.0",
}
"""Two slots; KV without a slot is offloaded to disk only."""


class House:
    """A state directory and the daemon that runs on it."""

    def __init__(self, state_dir: Path, model: Path, settings: dict[str, str]) -> None:
        self._state_dir, self._model = state_dir, model
        self._settings = settings
        self.start()

    def start(self) -> None:
        """Start a daemon after the previous one has ended."""
        self.daemon = start_daemon(self._state_dir, self._model, **self._settings)
        self.daemon.wait_ready()

    def kill(self) -> None:
        """Kill the daemon and start another."""
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.start()

    def restart(self) -> None:
        """Stop the daemon with SIGTERM and start another."""
        assert self.daemon.stop() == 0
        self.start()

    def kill_engine(self) -> None:
        """Kill the engine."""
        os.kill(self.daemon.engine_pid(), signal.SIGKILL)


@contextlib.contextmanager
def house(state_dir: Path, model: Path, settings: dict[str, str]) -> Iterator[House]:
    """Run a daemon that is stopped at the end."""
    found = House(state_dir, model, settings)
    try:
        yield found
    finally:
        if found.daemon.process.poll() is None:
            found.daemon.stop()


async def fill_slots(client: SocketClient) -> None:
    """Run turns of other sessions until every earlier session has lost its slot."""
    for number in range(3):
        await ask(
            client,
            [await client.create() for _ in range(2)],
            [f"{number}: What is the capital of Japan?"] * 2,
            **GREEDY,
            n_probs=2,
        )


async def knows_the_name(recorder: RecordingClient) -> bool:
    """Ask for the name that the first turn stated."""
    return "Ada" in await recorder.turn(QUESTION, **GREEDY)


async def fork(recorder: RecordingClient, **request: Any) -> RecordingClient:
    """Fork the session."""
    created = await recorder.client.ask(op="fork_session", session_id=recorder.session_id, **request)
    assert created["parent"] == recorder.session_id
    forked = RecordingClient(recorder.client, created["session_id"], created["epoch"])
    recorder.client.listeners.append(forked.see)
    return forked


@pytest.mark.slow
async def test_session_survives_parking_fork_rewind_and_kills(tmp_path: Path, demo_model_path: Path) -> None:
    """A session and its fork remember a name through parking, rewind and kills of engine and daemon.

    Each time the session holds all that was received.
    """
    with house(tmp_path / "state", demo_model_path, CROWDED) as home:
        async with connect_client(home.daemon) as client:
            recorder = await RecordingClient.open(client)
            await recorder.turn(STATEMENT, **GREEDY)
            first = next(iter(recorder.turns))
            await fill_slots(client)
            assert await knows_the_name(recorder)
            assert recorder.end["stats"]["cached_tokens"] > 0, "its KV was not offloaded"
            forked = await fork(recorder)
            await fill_slots(client)
            assert await knows_the_name(forked)
            rewound = await client.ask(op="rewind_session", session_id=recorder.session_id, turn=first)
            assert rewound["op"] == "session_rewound"
            recorder.turns = {first: recorder.turns[first]}
            assert await knows_the_name(recorder)
            home.kill_engine()
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert await knows_the_name(forked)
            assert await knows_the_name(recorder)
        for end in (home.kill, home.restart, home.kill):
            end()
            async with connect_client(home.daemon) as client:
                for each in (recorder, forked):
                    assert (await each.resume(client))["resumed"] is (end == home.restart)
                    assert await knows_the_name(each)
                    assert await knows_the_name(await fork(each, turn=next(iter(each.turns))))
                    await each.described()
                await fill_slots(client)
                home.kill_engine()
                assert await knows_the_name(recorder)


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon whose engine a test may kill."""
    with run_daemon(tmp_path_factory.mktemp("undisturbed") / "state", demo_model_path, **SETTINGS) as running:
        yield running


LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 120, "n_probs": 2}
LONGER = LONG | {"max_tokens": 600}


async def answer_alone(client: SocketClient, *prompts: str, **params: Any) -> list[Answer]:
    """Answer each prompt in a session of its own, one after the other."""
    return [(await ask(client, [await client.create()], [prompt], **params))[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_engine_kill_under_eight_streams_loses_no_token(shared_daemon: Daemon, seed: int) -> None:
    """No token is lost or repeated, and each answer equals that of an uninterrupted run."""
    kill_at = random.Random(seed).randrange(8 * LONG["max_tokens"])
    async with connect_client(shared_daemon) as client:
        expected = await answer_alone(client, *PROMPTS, **LONG)
        recorders = [await RecordingClient.open(client) for _ in PROMPTS]
        begin = len(client.seen)
        for recorder, prompt in zip(recorders, PROMPTS, strict=True):
            params = {name: value for name, value in LONG.items() if name != "n_probs"}
            await recorder.infer(prompt, n_probs=2, **params)
        for _ in range(kill_at):
            await client.receive()
        assert not all(recorder.is_over for recorder in recorders)
        os.kill(shared_daemon.engine_pid(), signal.SIGKILL)
        for recorder in recorders:
            await recorder.finish()
        answers = answers_of(client.seen[begin:])
        for recorder, one in zip(recorders, expected, strict=True):
            assert recorder.end["usage"]["completion_tokens"] == LONG["max_tokens"]
            assert len(answers[recorder.session_id].tokens) == LONG["max_tokens"]
            assert one.agrees_with(answers[recorder.session_id])
            await recorder.described()
            await recorder.turn("What is 7 plus 8?", **GREEDY)


def agrees(text: str, answer_tokens: list[tuple[str, float]]) -> bool:
    """Whether the tokens spell a text, at least up to the first token with a small margin."""
    at = 0
    for token, margin in answer_tokens:
        if not text.startswith(token, at):
            return margin <= 0.1
        at += len(token)
    return at == len(text)


async def answer_tokens(client: SocketClient, prompt: str) -> list[tuple[str, float]]:
    """Answer a prompt alone; return each token's text and its margin over the next likely."""
    begin = len(client.seen)
    await ask(client, [await client.create()], [prompt], **LONGER)
    sampled = [each for message in client.seen[begin:] for each in message.get("logprobs", ())]
    return [(each["token"], each["top"][0]["logprob"] - each["top"][1]["logprob"]) for each in sampled]


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "restart"])
async def test_answer_resumes_in_the_next_daemon(tmp_path: Path, demo_model_path: Path, stop: str) -> None:
    """The next daemon completes the answer as an uninterrupted one would have."""
    settings = SETTINGS | {"INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0.05"}
    with house(tmp_path / "state", demo_model_path, settings) as home:
        async with connect_client(home.daemon) as client:
            expected = await answer_tokens(client, "Count from 5 to 19.")
            recorder = await RecordingClient.open(client)
            await recorder.infer("Count from 5 to 19.", **{**LONGER, "n_probs": 0})
            while len(recorder.turns) < 1 or len(recorder.text) < 60:
                await client.receive()
            with stopped(home.daemon.engine_pid()):  # the answer must not end before the daemon does
                (home.daemon.process.kill if stop == "kill" else home.daemon.process.terminate)()
                await recorder.drain()
            home.daemon.process.wait()
            home.start()
        assert recorder.last.end is None
        async with connect_client(home.daemon) as client:
            await recorder.resume(client)
            assert agrees(await recorder.finish(), expected), recorder.text
            assert recorder.end["finish_reason"] == "length"
            await recorder.described()


SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 20,
    "min_p": 0.05,
    "seed": 11,
    "max_tokens": 600,
    "ignore_eos": True,
}


@pytest.mark.slow
async def test_sampled_answer_resumes_with_the_same_random_numbers(tmp_path: Path, demo_model_path: Path) -> None:
    """After a kill the next daemon samples the following text as an uninterrupted one would have.

    A prefill rounds otherwise than decoding does, so sooner or later a draw lies so close to a border that it differs
    (decision 16): with this seed at character 1,310, and on a processor without AVX-512 at 1,176. So only the text that
    follows a kill is compared. The answer is long so that it has not ended when the daemon is killed.
    """
    n_after = 400
    with house(tmp_path / "state", demo_model_path, SETTINGS) as home:
        async with connect_client(home.daemon) as client:
            whole = await (await RecordingClient.open(client)).turn("Tell me a story.", **SAMPLED)
            other = await (await RecordingClient.open(client)).turn("Tell me a story.", **SAMPLED | {"seed": 12})
        assert whole[:n_after] != other[:n_after]
        for least_chars in (1, len(whole) // 4):
            async with connect_client(home.daemon) as client:
                recorder = await RecordingClient.open(client)
                await recorder.infer("Tell me a story.", **SAMPLED)
                while not recorder.turns or len(recorder.text) < least_chars:
                    await client.receive()
                with stopped(home.daemon.engine_pid()):  # the answer must not end before the daemon does
                    home.daemon.process.kill()
                    await recorder.drain()
                home.daemon.process.wait()
                home.start()
            assert recorder.last.end is None
            n_compared = len(recorder.text) + n_after
            async with connect_client(home.daemon) as client:
                await recorder.resume(client)
                text = await recorder.finish()
                assert len(text) > n_compared
                assert text[:n_compared] == whole[:n_compared]


@pytest.mark.slow
async def test_long_session_is_restored_from_disk(tmp_path: Path, demo_model_path: Path) -> None:
    """After a restart the KV of a session of a thousand tokens is read from disk, not prefilled again."""
    with house(tmp_path / "state", demo_model_path, SETTINGS) as home:
        async with connect_client(home.daemon) as client:
            recorder = await RecordingClient.open(client)
            await recorder.turn("My name is Ada. " + "The sea is blue and the sky is wide. " * 100, **GREEDY)
        home.restart()
        async with connect_client(home.daemon) as client:
            assert (await recorder.resume(client))["resumed"] is True
            await recorder.turn(QUESTION, **GREEDY)
            stats = recorder.end["stats"]
            assert stats["prompt_tokens"] > 1000
            assert stats["prompt_tokens"] - stats["cached_tokens"] < 100
            await recorder.described()
