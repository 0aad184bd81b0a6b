"""Conversations longer than the context, on the real model."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import ENDLESS, Daemon, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import SocketClient

N_CTX = 256
GREEDY = {"temperature": 0.0, "max_tokens": 60}
SYSTEM = "You are Nova, a helpful assistant."
CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Vienna", "Madrid", "Tokyo", "Rome")
FILLERS = (
    "Count from 3 to 7.",
    "What is the capital of France?",
    "What is 4 plus 5?",
    "Count from 1 to 12.",
    "What is the capital of Italy?",
)


@pytest.fixture(scope="module")
def small_context(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon with contexts of 256 tokens and two slots."""
    settings = {"INFERENCECENTER_ENGINE__N_CTX": str(N_CTX), "INFERENCECENTER_ENGINE__SLOTS": "2"}
    with run_daemon(tmp_path_factory.mktemp("small") / "state", demo_model_path, **settings) as running:
        yield running


def shifts(client: SocketClient, session: str) -> list[dict[str, Any]]:
    """Return the session's context shift events so far."""
    return [m for m in client.seen if m["op"] == "context_shifted" and m["session_id"] == session]


@pytest.mark.slow
async def test_system_prompt_and_latest_facts_survive_context_shifts(small_context: Daemon) -> None:
    """Context shifts drop the oldest turns and keep the system prompt and the latest facts."""
    async with connect_client(small_context) as client:
        session = await client.create(system=SYSTEM)
        said, fillers = 0, itertools.cycle(FILLERS)
        for city in itertools.cycle(CITIES):
            for prompt, expected in (
                (f"I live in {city}.", None),
                (next(fillers), None),
                ("Where do I live?", city),
                (next(fillers), None),
                ("What is your name?", "Nova"),
            ):
                text, end = await client.turn(session, prompt, **GREEDY)
                said += len(prompt) + len(text)
                assert end["finish_reason"] == "stop", (prompt, end)
                assert expected is None or expected in text, (prompt, text)
            kept = await client.ask(op="get_session", session_id=session)
            dropped = sum(shift["dropped_turns"] for shift in shifts(client, session))
            assert kept["dropped_messages"] == 2 * dropped
            assert kept["n_tokens"] <= N_CTX
            if sum(shift["tokens"] for shift in shifts(client, session)) + kept["n_tokens"] > 3 * N_CTX:
                break
    assert len(shifts(client, session)) >= 3
    assert len(kept["transcript"]) == 1 + 2 * len(kept["turns"]), "the transcript lost messages"
    assert sum(len(message["content"]) for message in kept["transcript"]) == len(SYSTEM) + said


async def test_context_shift_during_an_answer(small_context: Daemon) -> None:
    """A count that fills the context loses and repeats no number."""
    async with connect_client(small_context) as client:
        session = await client.create(system=SYSTEM)
        n_tokens = 0
        for prompt in itertools.cycle(FILLERS):
            _, end = await client.turn(session, prompt, **GREEDY)
            n_tokens = end["stats"]["prompt_tokens"] + end["stats"]["tokens"]
            if n_tokens > N_CTX - 70:
                break
        text, end = await client.turn(session, "Count from 1 to 30.", temperature=0.0)
        assert n_tokens + end["stats"]["tokens"] > N_CTX - 10, "the context was not filled"
        assert shifts(client, session)
        assert [int(number) for number in text.rstrip(".").split(", ")] == list(range(1, 31))
        text, _ = await client.turn(session, "What is your name?", **GREEDY)
    assert "Nova" in text


async def test_first_answer_that_fills_the_context_ends(small_context: Daemon) -> None:
    """With no turn to drop the answer ends as without shifting, and the transcript is complete."""
    async with connect_client(small_context) as client:
        for on_full in ("shift", "stop"):
            session = await client.create(system=SYSTEM, on_full=on_full)
            text, end = await client.turn(session, "Count from 1 to 100.", **ENDLESS)
            assert end["finish_reason"] == "context_full"
            assert end["stats"]["prompt_tokens"] + end["stats"]["tokens"] == N_CTX
            transcript = (await client.ask(op="get_session", session_id=session))["transcript"]
            assert transcript[-1]["content"] == text
        assert not [message for message in client.seen if message["op"] == "context_shifted"]


async def test_raw_text_shifts_too(small_context: Daemon) -> None:
    """Without a template the oldest prompts are dropped likewise."""
    async with connect_client(small_context) as client:
        session = await client.create(mode="raw", on_full="shift")
        for number in range(12):
            _, end = await client.turn(session, f"\nThe number {number} stands here.", **{**GREEDY, **ENDLESS})
            assert end["finish_reason"] == "length"
        assert shifts(client, session)
