"""Drafts on llama.cpp: the same answer in fewer steps, and KV of the same length."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, DecodeError, DraftRequest
from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.engine.llama.draft_model import check_draft_model
from inferencecenter.engine.scheduler.speculation import DraftPlanner
from inferencecenter.engine.scheduler.state import EngineRequest
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import Params
from tests.engine.llama.draft_files import write_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from inferencecenter.engine.backend import DraftModel, Sampled, TurnSampler
    from inferencecenter.engine.llama.draft_model import LlamaDraftModel
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse
    from tests.engine.llama.conftest import Loaded

NEAR = 0.1
"""Logits this close may swap places when the batch has another shape."""
N_TOKENS = 180


@pytest.fixture(scope="module")
def backend(options: EngineOptions) -> Iterator[LlamaBackend]:
    """The demo model with three slots, prepared for drafts."""
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
    """A turn that decodes in a slot; ``margins`` are the distances of its tokens to the runner-up."""

    request: EngineRequest
    sampler: TurnSampler
    margins: list[float] = field(default_factory=list)

    @property
    def slot(self) -> int:
        """Its slot."""
        assert self.request.slot is not None
        return self.request.slot

    @property
    def answer(self) -> list[int]:
        """Its answer."""
        return self.request.tokens[self.request.prompt_tokens :]

    def take(self, sampled: Sampled) -> None:
        """Record a token."""
        assert sampled.logprobs is not None
        first, second = sampled.logprobs.top
        self.margins.append(first.logprob - second.logprob)
        self.request.tokens.append(sampled.token)


def begin(backend: LlamaBackend, slot: int, text: str) -> Turn:
    """Prefill a prompt and sample the first token of its greedy answer."""
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


def generate(
    backend: LlamaBackend, texts: Sequence[str], *, draft_tokens: int, model: DraftModel | None = None
) -> tuple[list[Turn], int]:
    """Answer several prompts as scheduler and executor do; return the turns and the number of steps."""
    turns = [begin(backend, slot, text) for slot, text in enumerate(texts)]
    drafting = DraftPlanner(
        draft_tokens=draft_tokens,
        n_ctx=backend.model.n_ctx,
        pass_tokens=64,
        lookup=model is None,
        draft_cost=None if model is None else 0.02,
    )
    steps = 0
    while running := [turn for turn in turns if len(turn.answer) < N_TOKENS]:
        steps += 1
        drafts = drafting.drafts([turn.request for turn in running])
        tokens = {**drafts.tokens}
        if model is not None:
            tokens |= zip(drafts.requests, model.draft([*drafts.requests.values()]), strict=True)
        step(backend, running, [tokens.get(turn.request.turn_id, []) for turn in running])
    for turn in turns:
        turn.sampler.close()
    return turns, steps


def step(backend: LlamaBackend, turns: Sequence[Turn], drafts: Sequence[list[int]]) -> None:
    """Decode the turns' last tokens with their drafts, sample, and truncate rejected ones."""
    chunks = [
        Chunk(turn.slot, turn.request.kv_tokens, [turn.request.tokens[-1], *guessed], sample=True, drafts=len(guessed))
        for turn, guessed in zip(turns, drafts, strict=True)
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
        if guessed and turn.request.drafter is not None:
            turn.request.drafter.observe(accepted, n_tokens=len(turn.request.tokens))


def agrees(mine: Turn, theirs: Turn) -> bool:
    """Return whether both are equal, or first differ where the margin was small."""
    for token, other, margin in zip(mine.answer, theirs.answer, mine.margins, strict=False):
        if token != other:
            return margin <= NEAR
    return True


Plain: TypeAlias = "Callable[[tuple[str, ...]], tuple[list[Turn], int]]"


@pytest.fixture(scope="module")
def generate_plainly(backend: LlamaBackend) -> Plain:
    """Answer prompts without drafts, once for all tests with the same prompts."""

    @cache
    def generate_once(texts: tuple[str, ...]) -> tuple[list[Turn], int]:
        generated = generate(backend, texts, draft_tokens=0)
        for slot in range(backend.model.slots):
            backend.truncate(slot, 0)
        return generated

    return generate_once


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
        ((SUM, "Name four colors.", "Tell me a short story."), 1.0),
        ((JSON, "Count to 50.", SUM), 1.0),
    ],
    ids=str,
)
def test_greedy_answers_are_the_same_with_drafts(
    backend: LlamaBackend, generate_plainly: Plain, texts: tuple[str, ...], share: float
) -> None:
    """They may differ between nearly equally likely tokens; repetitive text takes fewer steps."""
    plain, plain_steps = generate_plainly(texts)
    drafted, steps = generate(backend, texts, draft_tokens=8)
    assert all(agrees(mine, theirs) for mine, theirs in zip(plain, drafted, strict=True))
    assert plain_steps == N_TOKENS - 1
    assert steps <= share * plain_steps


def test_rejected_drafts_leave_no_state(backend: LlamaBackend) -> None:
    """The KV after a rejected draft saves to the same bytes as without it, up to rounding."""
    turn = begin(backend, 0, "Name four colors.")
    state = bytearray(backend.state_bytes(0))
    assert backend.save(0, memoryview(state))
    step(backend, [turn], [[5, 6, 7]])
    assert len(turn.answer) == 2
    assert backend.truncate(0, turn.request.kv_tokens - 1)
    again = bytearray(backend.state_bytes(0))
    assert backend.save(0, memoryview(again))
    assert again == state
    turn.sampler.close()


def test_batch_has_logits_for_the_drafts_of_all_slots(backend: LlamaBackend) -> None:
    """Each of three slots has its token, and sixteen drafts are shared between them."""
    turns = [begin(backend, slot, text) for slot, text in enumerate(("one", "two", "three"))]
    step(backend, turns, [[1] * 8, [2] * 7, [3]])
    assert all(turn.request.kv_tokens >= turn.request.prompt_tokens + 1 for turn in turns)
    for turn in turns:
        turn.sampler.close()


Drafting: TypeAlias = "Callable[[Path], tuple[LlamaBackend, LlamaDraftModel]]"


@pytest.fixture
def drafting(options: EngineOptions) -> Iterator[Drafting]:
    """Load the demo model with three slots and a draft model."""
    loaded: list[LlamaBackend] = []

    def load(path: Path) -> tuple[LlamaBackend, LlamaDraftModel]:
        wanted = options.replace(slots=3, n_ctx=512, draft_path=str(path), draft_tokens=8)
        backend = LlamaBackend.load(wanted, on_progress=lambda _fraction: None, on_log=lambda _level, _line: None)
        loaded.append(backend)
        assert backend.draft_model is not None
        return backend, backend.draft_model

    yield load
    for backend in loaded:
        backend.close()


@pytest.mark.parametrize("texts", [("Tell me a long story.",), (JSON, "Count to 50.", SUM)], ids=str)
def test_greedy_answers_are_the_same_with_a_perfect_draft_model(
    drafting: Drafting, generate_plainly: Plain, demo_model_path: Path, texts: tuple[str, ...]
) -> None:
    """The model as its own draft model: nearly every draft is accepted."""
    backend, model = drafting(demo_model_path)
    plain, plain_steps = generate_plainly(texts)
    drafted, steps = generate(backend, texts, draft_tokens=8, model=model)
    assert all(agrees(mine, theirs) for mine, theirs in zip(plain, drafted, strict=True))
    assert steps < plain_steps * (0.25 if len(texts) == 1 else 0.5)


@pytest.mark.parametrize("texts", [("Tell me a long story.",), (JSON, "Count to 50.", SUM)], ids=str)
def test_greedy_answers_are_the_same_with_a_useless_draft_model(
    drafting: Drafting, generate_plainly: Plain, demo_model_path: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    """Random weights: drafts are rejected, and soon none are made."""
    backend, model = drafting(write_variant(tmp_path / "random.gguf", demo_model_path, layers=2, random=True))
    plain, plain_steps = generate_plainly(texts)
    drafted, steps = generate(backend, texts, draft_tokens=8, model=model)
    assert all(agrees(mine, theirs) for mine, theirs in zip(plain, drafted, strict=True))
    assert steps >= plain_steps - 3


def test_draft_model_drafts_no_end_token(drafting: Drafting, demo_model_path: Path) -> None:
    """An end token would end the turn."""
    backend, model = drafting(demo_model_path)
    text = backend.tokenize([PromptSegment("<|im_start|>assistant\nParis.", special=True)], first=True)
    (drafts,) = model.draft([DraftRequest(0, text, 8, "c")])
    assert not any(map(backend.is_end, drafts))


def test_draft_slot_follows_its_turn(drafting: Drafting, demo_model_path: Path) -> None:
    """After other or fewer tokens, and after another turn, its drafts equal those in an empty slot."""
    backend, model = drafting(demo_model_path)
    one = backend.tokenize([PromptSegment("Count from 1 to 100. One, two, three,")], first=True)
    other = backend.tokenize([PromptSegment("My name is Ada. What is my name?")], first=True)
    for tokens in (one, one[:-4], [*one, *other], other, one):
        (used,) = model.draft([DraftRequest(0, tokens, 4, "c")])
        (fresh,) = drafting(demo_model_path)[1].draft([DraftRequest(2, tokens, 4, "c")])
        assert used == fresh
        assert len(used) == 4


def test_draft_model_prefills_a_long_text_in_parts(drafting: Drafting, demo_model_path: Path) -> None:
    """It drafts nothing meanwhile, and does not delay a turn whose text is in its KV."""
    backend, model = drafting(demo_model_path)
    short = backend.tokenize([PromptSegment("Count to ten.")], first=True)
    text = [*short * 40][:200]
    assert [len(each) for each in model.draft([DraftRequest(0, short, 3, "c")])] == [3]
    both = [DraftRequest(0, short, 3, "c"), DraftRequest(1, text, 3, "c")]
    assert [len(each) for each in model.draft(both)] == [3, 0]
    assert [len(each) for each in model.draft(both)] == [3, 3]


def test_draft_model_shares_no_prefix_between_clients(drafting: Drafting, demo_model_path: Path) -> None:
    """Its speed does not reveal the prefix of another client's text."""
    backend, model = drafting(demo_model_path)
    text = [*backend.tokenize([PromptSegment("Count to ten.")], first=True) * 40][:200]
    drafts = [model.draft([DraftRequest(0, text, 3, client)]) for client in ("a", "a", "b", "b")]
    assert [len(each) for (each,) in drafts] == [0, 3, 0, 3]


def test_failed_draft_decode_drafts_nothing(
    drafting: Drafting, demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn continues without drafts, and the next time its text is prefilled again."""
    backend, model = drafting(demo_model_path)
    tokens = backend.tokenize([PromptSegment("Count to ten.")], first=True)
    (before,) = model.draft([DraftRequest(0, tokens, 4, "c")])

    def fail(_chunks: Sequence[Chunk]) -> None:
        model._context.truncate(0, 0)
        raise DecodeError((0,), "planned")

    with monkeypatch.context() as patched:
        patched.setattr(model._context, "decode", fail)
        assert model.draft([DraftRequest(0, tokens, 4, "c")]) == [[]]
    assert model.draft([DraftRequest(0, tokens, 4, "c")]) == [before]


def test_draft_model_of_another_vocabulary_is_refused(
    drafting: Drafting, demo_model_path: Path, window_model_path: Path, tmp_path: Path
) -> None:
    """The error names both models and the difference."""
    renamed = write_variant(tmp_path / "renamed.gguf", demo_model_path, layers=1, renamed=700)
    for path, difference in ((renamed, "token 700 is"), (window_model_path, "tokens instead of 1536")):
        with pytest.raises(InferenceCenterError) as caught:
            drafting(path)
        assert caught.value.code is ErrorCode.INVALID_CONFIG
        assert caught.value.message.startswith(f"{path} cannot draft for {demo_model_path}: its vocabulary is another")
        assert difference in caught.value.message


def test_draft_model_must_support_truncation(hybrid: Loaded) -> None:
    """A recurrent layer cannot remove a rejected draft."""
    with pytest.raises(InferenceCenterError, match="cannot be truncated") as caught:
        check_draft_model(hybrid.model, hybrid.model)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_memory_of_the_draft_model_is_reported(
    backend: LlamaBackend, drafting: Drafting, demo_model_path: Path
) -> None:
    """The model as its own draft model needs the same again, here with contexts twice as long."""

    def totals(memory: tuple[BufferUse, ...]) -> tuple[int, ...]:
        return tuple(
            sum(sizes) for sizes in zip(*((m.weight_bytes, m.kv_bytes, m.compute_bytes) for m in memory), strict=True)
        )

    both, _ = drafting(demo_model_path)
    weights, kv, _ = totals(backend.model.memory)
    # The log has hundredths of a MiB.
    assert totals(both.model.memory)[:2] == pytest.approx((2 * weights, 4 * kv), rel=0.01)
