"""A draft model does not change answers: it saves steps, whatever happens to turns, slots and engines.

The model is the demo model with more layers that change nothing, and the demo model drafts for it: it is right about
nearly every token, and small.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import Answer, answers_of, ask
from tests.e2e.harness import connect_client, run_daemon
from tests.engine.llama.draft_files import write_variant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "n_probs": 2, "ignore_eos": True}
PROMPTS = ("Give me a JSON object with a name and an age.", "Tell me a short story.")
SMALL = {
    "INFERENCECENTER_ENGINE__SLOTS": "1",
    "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "16",
    "INFERENCECENTER_ENGINE__N_CTX": "256",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
}


@pytest.fixture(scope="module")
def deep_model_path(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """The demo model with 24 more layers that change nothing."""
    return write_variant(tmp_path_factory.mktemp("deep") / "deep.gguf", demo_model_path, layers=30)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, deep_model_path: Path) -> Iterator[Daemon]:
    """A daemon with one slot and short quanta."""
    with run_daemon(tmp_path_factory.mktemp("plain") / "state", deep_model_path, **SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def drafting(
    tmp_path_factory: pytest.TempPathFactory, deep_model_path: Path, demo_model_path: Path
) -> Iterator[Daemon]:
    """The same with a draft model."""
    settings = SMALL | {"INFERENCECENTER_ENGINE__DRAFT": str(demo_model_path)}
    with run_daemon(tmp_path_factory.mktemp("drafting") / "state", deep_model_path, **settings) as running:
        yield running


async def _answers(daemon: Daemon, *prompts: str) -> list[Answer]:
    async with connect_client(daemon) as client:
        return await ask(client, [await client.create() for _ in prompts], prompts, **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [*((prompt,) for prompt in PROMPTS), PROMPTS])
async def test_draft_model_keeps_greedy_answers(plain: Daemon, drafting: Daemon, prompts: tuple[str, ...]) -> None:
    """A turn alone, and two turns that share the only slot, give the answers without drafts, mostly from drafts."""
    before = drafting.metric("accepted_tokens_total")
    ours, theirs = await _answers(drafting, *prompts), await _answers(plain, *prompts)
    assert [len(answer.tokens) for answer in ours] == [GREEDY["max_tokens"]] * len(prompts)
    for prompt, one, other in zip(prompts, theirs, ours, strict=True):
        assert one.agrees_with(other), f"{prompt!r}: {one} without drafts, {other} with them"
    assert drafting.metric("accepted_tokens_total") - before > GREEDY["max_tokens"] / 2 * len(prompts)


async def test_draft_model_keeps_seeded_answers(plain: Daemon, drafting: Daemon) -> None:
    """The turn's own sampler draws each token."""
    params = {"temperature": 0.8, "max_tokens": 80}
    for seed in range(3):
        texts = []
        for daemon in (plain, drafting):
            async with connect_client(daemon) as client:
                texts.append((await client.turn(await client.create(), "Count from 1 to 20.", seed=seed, **params))[0])
        assert texts[0] == texts[1]


async def test_turns_after_an_abort_draft_on(plain: Daemon, drafting: Daemon) -> None:
    """An aborted answer leaves the session, and the draft model, as without drafts."""
    texts = []
    for daemon in (plain, drafting):
        async with connect_client(daemon) as client:
            session = await client.create()
            _, first = await client.turn(session, "My name is Ada.", temperature=0.0)
            await client.send(op="infer", session_id=session, prompt="Count.", params=GREEDY | {"max_tokens": 5000})
            await client.until(lambda message: message["op"] == "token")
            await client.send(op="abort", session_id=session)
            await client.until(lambda message: message["op"] in ("end", "error"))
            await client.ask(op="rewind_session", session_id=session, turn=first["turn_id"])
            texts.append((await client.turn(session, "What is my name?", temperature=0.0, max_tokens=20))[0])
    assert "Ada" in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.slow
async def test_draft_model_follows_a_context_shift(plain: Daemon, drafting: Daemon) -> None:
    """The oldest turns are dropped within an answer, which continues the same."""
    told = []
    for daemon in (plain, drafting):
        async with connect_client(daemon) as client:
            session = await client.create()
            for prompt in ("My name is Ada.", "I have a cat.", "What is 7 plus 8?"):
                await client.turn(session, prompt, temperature=0.0, max_tokens=30)
            (answer,) = await ask(client, [session], ["Count from 1 to 100."], **GREEDY | {"max_tokens": 180})
            shifts = [message for message in client.seen if message["op"] == "context_shifted"]
            assert shifts
            told.append(answer)
    assert len(told[0].tokens) == len(told[1].tokens) == 180
    assert told[0].agrees_with(told[1])


@pytest.mark.slow
async def test_new_engine_loads_the_draft_model_too(plain: Daemon, drafting: Daemon) -> None:
    """An answer that is interrupted by a crash continues the same, with drafts."""
    (expected,) = await _answers(plain, PROMPTS[1])
    async with connect_client(drafting) as client:
        session = await client.create()
        await client.send(op="infer", session_id=session, prompt=PROMPTS[1], params=GREEDY)
        await client.until(lambda message: message["op"] == "token")
        os.kill(drafting.engine_pid(), signal.SIGKILL)
        await client.until(lambda message: message["op"] == "end")
        assert answers_of(client.seen)[session].agrees_with(expected)
    before = drafting.metric("accepted_tokens_total")
    await _answers(drafting, PROMPTS[0])
    assert drafting.metric("accepted_tokens_total") > before
