"""Tests of ``engine.llama.backend``."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Backend, Chunk
from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.hardware.memory import physical_cores
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import Params

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Heard:
    """The reports of a backend during its load."""

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.lines: list[tuple[str, str]] = []


@pytest.fixture(scope="module")
def heard() -> _Heard:
    """The reports of the module's backend."""
    return _Heard()


@pytest.fixture(scope="module")
def backend(options: EngineOptions, heard: _Heard) -> Iterator[LlamaBackend]:
    """A loaded backend."""
    backend = LlamaBackend.load(
        options,
        on_progress=heard.fractions.append,
        on_log=lambda level, line: heard.lines.append((level, line)),
    )
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def _empty_slots(backend: LlamaBackend) -> None:
    for slot in range(backend.model.slots):
        backend.truncate(slot, 0)


def _prompt(backend: LlamaBackend, text: str) -> list[int]:
    pieces = [
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    ]
    return backend.tokenize(pieces, first=True)


def _load(options: EngineOptions) -> LlamaBackend:
    return LlamaBackend.load(options, on_progress=lambda _fraction: None, on_log=lambda _level, _line: None)


def test_implements_the_backend_protocol(backend: LlamaBackend) -> None:
    """The seam's protocol is kept; mypy compares the signatures here."""
    seam: Backend = backend
    assert seam.model.backend == "llama"


def test_loading_reports_progress_and_llama_cpps_log(backend: LlamaBackend, heard: _Heard) -> None:
    """Fractions rise to one, and the log of the load arrives line by line."""
    assert backend.model.n_vocab
    assert heard.fractions == sorted(set(heard.fractions))
    assert heard.fractions[-1] == 1.0
    assert any("llama_model_loader" in line for _, line in heard.lines)
    assert not any("\n" in line for _, line in heard.lines)


def test_model_answers_a_prompt(backend: LlamaBackend) -> None:
    """Tokenize, decode, sample greedily until the end token: the answer uses what the prompt said."""
    prompt = _prompt(backend, "My name is Ada.")
    sampler = backend.sampler(Params(temperature=0), prompt)
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    answer: list[int] = []
    while not answer or not backend.is_end(answer[-1]):
        answer.append(sampler.sample(0).token)
        assert len(answer) < 64
        backend.decode([Chunk(0, len(prompt) + len(answer) - 1, answer[-1:], sample=True)])
    sampler.close()
    assert b"Ada" in b"".join(map(backend.token_bytes, answer))
    assert backend.token_bytes(answer[-1]) == b""
    assert backend.token_text(answer[-1]) == "<|im_end|>"


def test_rows_are_sampled_in_parallel_by_their_own_chains(backend: LlamaBackend) -> None:
    """Chains on several threads read their own rows, whatever rows lie between them."""
    prompts = [_prompt(backend, f"My name is {name}.") for name in ("Ada", "Bob", "Carl", "Dora")]
    expected = []
    for prompt in prompts:
        backend.truncate(0, 0)
        backend.decode([Chunk(0, 0, prompt, sample=True)])
        expected.append(backend.sampler(Params(temperature=0, n_probs=1), prompt).sample(0))
    backend.truncate(0, 0)
    backend.decode([Chunk(slot, 0, prompt, sample=True) for slot, prompt in enumerate(prompts)])
    samplers = [backend.sampler(Params(temperature=0, n_probs=1), prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        sampled = list(pool.map(lambda row: samplers[row].sample(row), range(4)))
    for mine, alone in zip(sampled, expected, strict=True):
        assert mine.logprobs is not None
        assert alone.logprobs is not None
        assert mine.logprobs.top[0].logprob == pytest.approx(alone.logprobs.top[0].logprob, abs=0.1)


def test_repetition_penalty_covers_the_prompt(backend: LlamaBackend) -> None:
    """A token of the prompt is sampled less often under a repetition penalty."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    plain = backend.sampler(Params(temperature=0), prompt).sample(0).token
    params = Params(temperature=0, repeat_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0, repeat_last_n=64)
    assert backend.sampler(params, [*prompt, *[plain] * 8]).sample(0).token != plain


def test_ignore_eos_never_ends(backend: LlamaBackend) -> None:
    """With ``ignore_eos`` no end token is sampled where the model would end."""
    prompt = _prompt(backend, "My name is Ada.")
    sampler = backend.sampler(Params(temperature=0, ignore_eos=True), prompt)
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    for position in range(len(prompt), len(prompt) + 40):
        token = sampler.sample(0).token
        assert not backend.is_end(token)
        backend.decode([Chunk(0, position, [token], sample=True)])


def test_swap_through_the_backend(backend: LlamaBackend) -> None:
    """Swapped slots continue each other's sequences."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    first = backend.sampler(Params(temperature=0), prompt).sample(0).token
    backend.swap(0, 1)
    backend.decode([Chunk(1, len(prompt), [first], sample=True)])
    with pytest.raises(ValueError, match="slot 0 holds 0"):
        backend.decode([Chunk(0, len(prompt), [first], sample=True)])


def test_offload_through_the_backend(backend: LlamaBackend) -> None:
    """A saved slot continues in another one, and a copy of its prefix in a third."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=False)])
    buffer = bytearray(backend.state_bytes(0))
    assert backend.save(0, memoryview(buffer)) == len(buffer)
    assert abs(len(buffer) / len(prompt) / backend.kv_bytes_per_token - 1) < 0.1
    assert backend.restore(1, memoryview(buffer), len(prompt))
    assert backend.copy(1, 2, len(prompt) - 1)
    assert not backend.restore(3, memoryview(b"foreign"), len(prompt))
    assert backend.can_truncate
    assert backend.truncate(1, len(prompt) - 1)
    backend.decode([Chunk(slot, len(prompt) - 1, prompt[-1:], sample=True) for slot in (1, 2)])
    sampled = [backend.sampler(Params(temperature=0, n_probs=1), prompt).sample(row) for row in (0, 1)]
    assert sampled[0].token == sampled[1].token


def test_backends_of_one_model_share_a_fingerprint(backend: LlamaBackend, options: EngineOptions) -> None:
    """Number and length of the slots may differ; each restores what the other saved."""
    other = _load(options.replace(slots=2, n_ctx=128))
    assert other.fingerprint == backend.fingerprint
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(5, 0, prompt, sample=False)])
    buffer = bytearray(backend.state_bytes(5))
    assert backend.save(5, memoryview(buffer)) == len(buffer)
    assert other.restore(1, memoryview(buffer), len(prompt))
    other.close()


def test_penalties_cover_the_resumed_text(backend: LlamaBackend) -> None:
    """Tokens of the partial answer count as sampled: the next one is the same."""
    prompt = _prompt(backend, "My name is Ada.")
    params = Params(
        temperature=0, repeat_penalty=1.5, presence_penalty=1.0, dry_multiplier=1.0, dry_allowed_length=1, n_probs=1
    )
    whole = backend.sampler(params, prompt)
    answer: list[int] = []
    new = prompt
    for _ in range(8):
        backend.decode([Chunk(0, len(prompt) + len(answer) - len(new) if answer else 0, new, sample=True)])
        resumed = backend.sampler(params, prompt, answer).sample(0)
        sampled = whole.sample(0)
        assert resumed == sampled
        new = [sampled.token]
        answer += new


HOT = {"seed": 7, "temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_k": 2, "repeat_penalty": 1.5, "dry_multiplier": 1.0, "typical_p": 0.9},
        {"xtc_probability": 0.5, "xtc_threshold": 0.0001},
        {"samplers": ["xtc", "temperature", "top_p"], "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.0001},
        {"n_probs": 2, "logit_bias": {"5": 3}},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
def test_resumed_answer_uses_the_same_random_numbers(backend: LlamaBackend, more: dict[str, object]) -> None:
    """Resumed after any token, with the same logits, each position is drawn as without the interruption."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    params = Params.model_validate({**HOT, **more})

    def draw(answer: list[int], n_tokens: int) -> list[int]:
        sampler = backend.sampler(params, prompt, answer)
        drawn = [sampler.sample(0).token for _ in range(n_tokens - len(answer))]
        sampler.close()
        return answer + drawn

    whole = draw([], 24)
    assert len(set(whole)) > 1
    assert [draw(whole[:cut], 24) for cut in range(24)] == [whole] * 24


def test_each_position_has_its_own_random_number(backend: LlamaBackend) -> None:
    """The same logits at other positions, or with another seed, give other tokens."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=True)])

    def drawn(seed: int) -> list[int]:
        sampler = backend.sampler(Params.model_validate({**HOT, "seed": seed}), prompt)
        return [sampler.sample(0).token for _ in range(100)]

    assert len(set(drawn(7))) > 50
    assert sum(one == other for one, other in zip(drawn(7), drawn(8), strict=True)) < 20


@pytest.mark.parametrize("more", [{"mirostat": 1}, {"mirostat": 2}, {"adaptive_target": 0.3}])
def test_stateful_sampler_is_reproducible(backend: LlamaBackend, more: dict[str, object]) -> None:
    """It restarts at the resumed position with that position's random numbers."""
    prompt = _prompt(backend, "My name is Ada.")
    backend.decode([Chunk(0, 0, prompt, sample=True)])
    params = Params.model_validate({**HOT, **more})

    def draw(answer: list[int]) -> list[int]:
        sampler = backend.sampler(params, prompt, answer)
        return [sampler.sample(0).token for _ in range(8)]

    assert draw([]) == draw([])
    assert draw([5]) == draw([5])
    assert len({tuple(draw(answer)) for answer in ([], [5], [5, 6])}) == 3


def test_close_frees_open_samplers_first(options: EngineOptions) -> None:
    """Closing frees an open chain, which then samples no more; a second close does nothing."""
    backend = _load(options.replace(slots=1))
    sampler = backend.sampler(Params(), [])
    backend.decode([Chunk(0, 0, [5], sample=True)])
    sampler.sample(0)
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        sampler.sample(0)
    sampler.close()


def test_failed_load_leaves_nothing_behind(options: EngineOptions, tmp_path: Path) -> None:
    """A refused file can be followed by a good one in the same process."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(InferenceCenterError) as refusal:
        _load(options.replace(model_path=str(broken)))
    assert refusal.value.code is ErrorCode.INVALID_MODEL_FILE
    gc.collect()
    _load(options.replace(slots=1)).close()


def test_n_batch_smaller_than_the_slots_still_decodes_them_all(options: EngineOptions) -> None:
    """Every slot gets its row in a step, however small the batch is set."""
    small = options.replace(n_batch=2, n_ubatch=2)
    backend = _load(small)
    backend.decode([Chunk(slot, 0, [5, 6, 7], sample=True) for slot in range(8)])
    assert backend.sampler(Params(temperature=0), []).sample(7).token >= 0
    backend.close()


def test_hyper_threads_count_once(tmp_path: Path) -> None:
    """CPUs with the same siblings are one core; a CPU without siblings is its own core."""
    allowed = sorted(os.sched_getaffinity(0))
    assert physical_cores(tmp_path) == len(allowed)
    for cpu in allowed:
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-63\n")
    assert physical_cores(tmp_path) == 1
