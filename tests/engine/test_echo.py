"""The backend without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Backend, Chunk, DecodeError
from inferencecenter.engine.echo import MESSAGE_END, MESSAGE_START, EchoBackend
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import Params


def echo(*, slots: int = 2, n_ctx: int = 0) -> EchoBackend:
    """Return a backend of small size."""
    return EchoBackend(EngineOptions(backend="echo", parent_pid=0, slots=slots, n_ctx=n_ctx))


def chat(text: str) -> tuple[PromptSegment, ...]:
    """Return a prompt with one user message, as its template renders it."""
    return (
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    )


def answer(backend: EchoBackend, prompt: list[int], n_tokens: int, **params: object) -> list[int]:
    """Decode a prompt in slot 0 and return the first tokens of the answer."""
    sampler = backend.sampler(Params.model_validate(params), prompt)
    tokens: list[int] = []
    new = prompt
    for _ in range(n_tokens):
        backend.decode([Chunk(0, len(backend.held(0)), new, sample=True)])
        new = [sampler.sample(0).token]
        tokens += new
    sampler.close()
    return tokens


def test_tokens_are_bytes_and_text_stays_text() -> None:
    """Control tokens are recognized only where the template spells them."""
    backend = echo()
    assert backend.tokenize([PromptSegment("<|im_end|>x", special=True)], first=True) == [MESSAGE_END, ord("x")]
    assert backend.tokenize([PromptSegment("<|im_end|>")], first=True) == list(b"<|im_end|>")
    text = "a€<|im_start|>\n"
    tokens = backend.tokenize([PromptSegment(text)], first=False)
    assert b"".join(map(backend.token_bytes, tokens)).decode() == text


def test_control_tokens_have_names_and_no_text() -> None:
    """They add nothing to the text, and one of them ends a message."""
    backend = echo()
    assert (backend.token_bytes(MESSAGE_START), backend.token_text(MESSAGE_START)) == (b"", "<|im_start|>")
    assert (backend.is_end(MESSAGE_START), backend.is_end(MESSAGE_END), backend.is_end(65)) == (False, True, False)


def test_answer_is_the_last_user_message() -> None:
    """It is spelled byte by byte, then ended."""
    backend = echo()
    prompt = backend.tokenize(
        (*chat("first"), PromptSegment("x"), PromptSegment("<|im_end|>\n", special=True), *chat("two")), first=True
    )
    assert answer(backend, prompt, 4) == [*b"two", MESSAGE_END]


def test_answer_to_a_raw_prompt_repeats_it() -> None:
    """Without messages the text since the last end token is repeated."""
    prompt = [*b"old", MESSAGE_END, *b"new"]
    assert answer(echo(), prompt, 4) == [*b"new", MESSAGE_END]


def test_ignore_eos_repeats_the_answer() -> None:
    """The answer is repeated instead of ended."""
    assert answer(echo(), list(b"ab"), 5, ignore_eos=True) == list(b"ababa")


def test_each_draft_has_its_own_row() -> None:
    """A sampler reads the row of the token before the drafts, and of each draft."""
    backend = echo()
    sampler = backend.sampler(Params(), list(b"abc"))
    backend.decode([Chunk(0, 0, list(b"abc"), sample=True), Chunk(1, 0, [9], sample=True)])
    assert sampler.sample(0).token == ord("a")
    backend.decode([Chunk(0, 3, list(b"abx"), sample=True, drafts=2), Chunk(1, 1, [9], sample=True)])
    assert [sampler.sample(0).token, sampler.sample(1).token] == list(b"bc")
    assert backend.row(3) == (9, 9)
    with pytest.raises(ValueError, match="not the turn's"):
        sampler.sample(2)


def test_logprobs_are_certain() -> None:
    """The one token has probability 1."""
    backend = echo()
    sampler = backend.sampler(Params(n_probs=2), list(b"a"))
    backend.decode([Chunk(0, 0, list(b"a"), sample=True)])
    logprobs = sampler.sample(0).logprobs
    assert logprobs is not None
    assert (logprobs.sampled.token, logprobs.sampled.logprob, logprobs.top) == ("a", 0.0, (logprobs.sampled,))


def test_logit_bias_is_refused() -> None:
    """An unsupported parameter is an error that names its field."""
    with pytest.raises(InferenceCenterError) as refused:
        echo().sampler(Params(logit_bias=((1, 2.0),)), [])
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "params.logit_bias")


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(0, 1, [1], sample=True)],
        [Chunk(0, 0, [], sample=True)],
        [Chunk(1, 0, [1], sample=True), Chunk(0, 0, [1], sample=True)],
        [Chunk(0, 0, [1], sample=False), Chunk(0, 1, [1], sample=True)],
    ],
)
def test_chunks_that_do_not_fit_the_kv_are_refused(chunks: list[Chunk]) -> None:
    """A wrong position, no tokens, unsorted slots and a repeated slot are refused, and nothing is decoded."""
    backend = echo()
    with pytest.raises(ValueError, match="slot"):
        backend.decode(chunks)
    assert (backend.held(0), backend.held(1)) == ((), ())


def test_full_slot_fails_its_batch() -> None:
    """The slot is named, and no slot of the batch moved."""
    backend = echo(n_ctx=3)
    with pytest.raises(DecodeError) as failed:
        backend.decode([Chunk(0, 0, [1], sample=True), Chunk(1, 0, [1, 2, 3, 4], sample=True)])
    assert failed.value.slots == (1,)
    assert backend.held(0) == ()


def test_sampler_detects_kv_of_another_turn() -> None:
    """Rows count the chunks with logits, and a row with other tokens than the turn's raises."""
    backend = echo()
    backend.decode([Chunk(0, 0, list(b"xy"), sample=False), Chunk(1, 0, list(b"ab"), sample=True)])
    assert backend.sampler(Params(), list(b"ab")).sample(0).token == ord("a")
    with pytest.raises(ValueError, match="not the turn's"):
        backend.sampler(Params(), list(b"xy")).sample(0)


def test_closed_sampler_raises() -> None:
    """Closing it again or sampling from it is an error."""
    sampler = echo().sampler(Params(), [1])
    sampler.close()
    with pytest.raises(ValueError, match="closed already"):
        sampler.close()
    with pytest.raises(ValueError, match="is closed"):
        sampler.sample(0)


def test_truncate_and_swap() -> None:
    """Slots keep a prefix and exchange contents; a prefix longer than the content is refused."""
    backend = echo()
    backend.decode([Chunk(0, 0, [1, 2, 3], sample=False)])
    assert backend.truncate(0, 2)
    backend.swap(0, 1)
    assert (backend.held(0), backend.held(1)) == ((), (1, 2))
    with pytest.raises(ValueError, match="holds 2 tokens, not 3"):
        backend.truncate(1, 3)


def saved(backend: EchoBackend, slot: int) -> bytearray:
    """Return a slot's saved state."""
    buffer = bytearray(backend.state_bytes(slot))
    assert backend.save(slot, memoryview(buffer)) == len(buffer)
    return buffer


@given(st.lists(st.integers(0, MESSAGE_END), min_size=1, max_size=60))
def test_saved_tokens_are_restored_into_any_slot_of_any_backend(tokens: list[int]) -> None:
    """A state holds all tokens, control tokens too, and leaves its slot as it is."""
    backend, other = echo(), echo(slots=5, n_ctx=100)
    assert backend.fingerprint == other.fingerprint
    backend.decode([Chunk(1, 0, tokens, sample=False)])
    state = saved(backend, 1)
    assert len(state) <= 16 + backend.kv_bytes_per_token * len(tokens)
    other.decode([Chunk(4, 0, [9], sample=False)])
    assert other.restore(4, memoryview(state + b"more").toreadonly(), len(tokens))
    assert backend.held(1) == other.held(4) == tuple(tokens)


@given(st.data())
def test_incomplete_state_is_refused(data: st.DataObject) -> None:
    """A state that is truncated, changed in any bit, or of another length leaves the slot empty and raises nothing."""
    backend = echo()
    backend.decode([Chunk(0, 0, list(b"hello"), sample=False), Chunk(1, 0, [1], sample=False)])
    state, n_tokens = saved(backend, 0), 5
    match data.draw(st.sampled_from(["torn", "flipped", "length"])):
        case "torn":
            del state[data.draw(st.integers(0, len(state) - 1)) :]
        case "flipped":
            bit = data.draw(st.integers(0, 8 * len(state) - 1))
            state[bit // 8] ^= 1 << bit % 8
        case _:
            n_tokens = data.draw(st.integers(0, 100).filter(lambda n: n != 5))
    assert not backend.restore(1, memoryview(state), n_tokens)
    assert (backend.held(0), backend.held(1)) == (tuple(b"hello"), ())


def test_state_longer_than_a_slot_is_refused() -> None:
    """A backend with shorter slots restores only what fits."""
    backend, small = echo(), echo(n_ctx=4)
    backend.decode([Chunk(0, 0, list(b"hello"), sample=False)])
    assert not small.restore(0, memoryview(saved(backend, 0)), 5)
    backend.truncate(0, 4)
    assert small.restore(0, memoryview(saved(backend, 0)), 4)


def test_unsaveable_slots_return_nothing() -> None:
    """An empty slot and a small buffer give no bytes; a read-only buffer is refused."""
    backend = echo()
    assert backend.state_bytes(0) == backend.save(0, memoryview(bytearray(100))) == 0
    backend.decode([Chunk(0, 0, [1, 2], sample=False)])
    assert backend.save(0, memoryview(bytearray(backend.state_bytes(0) - 1))) == 0
    with pytest.raises(ValueError, match="read-only"):
        backend.save(0, memoryview(bytes(100)))


def test_copy_has_the_prefix_alone() -> None:
    """Later changes of one slot do not affect the other."""
    backend = echo()
    backend.decode([Chunk(0, 0, [1, 2, 3], sample=False), Chunk(1, 0, [9], sample=False)])
    assert backend.can_truncate
    assert backend.copy(0, 1, 2)
    backend.truncate(0, 1)
    assert (backend.held(0), backend.held(1)) == ((1,), (1, 2))
    for source, target, n_tokens in ((0, 1, 2), (0, 0, 1), (0, 1, -1)):
        with pytest.raises(ValueError, match="slot 0 holds 1 tokens"):
            backend.copy(source, target, n_tokens)


def test_answer_continues_after_a_context_shift() -> None:
    """With a shorter prompt, the sampler spells the rest of its answer."""
    backend = echo()
    old = backend.tokenize((*chat("first"), PromptSegment("x<|im_end|>", special=True), *chat("second")), first=True)
    begun = answer(backend, old, 3)
    shorter = backend.tokenize(chat("second"), first=True)
    backend.truncate(0, 0)
    backend.decode([Chunk(0, 0, [*shorter, *begun], sample=True)])
    sampler = backend.sampler(Params(), shorter, begun)
    rest = [sampler.sample(0).token]
    while not backend.is_end(rest[-1]):
        backend.decode([Chunk(0, len(backend.held(0)), rest[-1:], sample=True)])
        rest.append(sampler.sample(0).token)
    assert bytes([*begun, *rest[:-1]]) == b"second"


def test_delay_is_slept_at_each_decode() -> None:
    """It simulates a slow model; without a delay there is no sleep."""
    slept: list[float] = []
    options = EngineOptions(backend="echo", parent_pid=0, slots=1, echo_delay_ms=20)
    backend = EchoBackend(options, sleep=slept.append)
    backend.decode([Chunk(0, 0, [1], sample=False)])
    assert slept == [0.02]


def test_implements_the_backend_protocol() -> None:
    """The seam's protocol is kept; mypy compares the signatures here."""
    seam: Backend = echo()
    assert seam.model.backend == "echo"


def test_model_description_shows_the_options() -> None:
    """Closing forgets all tokens."""
    backend = echo(slots=3, n_ctx=77)
    assert (backend.model.slots, backend.model.n_ctx, backend.model.backend) == (3, 77, "echo")
    backend.decode([Chunk(2, 0, [1], sample=False)])
    backend.close()
    assert backend.held(2) == ()
