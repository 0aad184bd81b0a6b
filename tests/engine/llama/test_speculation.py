"""Drafts on llama.cpp: the same answer, fewer steps, and KV as long as the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.engine.scheduler.state import EngineRequest
from inferencecenter.engine.speculation import DraftPlanner
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import Params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.engine.backend import Sampled, TurnSampler
    from inferencecenter.ipc.engine_options import EngineOptions

NEAR = 0.1
"""Logits this close may swap places when the batch has another shape."""
N_TOKENS = 180


@pytest.fixture(scope="module")
def backend(options: EngineOptions) -> Iterator[LlamaBackend]:
    """The demo model with three slots, told that there will be drafts."""
    lookup = options.replace(slots=3, speculative="lookup", draft_tokens=8)
    backend = LlamaBackend.load(lookup, on_progress=lambda _fraction: None, on_log=lambda _level, _line: None)
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def _empty_slots(backend: LlamaBackend) -> None:
    for slot in range(backend.model.slots):
        backend.truncate(slot, 0)


@dataclass
class Turn:
    """A turn that generates in a slot; ``margins`` are how far each token was above the runner-up."""

    request: EngineRequest
    sampler: TurnSampler
    margins: list[float] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """What it said."""
        return self.request.tokens[self.request.prompt_tokens :]

    def take(self, sampled: Sampled) -> None:
        """Note a token."""
        assert sampled.logprobs is not None
        first, second = sampled.logprobs.top
        self.margins.append(first.logprob - second.logprob)
        self.request.tokens.append(sampled.token)


def begin(backend: LlamaBackend, slot: int, text: str) -> Turn:
    """Read a prompt and sample the first token of its greedy answer."""
    pieces = [
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    ]
    tokens = backend.tokenize(pieces, first=True)
    request = EngineRequest(
        turn_id=text,
        session_id=text,
        client_id="c",
        priority=1,
        arrival=slot,
        submitted_s=0.0,
        tokens=tokens,
    )
    request.slot, request.kv_tokens = slot, len(tokens)
    turn = Turn(request, backend.sampler(Params(temperature=0, n_probs=2, ignore_eos=True), tokens))
    backend.decode([Chunk(slot, 0, tuple(tokens), sample=True)])
    turn.take(turn.sampler.sample(0))
    return turn


def generate(backend: LlamaBackend, texts: Sequence[str], *, draft_tokens: int) -> tuple[list[Turn], int]:
    """Answer several prompts at once as the scheduler and the executor do; return the turns and the steps it took."""
    turns = [begin(backend, slot, text) for slot, text in enumerate(texts)]
    drafting = DraftPlanner(draft_tokens=draft_tokens, n_ctx=backend.model.n_ctx, pass_tokens=64)
    steps = 0
    while min(len(turn.answer) for turn in turns) < N_TOKENS:
        steps += 1
        drafts = drafting.drafts([turn.request for turn in turns])
        step(backend, turns, [drafts.get(turn.request.turn_id, []) for turn in turns])
    for turn in turns:
        turn.sampler.close()
    return turns, steps


def step(backend: LlamaBackend, turns: Sequence[Turn], drafts: Sequence[list[int]]) -> None:
    """Decode the turns' last tokens with their drafts, sample, and cut off what was wrong."""
    chunks = [
        Chunk(slot, turn.request.kv_tokens, [turn.request.tokens[-1], *guessed], sample=True, drafts=len(guessed))
        for slot, (turn, guessed) in enumerate(zip(turns, drafts, strict=True))
    ]
    backend.decode(chunks)
    first = 0
    for chunk, turn, guessed in zip(chunks, turns, drafts, strict=True):
        accepted = 0
        turn.take(turn.sampler.sample(first))
        while accepted < len(guessed) and turn.request.tokens[-1] == guessed[accepted]:
            accepted += 1
            turn.take(turn.sampler.sample(first + accepted))
        first += chunk.n_sampled
        turn.request.kv_tokens += 1 + accepted
        assert turn.request.kv_tokens == len(turn.request.tokens) - 1
        assert backend.truncate(chunk.slot, turn.request.kv_tokens)
        if turn.request.drafter is not None:
            turn.request.drafter.observe(accepted, n_tokens=len(turn.request.tokens))


def agrees(mine: Turn, theirs: Turn) -> bool:
    """Equal, or first different where the choice was close."""
    for token, other, margin in zip(mine.answer, theirs.answer, mine.margins, strict=False):
        if token != other:
            return margin <= NEAR
    return True


JSON = "Give me a JSON object with a name and an age."
SUM = "What is 7 plus 8?"


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ((JSON,), 0.3),
        ((SUM,), 0.4),
        (("Tell me a long story.",), 1.0),
        (("Count from 1 to 100.",), 1.0),
        ((JSON, SUM), 0.4),
        ((SUM, "Name four colours.", "Tell me a short story."), 1.0),
        ((JSON, "Count to 50.", SUM), 1.0),
    ],
    ids=str,
)
def test_greedy_answers_are_the_same_with_drafts(backend: LlamaBackend, texts: tuple[str, ...], share: float) -> None:
    """Up to a choice between tokens that are nearly equally likely; text that repeats itself takes fewer steps."""
    plain, plain_steps = generate(backend, texts, draft_tokens=0)
    for slot in range(backend.model.slots):
        backend.truncate(slot, 0)
    drafted, steps = generate(backend, texts, draft_tokens=8)
    assert all(agrees(mine, theirs) for mine, theirs in zip(plain, drafted, strict=True))
    assert plain_steps == N_TOKENS - 1
    assert steps <= share * plain_steps


def test_rejected_drafts_leave_no_state(backend: LlamaBackend) -> None:
    """The KV behind a rejected draft saves to the same bytes as one that never had it, but for rounding."""
    turn = begin(backend, 0, "Name four colours.")
    state = bytearray(backend.state_bytes(0))
    assert backend.save(0, memoryview(state))
    step(backend, [turn], [[5, 6, 7]])
    assert len(turn.answer) == 2
    assert backend.truncate(0, turn.request.kv_tokens - 1)
    again = bytearray(backend.state_bytes(0))
    assert backend.save(0, memoryview(again))
    assert again == state
    turn.sampler.close()


def test_as_many_logits_as_the_drafts_of_all_slots_need(backend: LlamaBackend) -> None:
    """Each of three slots has its token, and sixteen drafts are shared between them."""
    turns = [begin(backend, slot, text) for slot, text in enumerate(("one", "two", "three"))]
    step(backend, turns, [[1] * 8, [2] * 7, [3]])
    assert all(turn.request.kv_tokens >= turn.request.prompt_tokens + 1 for turn in turns)
    for turn in turns:
        turn.sampler.close()
