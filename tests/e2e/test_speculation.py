"""Speculative decoding does not change answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.answers import Answer, ask
from tests.e2e.harness import connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 150, "n_probs": 2, "ignore_eos": True}
PROMPTS = (
    "Give me a JSON object with a name and an age.",
    "What is 7 plus 8?",
    "My name is Ada. I have a cat.",
    "Tell me a short story.",
)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon that drafts."""
    state_dir = tmp_path_factory.mktemp("drafting") / "state"
    with run_daemon(state_dir, demo_model_path, INFERENCECENTER_ENGINE__SPECULATIVE="lookup") as running:
        yield running


async def _answers(daemon: Daemon, *prompts: str) -> list[Answer]:
    async with connect_client(daemon) as client:
        return await ask(client, [await client.create() for _ in prompts], prompts, **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [*((prompt,) for prompt in PROMPTS), PROMPTS])
async def test_speculation_keeps_greedy_answers(daemon: Daemon, drafting: Daemon, prompts: tuple[str, ...]) -> None:
    """Answers equal those without drafting, alone and batched, with logprobs for every token."""
    plain, drafted = await _answers(daemon, *prompts), await _answers(drafting, *prompts)
    assert [len(answer.tokens) for answer in drafted] == [GREEDY["max_tokens"]] * len(prompts)
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        assert one.agrees_with(other), f"{prompt!r}: {one} without drafts, {other} with them"


@pytest.mark.parametrize("stop", ["age", '"}', "I"])
async def test_stop_string_ends_drafted_text(daemon: Daemon, drafting: Daemon, stop: str) -> None:
    """A stop string among drafted tokens leaves the same text, counts and KV as without drafting."""
    params = {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True, "stop": [stop]}
    told = []
    for each in (daemon, drafting):
        async with connect_client(each) as client:
            session = await client.create()
            text, end = await client.turn(session, PROMPTS[0], **params)
            again, after = await client.turn(session, "What is 3 plus 9?", temperature=0.0, max_tokens=20)
        told.append((text, end["finish_reason"], end["stats"]["tokens"], again, after["stats"]["cached_tokens"]))
    assert told[0] == told[1]


async def drafted_frames(drafting: Daemon) -> int:
    """Return the number of frames of a repetitive answer, after a check that every count is of tokens."""
    async with connect_client(drafting) as client:
        session = await client.create()
        _, end = await client.turn(session, PROMPTS[0], **GREEDY)
        frames = [frame for frame in client.seen if frame["op"] == "token"]
    assert end["stats"]["tokens"] == GREEDY["max_tokens"]
    assert sum(len(frame["logprobs"]) for frame in frames) == GREEDY["max_tokens"]
    return len(frames)


async def test_accepted_drafts_share_a_frame(drafting: Daemon) -> None:
    """Repetitive text takes fewer frames than tokens, and every count is of tokens."""
    assert await drafted_frames(drafting) < GREEDY["max_tokens"] / 2
