"""Greedy answers do not depend on company or on kept KV, except where two tokens are nearly equally likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import talk

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon, Talk

NEAR = 0.1
"""Logits this close may swap places when the batch has another shape: sums are taken in another order."""

GREEDY = {"temperature": 0.0, "max_tokens": 48, "n_probs": 2}
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


@dataclass(frozen=True)
class Answer:
    """A turn's tokens, and for each how far its logit was above the runner-up's."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    def agrees_with(self, other: Answer) -> bool:
        """Equal, or first different where the choice was close."""
        for mine, theirs, margin in zip(self.tokens, other.tokens, self.margins, strict=False):
            if mine != theirs:
                return margin <= NEAR
        return True


def _answers(frames: list[dict[str, Any]]) -> dict[str, Answer]:
    """Tokens and margins by session. Logprobs differ by a constant from logits, so their differences are equal."""
    tokens: dict[str, list[int]] = {}
    margins: dict[str, list[float]] = {}
    for frame in frames:
        for sampled in frame.get("logprobs", ()):
            first, second = sampled["top"]
            tokens.setdefault(frame["session_id"], []).append(sampled["token_id"])
            margins.setdefault(frame["session_id"], []).append(first["logprob"] - second["logprob"])
    return {session: Answer(tuple(tokens[session]), tuple(margins[session])) for session in tokens}


async def _ask(client: Talk, sessions: list[str], prompts: tuple[str, ...]) -> list[Answer]:
    """Ask every session its prompt at once."""
    for session, prompt in zip(sessions, prompts, strict=True):
        await client.send(op="infer", session_id=session, prompt=prompt, params=GREEDY)
    frames: list[dict[str, Any]] = []
    while sum(frame["op"] == "end" for frame in frames) < len(sessions):
        frames.append(await client.receive())
        assert frames[-1]["op"] != "error", frames[-1]
    answers = _answers(frames)
    return [answers[session] for session in sessions]


async def _alone(client: Talk, *prompts: str) -> Answer:
    """The answer to the last of ``prompts`` in a session of its own, with nobody else generating."""
    session = await client.create()
    for prompt in prompts:
        (answer,) = await _ask(client, [session], (prompt,))
    await client.ask(op="close_session", session_id=session)
    return answer


async def test_alone_and_in_a_batch_of_eight(daemon: Daemon) -> None:
    """Eight prompts asked at once are answered as each is alone."""
    async with talk(daemon) as client:
        alone = [await _alone(client, prompt) for prompt in PROMPTS]
        together = await _ask(client, [await client.create() for _ in PROMPTS], PROMPTS)
    for prompt, one, eight in zip(PROMPTS, alone, together, strict=True):
        assert one.tokens, f"no tokens for {prompt!r}"
        assert one.agrees_with(eight), f"{prompt!r}: {one} alone, {eight} in a batch"


@pytest.mark.parametrize("question", ["What is my name?", "What is 3 plus 9?"])
async def test_kept_kv_and_a_recomputed_history(daemon: Daemon, question: str) -> None:
    """A second turn on kept KV answers as one whose slot was taken by others in between."""
    first = "My name is Clara. I live in Vienna."
    async with talk(daemon) as client:
        kept = await _alone(client, first, question)
        session = await client.create()
        await _ask(client, [session], (first,))
        others = [await client.create() for _ in range(8)]
        await _ask(client, others, PROMPTS)
        await client.send(op="infer", session_id=session, prompt=question, params=GREEDY)
        frames = [await client.receive()]
        while frames[-1]["op"] != "end":
            frames.append(await client.receive())
    assert frames[-1]["stats"]["cached_tokens"] == 0, "the session kept its slot, so nothing was compared"
    assert kept.agrees_with(_answers(frames)[session])
