"""Contexts of real models: slots, decoding, saved sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, DecodeError
from inferencecenter.engine.llama.backend import LlamaContext
from inferencecenter.engine.llama.row_padding import RowCounts
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import PromptSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.log import LlamaLog
    from tests.engine.llama.conftest import Loaded

NAMES = ("Ada", "Bob", "Carl", "Dora", "Eve", "Finn", "Gina", "Hugo")
CLOSE = 0.1


def _prompt(loaded: Loaded, text: str) -> list[int]:
    pieces = [
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    ]
    return loaded.model.vocab.tokenize(pieces, first=True)


def _assert_same_or_close(
    chosen: Sequence[int], expected: Sequence[int], logits: Sequence[NDArray[np.float32]]
) -> None:
    """Check that greedy answers are equal, or first differ where the two best tokens are nearly equally likely."""
    for mine, theirs, row in zip(chosen, expected, logits, strict=True):
        if mine != theirs:
            assert abs(row[mine] - row[theirs]) < CLOSE
            return


def _fresh(loaded: Loaded, *parts: list[int]) -> NDArray[np.float32]:
    """Return the logits after decoding parts one by one in an unused slot."""
    return [loaded.feed(6, part) for part in parts][-1]


def test_greedy_answer_makes_sense(demo: Loaded) -> None:
    """The demo model's answer uses the name given in the prompt."""
    chosen, _ = demo.greedy(0, _prompt(demo, "My name is Ada."), 24)
    assert b"Ada" in b"".join(map(demo.model.vocab.token_bytes, chosen))


def test_truncate_then_decode_equals_fresh_decode(demo: Loaded) -> None:
    """A sequence that was truncated and continued differently equals a fresh one."""
    prompt = _prompt(demo, "My name is Ada.")
    expected, logits = demo.greedy(0, prompt, 16)
    demo.greedy(1, prompt[:4] + _prompt(demo, "Count to seven."), 8)
    assert demo.context.truncate(1, 4)
    assert demo.context.length(1) == 4
    chosen, _ = demo.greedy(1, prompt[4:], 16)
    _assert_same_or_close(chosen, expected, logits)


def test_truncate_accepts_any_length_up_to_the_present_one(demo: Loaded) -> None:
    """A longer length is refused."""
    demo.feed(0, [1, 2, 3])
    assert demo.context.truncate(0, 3)
    assert demo.context.truncate(0, 0)
    assert demo.context.length(0) == 0
    with pytest.raises(ValueError, match="holds 0 tokens"):
        demo.context.truncate(0, 1)


def test_model_without_truncation_starts_over(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """If llama.cpp refuses a partial cut, as for recurrent models, the slot is emptied and the result says so."""
    remove = lib.llama_memory_seq_rm

    def whole_only(memory: int, slot: int, begin: int, end: int) -> bool:
        return begin <= 0 and remove(memory, slot, begin, end)

    demo.feed(0, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_memory_seq_rm", whole_only)
        assert not demo.context.truncate(0, 2)
    assert demo.context.length(0) == 0
    assert np.array_equal(demo.feed(0, [1, 2]), _fresh(demo, [1, 2]))


def test_eight_slots_at_once_answer_as_alone(demo: Loaded) -> None:
    """Eight slots in one batch give the same answers as each alone."""
    prompts = [_prompt(demo, f"My name is {name}.") for name in NAMES]
    alone = []
    for prompt in prompts:
        alone.append(demo.greedy(0, prompt, 12))
        demo.context.truncate(0, 0)
    # The prompts together exceed a batch, so this covers several calls of llama_decode.
    assert sum(map(len, prompts)) > 64
    demo.context.decode([Chunk(slot, 0, prompt, sample=True) for slot, prompt in enumerate(prompts)])
    together = [[int(demo.logits(row).argmax())] for row in range(8)]
    for _ in range(11):
        demo.context.decode(
            [Chunk(slot, demo.context.length(slot), new[-1:], sample=True) for slot, new in enumerate(together)]
        )
        for row, new in enumerate(together):
            new.append(int(demo.logits(row).argmax()))
    for chosen, (expected, logits) in zip(together, alone, strict=True):
        _assert_same_or_close(chosen, expected, logits)


def test_logits_are_read_by_sampled_row(demo: Loaded) -> None:
    """Row numbers count the chunks with logits, whatever lies between them."""
    expected = demo.feed(0, [5, 6, 7])
    demo.context.truncate(0, 0)
    demo.context.decode(
        [Chunk(0, 0, [8, 9], sample=True), Chunk(1, 0, [3, 4], sample=False), Chunk(2, 0, [5, 6, 7], sample=True)]
    )
    assert np.allclose(demo.logits(1), expected, atol=CLOSE)
    assert not np.allclose(demo.logits(0), expected, atol=CLOSE)


def test_swap_moves_both_sequences_exactly(demo: Loaded) -> None:
    """After a swap each slot continues the other's sequence, bit for bit."""
    first, second = _prompt(demo, "My name is Ada."), _prompt(demo, "Count to seven, please.")
    demo.feed(2, first)
    demo.feed(5, second)
    expected = [demo.feed(slot, [11]) for slot in (2, 5)]
    for slot, prompt in ((2, first), (5, second)):
        assert demo.context.truncate(slot, len(prompt))
    demo.context.swap(2, 5)
    assert (demo.context.length(5), demo.context.length(2)) == (len(first), len(second))
    assert np.array_equal(demo.feed(5, [11]), expected[0])
    assert np.array_equal(demo.feed(2, [11]), expected[1])


def test_swap_with_an_empty_slot_and_with_itself(demo: Loaded) -> None:
    """The sequence moves to the empty slot; a slot swapped with itself is unchanged."""
    demo.feed(0, [1, 2, 3])
    demo.context.swap(0, 7)
    assert (demo.context.length(0), demo.context.length(7)) == (0, 3)
    demo.context.swap(7, 7)
    demo.context.swap(0, 1)
    assert demo.context.length(7) == 3
    demo.context.swap(0, 7)
    assert np.array_equal(demo.feed(0, [4]), _fresh(demo, [1, 2, 3], [4]))


@pytest.mark.parametrize("n_tokens", [120, 119, 64, 1])
def test_copied_sequence_continues_like_its_source(demo: Loaded, n_tokens: int) -> None:
    """The target has the source's first tokens, bit for bit, and the source keeps all of its own."""
    tokens = [3 + 7 * number % 250 for number in range(120)]
    demo.feed(0, tokens)
    demo.feed(3, [1, 2, 3])
    assert demo.context.copy(0, 3, n_tokens)
    assert (demo.context.length(0), demo.context.length(3)) == (120, n_tokens)
    demo.context.truncate(0, n_tokens)
    assert np.array_equal(demo.feed(3, [5]), demo.feed(0, [5]))


def test_copy_of_an_empty_slot_is_empty(demo: Loaded) -> None:
    """Copying no tokens, or from an empty slot, empties the target."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [4, 5])
    assert demo.context.copy(0, 1, 0)
    assert demo.context.length(1) == 0
    demo.feed(1, [4, 5])
    assert demo.context.copy(7, 1, 0)
    assert demo.context.length(1) == 0


@pytest.mark.parametrize(("source", "target", "n_tokens"), [(0, 1, 4), (0, 1, -1), (0, 0, 2)])
def test_invalid_copies_are_refused(demo: Loaded, source: int, target: int, n_tokens: int) -> None:
    """More tokens than exist, a negative number, or onto itself: nothing changes."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [4, 5])
    with pytest.raises(ValueError, match="slot 0 holds 3 tokens"):
        demo.context.copy(source, target, n_tokens)
    assert (demo.context.length(0), demo.context.length(1)) == (3, 2)


def test_failed_copy_empties_only_its_target(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that cannot be restored loses the target's content; the source stays."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_state_seq_set_data", lambda *_arguments: 0)
        assert not demo.context.copy(0, 1, 3)
    assert (demo.context.length(0), demo.context.length(1)) == (3, 0)
    assert np.array_equal(demo.feed(0, [4]), _fresh(demo, [1, 2, 3], [4]))


@pytest.mark.parametrize(("n_tokens", "kept"), [(120, True), (119, True), (118, False), (20, False)])
def test_window_is_copied_whole_or_not_at_all(window: Loaded, n_tokens: int, kept: bool) -> None:
    """Of a sliding-window model only the current window is copied; the rest is reported as missing."""
    tokens = [3 + 7 * number % 250 for number in range(120)]
    window.feed(0, tokens)
    assert window.context.copy(0, 1, n_tokens) is kept
    assert window.context.length(1) == (n_tokens if kept else 0)
    if kept:
        logits = window.feed(1, [5])
        window.context.truncate(0, 0)
        assert np.allclose(logits, _fresh_window(window, [*tokens[:n_tokens], 5]), atol=1e-3)


def test_only_plain_memory_can_be_cut_anywhere(demo: Loaded, window: Loaded, recurrent: Loaded, hybrid: Loaded) -> None:
    """Windows and recurrent layers have discarded what a cut would need."""
    loaded = (demo, window, recurrent, hybrid)
    assert [each.context.can_truncate for each in loaded] == [True, False, False, False]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [Chunk(1, 0, [1], sample=True), Chunk(0, 0, [1], sample=True)],
        [Chunk(1, 0, [1], sample=True), Chunk(1, 1, [1], sample=True)],
        [Chunk(8, 0, [1], sample=True)],
        [Chunk(0, 1, [1], sample=True)],
        [Chunk(0, 0, [], sample=False)],
    ],
    ids=["none", "descending", "twice", "no such slot", "gap", "empty"],
)
def test_decode_refuses_chunks_that_break_the_contract(demo: Loaded, chunks: list[Chunk]) -> None:
    """Chunks out of order, at a wrong position or without tokens never reach llama.cpp, and no slot changes."""
    with pytest.raises(ValueError, match=r"chunk|slot"):
        demo.context.decode(chunks)
    assert [demo.context.length(slot) for slot in range(8)] == [0] * 8


def test_full_slot_refuses_more_tokens(demo: Loaded) -> None:
    """A slot takes ``n_ctx`` tokens; one more fails its chunk, and the rest of the batch is not decoded."""
    demo.feed(0, [1] * 256)
    with pytest.raises(DecodeError, match="256 tokens at most") as failure:
        demo.context.decode([Chunk(0, 256, [1], sample=True), Chunk(1, 0, [1], sample=True)])
    assert failure.value.slots == (0,)
    assert (demo.context.length(0), demo.context.length(1)) == (0, 0)
    demo.feed(1, [1])


@pytest.mark.parametrize("status", [1, 2, -1, -2, -3, 77])
def test_failed_decode_empties_its_slots_and_no_other(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """When llama_decode fails half-way, the batch's slots are named and emptied; others are unchanged."""
    demo.feed(3, [1, 2, 3])
    demo.feed(0, [4, 5])
    decode, calls = lib.llama_decode, iter((0, status))

    def failing(handle: int, batch: lib.llama_batch) -> int:
        decode(handle, batch)
        return next(calls)

    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_decode", failing)
        with pytest.raises(DecodeError) as failure:
            demo.context.decode([Chunk(0, 2, [6] * 70, sample=True), Chunk(1, 0, [7] * 50, sample=True)])
    assert failure.value.slots == (0, 1)
    assert [demo.context.length(slot) for slot in range(4)] == [0, 0, 0, 3]
    assert np.array_equal(demo.feed(3, [4]), _fresh(demo, [1, 2, 3], [4]))
    assert np.array_equal(demo.feed(0, [1, 2, 3]), demo.feed(1, [1, 2, 3]))


def test_token_outside_the_vocabulary_is_refused_by_llama_cpp(demo: Loaded) -> None:
    """A batch refused by llama.cpp is a failed decode, not a crash."""
    with pytest.raises(DecodeError, match="rejected") as failure:
        demo.feed(4, [demo.model.vocab.n_tokens])
    assert failure.value.slots == (4,)


def test_lost_tokens_are_detected(demo: Loaded) -> None:
    """If a slot's memory is not as expected after a batch, the whole batch has failed: all its slots moved."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [1, 2, 3])
    memory = lib.llama_get_memory(demo.context.handle)
    decode = lib.llama_decode

    def forgetful(handle: int, batch: lib.llama_batch) -> int:
        status: int = decode(handle, batch)
        lib.llama_memory_seq_rm(memory, 1, 2, -1)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "llama_decode", forgetful)
        with pytest.raises(DecodeError, match="lost count") as failure:
            demo.context.decode([Chunk(0, 3, [4], sample=True), Chunk(1, 3, [4], sample=True)])
    assert failure.value.slots == (0, 1)
    assert (demo.context.length(0), demo.context.length(1)) == (0, 0)


def test_failed_restore_empties_both_slots(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that cannot restore a state names both slots and leaves them empty."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [4, 5])
    monkeypatch.setattr(lib, "llama_state_seq_set_data", lambda *_arguments: 0)
    with pytest.raises(DecodeError) as failure:
        demo.context.swap(0, 1)
    assert failure.value.slots == (0, 1)
    assert (demo.context.length(0), demo.context.length(1)) == (0, 0)


def test_failed_save_empties_both_slots(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that cannot save one sequence has lost it, and does not leave the other in the wrong slot."""
    demo.feed(0, [1, 2, 3])
    demo.feed(1, [4, 5])
    monkeypatch.setattr(lib, "llama_state_seq_get_data", lambda *_arguments: 0)
    with pytest.raises(DecodeError) as failure:
        demo.context.swap(0, 1)
    assert failure.value.slots == (0, 1)
    assert (demo.context.length(0), demo.context.length(1)) == (0, 0)


def test_warm_up_fits_the_smallest_context(demo: Loaded, options: EngineOptions, log: LlamaLog) -> None:
    """It uses no more tokens than a slot has."""
    context = LlamaContext(demo.model, options.replace(slots=1, n_ctx=1), n_threads=1, log=log)
    assert context.warm_up(1) > 0
    assert context.warm_up(1, n_tokens=512) > 0
    assert context.length(0) == 0
    context.close()


def test_warm_up_leaves_all_slots_empty(
    demo: Loaded, options: EngineOptions, log: LlamaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decodes the given number of tokens, at most those of a batch or of a slot."""
    context = LlamaContext(demo.model, options.replace(slots=2, n_ctx=256), n_threads=1, log=log)
    decoded: list[int] = []
    decode = context.decode

    def counting(chunks: Sequence[Chunk]) -> None:
        decoded.append(len(chunks[0].tokens))
        decode(chunks)

    monkeypatch.setattr(context, "decode", counting)
    usual = context.warm_up(1)
    assert context.warm_up(1, n_tokens=48) == usual
    context.warm_up(1, n_tokens=100_000)
    assert decoded == [1, 1, 48, 1, 1, min(options.n_batch, 256), 1, 1]
    assert [context.length(slot) for slot in range(2)] == [0, 0]
    context.close()


def test_failed_context_creation_gives_the_reason(demo: Loaded, options: EngineOptions, log: LlamaLog) -> None:
    """A quantized V cache without flash attention is refused with llama.cpp's own reason."""
    impossible = options.replace(kv_type_v="q8_0", flash_attention="off")
    with pytest.raises(InferenceCenterError, match="flash_attn") as refusal:
        LlamaContext(demo.model, impossible, n_threads=1, log=log)
    assert refusal.value.code is ErrorCode.INVALID_CONFIG
    assert refusal.value.hint


def test_window_cut_within_reach_equals_fresh_decode(window: Loaded) -> None:
    """A sliding-window cut covered by the kept cells continues like a fresh sequence."""
    tokens = [3 + 7 * number % 250 for number in range(120)]
    window.feed(0, tokens)
    assert window.context.truncate(0, 100)
    assert np.allclose(window.feed(0, [5]), _fresh_window(window, [*tokens[:100], 5]), atol=1e-3)


def test_window_that_has_passed_empties_the_slot(window: Loaded) -> None:
    """A cut to a position whose window cells are gone empties the slot instead of answering from a hole."""
    tokens = [3 + 7 * number % 250 for number in range(700)]
    window.feed(0, tokens)
    first_kept = lib.llama_memory_seq_pos_min(lib.llama_get_memory(window.context.handle), 0)
    # llama.cpp would cut here and report the right length, but compute wrong answers.
    assert not window.context.truncate(0, first_kept + 10)
    assert window.context.length(0) == 0
    window.feed(0, tokens)
    assert not window.context.truncate(0, first_kept - 10)
    assert np.allclose(window.feed(0, tokens[:120]), _fresh_window(window, tokens[:120]), atol=1e-3)


def test_window_after_a_swap_can_be_cut_by_one_token_only(window: Loaded) -> None:
    """A restored sequence has exactly its window: one token back is covered, two are not."""
    tokens = [3 + 7 * number % 250 for number in range(120)]
    for cut, kept in ((119, True), (118, False)):
        window.context.truncate(0, 0)
        window.context.truncate(1, 0)
        window.feed(0, tokens)
        window.context.swap(0, 1)
        assert window.context.truncate(1, cut) is kept
        if kept:
            assert np.allclose(window.feed(1, [5]), _fresh_window(window, [*tokens[:cut], 5]), atol=1e-3)


def _fresh_window(loaded: Loaded, tokens: list[int]) -> NDArray[np.float32]:
    slot = next(slot for slot in range(2) if not loaded.context.length(slot))
    logits = loaded.feed(slot, tokens)
    loaded.context.truncate(slot, 0)
    return logits


def test_padding_leaves_logits_and_slots_as_they_are(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of seven slots decode as eight rows; the slots that lent a row continue as if they had not."""
    if demo.model.n_gpu_layers:
        pytest.skip("rows are padded on the processor alone")
    context = demo.context
    plain = [demo.feed(slot, [5, 6 + slot, 7]) for slot in range(7)]
    calls: list[int] = []
    decode = lib.llama_decode

    def counted(handle: int, batch: lib.llama_batch) -> int:
        calls.append(batch.n_tokens)
        return int(decode(handle, batch))

    def single(slots: Sequence[int]) -> list[NDArray[np.float32]]:
        context.decode([Chunk(slot, context.length(slot), [9], sample=True) for slot in slots])
        return [demo.logits(row) for row in range(len(slots))]

    monkeypatch.setattr(lib, "llama_decode", counted)
    monkeypatch.setattr(RowCounts, "best", lambda _counts, _turns, *, most: most)
    padded = single(range(1, 6))
    assert [context.length(slot) for slot in range(8)] == [3, 4, 4, 4, 4, 4, 3, 0]
    others = single([0, 6])
    monkeypatch.setattr(RowCounts, "best", lambda _counts, turns, *, most: turns)
    for slot in range(7):
        assert context.truncate(slot, 3)
    unpadded = single(range(1, 6))
    assert calls == [8, 2, 5]
    for row, expected in zip(padded, unpadded, strict=True):
        assert np.allclose(row, expected, atol=CLOSE)
    for slot, row in zip((0, 6), others, strict=True):
        assert context.truncate(slot, 0)
        demo.feed(slot, [5, 6 + slot, 7])
        assert np.allclose(row, demo.feed(slot, [9]), atol=CLOSE)
        assert not np.allclose(row, plain[slot], atol=CLOSE)


def test_only_single_tokens_are_decoded_apart(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts and drafts are not, nor is a single turn."""
    if demo.model.n_gpu_layers:
        pytest.skip("rows are counted on the processor alone")
    context = demo.context
    monkeypatch.setattr(RowCounts, "best", lambda _counts, _turns, *, most: 1)
    assert context.decodes_apart([Chunk(0, 0, [5], sample=True), Chunk(1, 0, [6], sample=True)])
    assert not context.decodes_apart([Chunk(0, 0, [5], sample=True)])
    assert not context.decodes_apart([Chunk(0, 0, [5], sample=True), Chunk(1, 0, [6, 7], sample=True)])
