"""Sampling what a grammar allows, on the demo model."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.engine.llama.sampler import Candidates, NativeSampler, chosen
from inferencecenter.engine.sampling.chain import plan_chain
from inferencecenter.engine.scheduler.speculation import DraftPlanner
from inferencecenter.engine.scheduler.state import EngineRequest
from inferencecenter.ipc.messages import Grammar, PromptSegment
from inferencecenter.protocol.params import Params, parse_params
from tests.engine.forms import constraint_of
from tests.engine.schemas import CASES, random_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions

CHAINS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 0, "top_p": 1, "min_p": 0},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"min_p": 0.2, "dynatemp_range": 0.5},
    {"typical_p": 0.7, "top_k": 0},
    {"top_n_sigma": 1.0, "top_k": 0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"mirostat": 1, "mirostat_tau": 4.0},
    {"mirostat": 2, "mirostat_tau": 4.0},
    {"adaptive_target": 0.4},
    {"logit_bias": {"300": 5, "301": -5}},
)


@pytest.fixture(scope="module")
def backend(options: EngineOptions) -> Iterator[LlamaBackend]:
    """The demo model with eight slots, prepared for drafts."""
    lookup = options.replace(n_ctx=1024, speculative="lookup", draft_tokens=8)
    backend = LlamaBackend.load(lookup, on_progress=lambda _fraction: None, on_log=lambda _level, _line: None)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def grammars(backend: LlamaBackend) -> Iterator[GrammarCache]:
    """The demo model's grammars."""
    grammars = GrammarCache(backend)
    yield grammars
    grammars.close()


@pytest.fixture(autouse=True)
def _empty_slots(backend: LlamaBackend) -> None:
    for slot in range(backend.model.slots):
        backend.truncate(slot, 0)


def prompt_of(backend: LlamaBackend, text: str) -> list[int]:
    """Return a question in the model's template."""
    pieces = (
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    )
    return backend.tokenize(pieces, first=True)


def answers(
    backend: LlamaBackend, held: Sequence[Constraint], texts: Sequence[str], params: Params, *, most_tokens: int
) -> list[list[int]]:
    """Answer questions concurrently, each under its grammar, until all have ended or reached their limit."""
    slots = range(len(texts))
    said: list[list[int]] = [[] for _ in slots]
    prompts = [prompt_of(backend, text) for text in texts]
    samplers = [backend.sampler(params, prompt, (), each) for prompt, each in zip(prompts, held, strict=True)]
    chunks = [Chunk(slot, 0, prompt, sample=True) for slot, prompt in enumerate(prompts)]
    while chunks:
        backend.decode(chunks)
        for row, chunk in enumerate(chunks):
            said[chunk.slot].append(samplers[chunk.slot].sample(row).token)
        chunks = [
            Chunk(chunk.slot, chunk.start + len(chunk.tokens), said[chunk.slot][-1:], sample=True)
            for chunk in chunks
            if not backend.is_end(said[chunk.slot][-1]) and len(said[chunk.slot]) < most_tokens
        ]
    for slot in slots:
        samplers[slot].close()
        backend.truncate(slot, 0)
    return said


def text_of(backend: LlamaBackend, tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return b"".join(map(backend.token_bytes, tokens)).decode()


class Mask:
    """Allows the same tokens at every position, and records the accepted ones."""

    def __init__(self, allowed: npt.NDArray[np.bool_]) -> None:
        self.mask = allowed
        self.taken: list[int] = []

    def allowed(self, _n_tokens: int) -> npt.NDArray[np.bool_]:
        """Return the tokens; the caller may change the array."""
        return self.mask.copy()

    def accept(self, token: int) -> None:
        """Record the call."""
        self.taken.append(token)


def native(backend: LlamaBackend, raw: dict[str, Any], constraint: Mask | None = None) -> NativeSampler:
    """Return the chain for parameters as a client writes them."""
    vocab, params = backend._model.vocab, parse_params({"seed": 7, **raw})
    return NativeSampler(
        context=backend._context.handle,
        batch_index=lambda row: row,
        vocab=vocab.handle,
        specs=plan_chain(params, n_vocab=vocab.n_tokens, n_ctx=1024),
        n_vocab=vocab.n_tokens,
        token_text=vocab.token_text,
        n_probs=params.n_probs,
        prompt=[5, 6, 7, 5, 6],
        constraint=constraint,  # type: ignore[arg-type]
    )


def row_of(backend: LlamaBackend) -> npt.NDArray[np.float32]:
    """Return the writable logits of the last decode's first row."""
    pointer = lib.llama_get_logits_ith(backend._context.handle, backend._context.batch_index(0))
    return np.ctypeslib.as_array(pointer, (backend.model.n_vocab,))


def spread(backend: LlamaBackend) -> npt.NDArray[np.float32]:
    """Decode a prompt and replace its logits by ones whose likelihood falls with a power of the rank."""
    backend.decode([Chunk(0, 0, prompt_of(backend, "Who?"), sample=True)])
    row = row_of(backend)
    row[:] = -1.5 * np.log(np.random.default_rng(3).permutation(len(row)) + 1)
    return row


@pytest.mark.parametrize("raw", CHAINS, ids=str)
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_mask_equals_logits_of_minus_infinity(backend: LlamaBackend, raw: dict[str, Any], share: float) -> None:
    """Every chain draws the same tokens as llama.cpp with all other logits at minus infinity."""
    row = spread(backend)
    allowed = np.random.default_rng(4).random(len(row)) < share
    mask = Mask(allowed)
    sampler = native(backend, raw, mask)
    index = backend._context.batch_index(0)
    drawn = [sampler.sample(index).token for _ in range(40)]
    sampler.close()
    assert drawn == mask.taken
    assert allowed[drawn].all()
    row[~allowed] = -np.inf
    sampler = native(backend, raw)
    assert [sampler.sample(index).token for _ in range(40)] == drawn
    sampler.close()


@pytest.mark.parametrize("raw", CHAINS, ids=str)
def test_every_chain_draws_the_only_allowed_token(backend: LlamaBackend, raw: dict[str, Any]) -> None:
    """It is drawn repeatedly, even if it is unlikely."""
    row = spread(backend)
    allowed = np.zeros(len(row), dtype=bool)
    allowed[int(row.argmin())] = True
    sampler = native(backend, raw, Mask(allowed))
    assert {sampler.sample(backend._context.batch_index(0)).token for _ in range(20)} == {int(row.argmin())}
    sampler.close()


def test_logprobs_are_those_of_the_unmasked_model(backend: LlamaBackend) -> None:
    """They cover all tokens, also those that the grammar forbids."""
    row = spread(backend)
    best, worst = int(row.argmax()), int(row.argmin())
    allowed = np.zeros(len(row), dtype=bool)
    allowed[worst] = True
    before = row.copy()
    index = backend._context.batch_index(0)
    held, free = native(backend, {"n_probs": 3}, Mask(allowed)), native(backend, {"n_probs": 3})
    reported, expected = held.sample(index).logprobs, free.sample(index).logprobs
    held.close()
    free.close()
    assert reported is not None
    assert expected is not None
    assert reported.top == expected.top
    assert (reported.top[0].token_id, reported.sampled.token_id) == (best, worst)
    assert (row == before).all()


def test_candidates_are_the_allowed_tokens_in_their_order() -> None:
    """They have the logits of the model for any share of allowed tokens, and nothing of an earlier step."""
    candidates = Candidates(1000)
    logits = np.arange(1000, dtype=np.float32)
    for share in (0.9, 0.01, 0.6, 1.0):
        allowed = np.random.default_rng(1).random(1000) < share
        array = candidates.fill(logits, allowed)
        found = [array.data[at] for at in range(array.size)]
        assert [each.id for each in found if each.logit > -np.inf] == list(np.flatnonzero(allowed))
        assert all(each.logit == each.id and each.p == 0 for each in found if each.logit > -np.inf)
    with pytest.raises(ValueError, match="chose no token"):
        chosen(array)


def test_mask_without_candidates_fails_the_turn(backend: LlamaBackend, grammars: GrammarCache) -> None:
    """llama.cpp would draw a banned token."""
    token = backend.tokenize((PromptSegment("x"),), first=False)[-1]
    held = constraint_of(grammars, Grammar("regex", "x"))
    only = [int(each) for each in np.flatnonzero(constraint_of(grammars, Grammar("regex", "x")).allowed(4096))]
    assert token in only
    prompt = prompt_of(backend, "Who?")
    sampler = backend.sampler(Params(logit_bias=tuple((each, False) for each in only)), prompt, (), held)
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    with pytest.raises(InferenceCenterError) as failed:
        sampler.sample(0)
    sampler.close()
    assert (failed.value.code, failed.value.field) == (ErrorCode.INVALID_REQUEST, "params.logit_bias")


def test_resumed_answer_continues_exactly(backend: LlamaBackend, grammars: GrammarCache) -> None:
    """A greedy answer that is resumed after any token equals the uninterrupted one."""
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4}))
    params = Params(temperature=0)
    (whole,) = answers(backend, [constraint_of(grammars, grammar)], ["Which colors?"], params, most_tokens=80)
    assert backend.is_end(whole[-1])
    prompt = prompt_of(backend, "Which colors?")
    for cut in range(1, len(whole)):
        sampler = backend.sampler(params, prompt, whole[:cut], constraint_of(grammars, grammar, answer=whole[:cut]))
        backend.decode([Chunk(0, 0, [*prompt, *whole[:cut]], sample=True)])
        assert sampler.sample(0).token == whole[cut]
        sampler.close()
        backend.truncate(0, 0)


def test_drafts_do_not_change_constrained_output(backend: LlamaBackend, grammars: GrammarCache) -> None:
    """A greedy answer is the same with drafts, which are accepted only where the grammar allows them."""
    items = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}, "ok": {"const": True}}}
    schema = {"type": "array", "items": {**items, "required": ["name", "ok"]}, "minItems": 8, "maxItems": 8}
    grammar, params = Grammar("json_schema", json.dumps(schema)), Params(temperature=0)
    (plain,) = answers(backend, [constraint_of(grammars, grammar)], ["Who?"], params, most_tokens=600)
    tokens = prompt_of(backend, "Who?")
    n_prompt = len(tokens)
    request = EngineRequest(
        turn_id="t", session_id="t", client_id="c", priority=1, arrival=0, submitted_s=0.0, tokens=[*tokens]
    )
    request.slot, request.kv_tokens = 0, len(tokens)
    sampler = backend.sampler(params, tokens, (), constraint_of(grammars, grammar))
    backend.decode([Chunk(0, 0, tokens, sample=True)])
    request.tokens.append(sampler.sample(0).token)
    drafting = DraftPlanner(draft_tokens=8, n_ctx=1024, pass_tokens=64)
    steps = 0
    while not backend.is_end(request.tokens[-1]):
        steps += 1
        guessed = drafting.drafts([request]).tokens.get("t", [])
        backend.decode([Chunk(0, request.kv_tokens, [request.tokens[-1], *guessed], sample=True, drafts=len(guessed))])
        for row, guess in enumerate([*guessed, None]):
            request.tokens.append(sampler.sample(row).token)
            if request.tokens[-1] != guess or backend.is_end(request.tokens[-1]):
                break
        request.kv_tokens = len(request.tokens) - 1
        backend.truncate(0, request.kv_tokens)
    sampler.close()
    assert request.tokens[n_prompt:] == plain
    assert steps < len(plain) / 1.5


@pytest.mark.parametrize("case", [case for case in CASES if case.schema not in ({}, True)], ids=lambda case: case.name)
def test_every_schema_keyword_is_obeyed(backend: LlamaBackend, grammars: GrammarCache, case: Any) -> None:
    """Eight answers that the model would not give by itself: each complete one is valid under its schema."""
    grammar = Grammar("json_schema", json.dumps(case.schema))
    validator = Draft202012Validator(case.schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    held = [constraint_of(grammars, grammar) for _ in range(8)]
    texts = [f"Tell me {n}." for n in range(8)]
    for tokens in answers(backend, held, texts, Params(seed=1), most_tokens=60):
        if backend.is_end(tokens[-1]):
            value = json.loads(text_of(backend, tokens))
            assert validator.is_valid(value), value


@pytest.mark.slow
def test_answers_to_random_schemas_are_valid(backend: LlamaBackend, grammars: GrammarCache) -> None:
    """200 schemas: each complete answer is valid, and nearly all are complete."""
    draw = random.Random(20_260_518)
    schemas = [random_schema(draw) for _ in range(200)]
    ended = 0
    for first in range(0, len(schemas), 8):
        group = schemas[first : first + 8]
        held = [constraint_of(grammars, Grammar("json_schema", json.dumps(schema))) for schema in group]
        texts = [f"Give me {n}." for n in range(len(group))]
        for schema, tokens in zip(group, answers(backend, held, texts, Params(seed=5), most_tokens=300), strict=True):
            if not backend.is_end(tokens[-1]):
                continue
            ended += 1
            validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            value = json.loads(text_of(backend, tokens))
            assert validator.is_valid(value), (schema, value)
    assert ended >= 190
