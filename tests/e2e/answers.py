"""Compares answers token by token: equal, or first different where two tokens were nearly equally likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.harness import SocketClient

NEAR = 0.1
"""Logits this close may swap places when the batch has another shape: sums are taken in another order."""


@dataclass(frozen=True)
class Answer:
    """A turn's tokens, and for each the margin of its logit over the runner-up's."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    def agrees_with(self, other: Answer) -> bool:
        """Whether both are equal, or first differ where the margin was small."""
        for mine, theirs, margin in zip(self.tokens, other.tokens, self.margins, strict=False):
            if mine != theirs:
                return margin <= NEAR
        return True


def answers_of(frames: list[dict[str, Any]]) -> dict[str, Answer]:
    """Return tokens and margins by session; differences of logprobs equal differences of logits."""
    tokens: dict[str, list[int]] = {}
    margins: dict[str, list[float]] = {}
    for frame in frames:
        for sampled in frame.get("logprobs", ()):
            first, second = sampled["top"]
            tokens.setdefault(frame["session_id"], []).append(sampled["token_id"])
            margins.setdefault(frame["session_id"], []).append(first["logprob"] - second["logprob"])
    return {session: Answer(tuple(tokens[session]), tuple(margins[session])) for session in tokens}


async def ask(client: SocketClient, sessions: Sequence[str], prompts: Sequence[str], **params: Any) -> list[Answer]:
    """Submit one prompt per session at once; ``params`` include ``n_probs`` of 2."""
    for session, prompt in zip(sessions, prompts, strict=True):
        await client.send(op="infer", session_id=session, prompt=prompt, params=params)
    frames: list[dict[str, Any]] = []
    while sum(frame["op"] == "end" for frame in frames) < len(sessions):
        frames.append(await client.receive())
        assert frames[-1]["op"] != "error", frames[-1]
    answers = answers_of(frames)
    return [answers[session] for session in sessions]
