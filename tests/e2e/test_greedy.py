"""Greedy answers do not depend on batching or on reused KV, except where two tokens are nearly equally likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon, SocketClient

GREEDY = {"temperature": 0.0, "max_tokens": 48, "n_probs": 2}
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


async def _alone(client: SocketClient, *prompts: str) -> Answer:
    """Return the answer to the last of ``prompts`` in a session of its own, with no other turn running."""
    session = await client.create()
    for prompt in prompts:
        (answer,) = await ask(client, [session], (prompt,), **GREEDY)
    await client.ask(op="close_session", session_id=session)
    return answer


async def test_batched_answers_equal_single_ones(daemon: Daemon) -> None:
    """Eight prompts answered concurrently get the answers they get alone."""
    async with connect_client(daemon) as client:
        alone = [await _alone(client, prompt) for prompt in PROMPTS]
        together = await ask(client, [await client.create() for _ in PROMPTS], PROMPTS, **GREEDY)
    for prompt, one, eight in zip(PROMPTS, alone, together, strict=True):
        assert one.tokens, f"no tokens for {prompt!r}"
        assert one.agrees_with(eight), f"{prompt!r}: {one} alone, {eight} in a batch"


@pytest.fixture(scope="module")
def daemon_without_offload(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon that offloads no KV: a session that lost its slot is prefilled again."""
    state_dir = tmp_path_factory.mktemp("forgetful") / "state"
    with run_daemon(state_dir, demo_model_path, INFERENCECENTER_KV__PARKING="false") as running:
        yield running


@pytest.mark.parametrize("question", ["What is my name?", "What is 3 plus 9?"])
async def test_reused_and_recomputed_kv_give_equal_answers(daemon_without_offload: Daemon, question: str) -> None:
    """A second turn on reused KV equals one on KV that was recomputed."""
    first = "My name is Clara. I live in Vienna."
    async with connect_client(daemon_without_offload) as client:
        kept = await _alone(client, first, question)
        session = await client.create()
        await ask(client, [session], (first,), **GREEDY)
        others = [await client.create() for _ in range(8)]
        await ask(client, others, PROMPTS, **GREEDY)
        await client.send(op="infer", session_id=session, prompt=question, params=GREEDY)
        frames = [await client.receive()]
        while frames[-1]["op"] != "end":
            frames.append(await client.receive())
    assert frames[-1]["stats"]["cached_tokens"] == 0, "the session kept its slot, so nothing was compared"
    assert kept.agrees_with(answers_of(frames)[session])
