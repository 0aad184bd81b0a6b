"""Tests of saved sequences: ``engine.llama.state``, and ``Context.save`` and ``restore`` on every kind of memory."""

from __future__ import annotations

import gc
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama import saved_state
from tests.engine.llama.tiny_models import WINDOW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.llama.conftest import Loaded

TOKENS = [3 + 7 * number % 250 for number in range(120)]
CLOSE = 1e-3


@pytest.fixture(params=["demo", "window", "hybrid", "recurrent"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """A model of each kind of memory, with empty slots."""
    model: Loaded = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def two(demo: Loaded) -> Iterator[Loaded]:
    """The demo model in a context of two slots."""
    with demo.with_slots(2) as loaded:
        yield loaded


def _saved(loaded: Loaded, slot: int) -> bytes:
    buffer = bytearray(loaded.context.state_bytes(slot))
    assert loaded.context.save(slot, memoryview(buffer)) == len(buffer) > 0
    return bytes(buffer)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("source", [0, 1])
def test_saved_sequence_fits_any_number_of_slots(loaded: Loaded, slots: int, source: int) -> None:
    """A sequence saved from either of two slots continues in the last of one, two, three or eight, bit for bit."""
    with loaded.with_slots(2) as two, loaded.with_slots(slots) as other:
        two.feed(source, TOKENS)
        saved = _saved(two, source)
        assert other.context.restore(slots - 1, memoryview(saved), len(TOKENS))
        assert other.context.length(slots - 1) == len(TOKENS)
        for token in (5, 6):
            assert np.array_equal(other.feed(slots - 1, [token]), two.feed(source, [token]))


def test_restore_does_not_affect_other_slots(loaded: Loaded) -> None:
    """Restoring into a used slot replaces its sequence only."""
    with loaded.with_slots(3) as three, loaded.with_slots(2) as two:
        two.feed(1, TOKENS)
        saved = _saved(two, 1)
        for slot in range(3):
            three.feed(slot, TOKENS[slot : 50 + slot])
        assert three.context.restore(1, memoryview(saved), len(TOKENS))
        assert np.array_equal(three.feed(1, [5]), two.feed(1, [5]))
        for slot in (0, 2):
            mine = three.feed(slot, [5])
            three.context.truncate(1, 0)
            three.feed(1, TOKENS[slot : 50 + slot])
            assert np.array_equal(mine, three.feed(1, [5]))


def test_save_is_repeatable(loaded: Loaded) -> None:
    """A slot continues after a save, and a restored sequence saves as the same bytes."""
    loaded.feed(0, TOKENS)
    saved = _saved(loaded, 0)
    assert loaded.context.restore(1, memoryview(saved), len(TOKENS))
    again = bytearray(_saved(loaded, 1))
    logits = loaded.feed(0, [5])
    assert np.array_equal(logits, loaded.feed(1, [5]))
    assert loaded.context.restore(0, memoryview(again), len(TOKENS))
    assert np.array_equal(logits, loaded.feed(0, [5]))


def test_save_writes_in_place_and_releases_the_buffer(two: Loaded) -> None:
    """Bytes beyond the sequence are unchanged, a longer buffer may be read, and no pointer is kept."""
    two.feed(0, TOKENS)
    size = two.context.state_bytes(0)
    buffer = bytearray(b"\xee" * (size + 100))
    gc.disable()
    try:
        view = memoryview(buffer)
        assert two.context.save(0, view) == size
        assert two.context.restore(1, view.toreadonly(), len(TOKENS))
        view.release()
        # A bytearray whose memory is exported cannot be resized.
        buffer += b"more"
    finally:
        gc.enable()
    assert buffer[size:] == b"\xee" * 100 + b"more"
    assert np.array_equal(two.feed(0, [5]), two.feed(1, [5]))


def test_restore_does_not_change_the_saved_bytes(two: Loaded) -> None:
    """Stream numbers are written into a copy: the saved bytes can be a file shared by several restores."""
    two.feed(1, TOKENS)
    saved = bytearray(_saved(two, 1))
    before = bytes(saved)
    with two.with_slots(8) as eight:
        assert eight.context.restore(3, memoryview(saved), len(TOKENS))
    assert saved == before


def test_unsupported_save_returns_nothing(two: Loaded) -> None:
    """An empty slot and a buffer that is too small save no bytes; a read-only buffer is refused."""
    assert two.context.state_bytes(0) == 0
    assert two.context.save(0, memoryview(bytearray(1000))) == 0
    two.feed(0, TOKENS)
    size = two.context.state_bytes(0)
    for room in (0, saved_state.HEADER_BYTES, size - 1):
        assert two.context.save(0, memoryview(bytearray(room))) == 0
    with pytest.raises(ValueError, match="read-only"):
        two.context.save(0, memoryview(bytes(size)))
    assert two.context.length(0) == len(TOKENS)


@pytest.mark.parametrize("n_tokens", [0, len(TOKENS) - 1, len(TOKENS) + 1, 10_000])
def test_another_number_of_tokens_is_refused(two: Loaded, n_tokens: int) -> None:
    """Restoring requires the exact number of tokens."""
    two.feed(0, TOKENS)
    saved = _saved(two, 0)
    two.feed(1, [1, 2, 3])
    assert not two.context.restore(1, memoryview(saved), n_tokens)
    assert two.context.length(1) == 0


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("kept", [0, 10, saved_state.HEADER_BYTES, saved_state.HEADER_BYTES + 8, 0.5, -1])
def test_truncated_sequence_is_refused(loaded: Loaded, slots: int, kept: float) -> None:
    """Nothing of it is restored, and the slot stays usable."""
    with loaded.with_slots(2) as two, loaded.with_slots(slots) as other:
        expected = two.feed(0, TOKENS)
        saved = _saved(two, 0)
        torn = saved[: int(kept * len(saved)) if isinstance(kept, float) else kept]
        other.feed(1, [1, 2, 3])
        assert not other.context.restore(1, memoryview(torn), len(TOKENS))
        assert other.context.length(1) == 0
        assert np.array_equal(other.feed(1, TOKENS), expected)


def test_sequence_of_another_model_is_refused(demo: Loaded, window: Loaded) -> None:
    """A KV of another shape is refused even with an equal fingerprint."""
    window.feed(0, TOKENS)
    assert not demo.context.restore(0, memoryview(_saved(window, 0)), len(TOKENS))
    demo.feed(0, TOKENS)
    assert not window.context.restore(0, memoryview(_saved(demo, 0)), len(TOKENS))
    assert (demo.context.length(0), window.context.length(0)) == (len(TOKENS), 0)


def test_sequence_longer_than_a_slot_is_refused(window: Loaded) -> None:
    """A context with shorter slots restores only what fits."""
    window.feed(0, TOKENS * 6)
    saved = _saved(window, 0)
    shorter = replace(window, options=window.options.replace(n_ctx=512))
    with shorter.with_slots(2) as small:
        assert not small.context.restore(0, memoryview(saved), len(TOKENS) * 6)
        window.context.truncate(0, 0)
        window.feed(0, TOKENS)
        assert small.context.restore(0, memoryview(_saved(window, 0)), len(TOKENS))
        assert np.array_equal(small.feed(0, [5]), window.feed(0, [5]))


def test_bytes_consumed_by_llama_cpp_are_checked(two: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of which llama.cpp read too little, or that ends at another position, is discarded."""
    two.feed(0, TOKENS)
    saved = _saved(two, 0)
    set_data = lib.llama_state_seq_set_data
    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_state_seq_set_data", lambda *arguments: set_data(*arguments) - 1)
        assert not two.context.restore(1, memoryview(saved), len(TOKENS))
    shorter = bytearray(saved)
    struct.pack_into("<I", shorter, 4, len(TOKENS) - 1)
    assert not two.context.restore(1, memoryview(shorter), len(TOKENS) - 1)
    assert two.context.length(1) == 0


def test_missing_window_is_detected(window: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored sequence whose first kept position lies inside the window is discarded."""
    window.feed(0, TOKENS)
    saved = _saved(window, 0)
    first_allowed = len(TOKENS) - WINDOW_TOKENS + 1
    for first_kept, taken in ((first_allowed, True), (first_allowed + 1, False)):
        with monkeypatch.context() as patch:
            patch.setattr(lib, "llama_memory_seq_pos_min", lambda *_arguments, first=first_kept: first)
            assert window.context.restore(1, memoryview(saved), len(TOKENS)) is taken
        assert window.context.length(1) == (len(TOKENS) if taken else 0)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("cut", [0, 1, 2, 20, 60])
def test_truncated_restored_window_is_correct_or_refused(window: Loaded, slots: int, cut: int) -> None:
    """After offload, restore and a cut, the next logits equal those of a fresh prefill, or the slot is empty."""
    window.feed(0, TOKENS)
    saved = _saved(window, 0)
    n_tokens = len(TOKENS) - cut
    expected = window.feed(1, [*TOKENS[:n_tokens], 5])
    with window.with_slots(slots) as other:
        assert other.context.restore(0, memoryview(saved), len(TOKENS))
        assert other.context.truncate(0, n_tokens) is (cut <= 1)
        if cut <= 1:
            assert np.allclose(other.feed(0, [5]), expected, atol=CLOSE)
        else:
            assert other.context.length(0) == 0


@pytest.mark.parametrize("name", ["recurrent", "hybrid"])
def test_recurrent_layers_are_restored_whole_or_not_at_all(request: pytest.FixtureRequest, name: str) -> None:
    """An offloaded recurrent state continues exactly; a cut empties the slot, and a new prefill is right."""
    loaded: Loaded = request.getfixturevalue(name)
    loaded.feed(0, TOKENS)
    saved = _saved(loaded, 0)
    expected = loaded.feed(0, [5])
    assert loaded.context.restore(1, memoryview(saved), len(TOKENS))
    assert np.array_equal(loaded.feed(1, [5]), expected)
    assert not loaded.context.can_truncate
    assert not loaded.context.truncate(1, 100)
    loaded.feed(1, TOKENS)
    assert np.array_equal(loaded.feed(1, [5]), expected)


def test_window_beside_recurrent_layers_moves_between_slots(hybrid_window: Loaded) -> None:
    """Within a context it is restored bit for bit; a context with other slots does not accept it."""
    hybrid_window.feed(0, TOKENS)
    saved = _saved(hybrid_window, 0)
    assert hybrid_window.context.restore(1, memoryview(saved), len(TOKENS))
    assert np.array_equal(hybrid_window.feed(1, [5]), hybrid_window.feed(0, [5]))
    with hybrid_window.with_slots(3) as three:
        assert not three.context.restore(1, memoryview(saved), len(TOKENS))
        assert three.context.length(1) == 0
    assert not hybrid_window.context.truncate(1, 100)


def test_unknown_memory_layout_fits_its_own_number_of_slots_only(two: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of an unexpected layout move within a context and are refused elsewhere."""
    monkeypatch.setattr(saved_state, "streamed_bytes", lambda full, *_sizes, **_kinds: (full - 100, 0))
    two.feed(0, TOKENS)
    saved = _saved(two, 0)
    assert two.context.restore(1, memoryview(saved), len(TOKENS))
    with two.with_slots(3) as three:
        assert not three.context.restore(1, memoryview(saved), len(TOKENS))
        assert three.context.length(1) == 0


def test_bytes_per_token_are_those_of_a_full_slot(loaded: Loaded) -> None:
    """The warm-up's figure equals the saved size of a full slot, divided by its tokens."""
    found = loaded.context.warm_up(1)
    n_ctx = loaded.context.n_ctx
    assert loaded.context.length(0) == 0
    loaded.feed(0, (TOKENS * 10)[:n_ctx])
    size = loaded.context.state_bytes(0) - saved_state.HEADER_BYTES
    assert abs(size - found * n_ctx) <= 2 * n_ctx
    loaded.context.truncate(0, 0)


def _written(slots: int, used: list[int], cells: list[bytes], rest: bytes) -> tuple[bytes, tuple[int, int]]:
    """Return a state as llama.cpp writes it, with a few bytes of cells, and the lengths of its parts."""
    parts = []
    for stream, each in zip(used, cells, strict=True):
        counts = [b"\0" * 4] * slots
        counts[stream] = struct.pack("<I", 1 + len(each)) + each
        parts.append(struct.pack("<I", slots) + b"".join(counts))
    lengths = [*map(len, parts), 0, 0]
    return b"PREFIX__" + b"".join(parts) + rest, (lengths[0], lengths[1])


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 8), st.binary(min_size=5, max_size=40)), min_size=1, max_size=2),
    st.binary(max_size=20),
)
def test_rewritten_state_equals_llama_cpps(
    before: int, after: int, parts: list[tuple[int, bytes]], rest: bytes
) -> None:
    """For any streams, cells and numbers of slots the same cells are in the last stream."""
    cells = [each for _, each in parts]
    data, lengths = _written(before, [stream % before for stream, _ in parts], cells, rest)
    layout = saved_state.Layout(1, before, len(data), lengths)
    expected, _ = _written(after, [after - 1] * len(parts), cells, rest)
    into = np.full(layout.size_with(after) + 8, 0xEE, np.uint8)
    assert saved_state.rewrite(memoryview(data), layout, slots=after, into=into)
    assert layout.size_with(after) == len(expected)
    assert bytes(into) == expected + b"\xee" * 8


@pytest.mark.parametrize(
    "part",
    [
        struct.pack("<6I", 3, 1, 9, 9, 0, 0),
        struct.pack("<6I", 2, 0, 0, 9, 9, 9),
        struct.pack("<6I", 2, 1, 9, 9, 9, 9),
        struct.pack("<3I", 2, 0, 1),
        struct.pack("<I", 2),
    ],
    ids=["other slots", "no cells", "two streams", "no room for cells", "no counts"],
)
def test_unexpected_parts_are_refused(part: bytes) -> None:
    """A part is rewritten only if it has the expected number of slots and exactly one stream has cells."""
    data = b"PREFIX__" + part
    layout = saved_state.Layout(1, 2, len(data), (len(part), 0))
    assert not saved_state.rewrite(memoryview(data), layout, slots=3, into=np.empty(100, np.uint8))


@given(st.binary(max_size=80))
def test_headers_are_read_back_or_refused(data: bytes) -> None:
    """Arbitrary bytes are never a header and never raise; a written header survives the round trip."""
    assert saved_state.Layout.read(memoryview(data)) is None
    layout = saved_state.Layout(7, 2, 8 + len(data), (len(data) // 2, len(data) // 4))
    buffer = bytearray(saved_state.HEADER_BYTES) + b"PREFIX__" + data
    layout.write(memoryview(buffer))
    assert saved_state.Layout.read(memoryview(buffer)) == layout
    assert saved_state.Layout.read(memoryview(buffer)[:-1]) is None
    assert saved_state.Layout.read(memoryview(b"IC" + bytes(buffer))) is None


def test_inconsistent_headers_are_refused() -> None:
    """Parts that exceed the whole, no slots and reserved bits make a header unreadable."""
    good = saved_state.Layout(7, 2, 40, (20, 12))
    for bad in (replace(good, streamed_bytes=(30, 3)), replace(good, slots=0), replace(good, size_bytes=7)):
        buffer = bytearray(saved_state.HEADER_BYTES + 40)
        bad.write(memoryview(buffer))
        assert saved_state.Layout.read(memoryview(buffer)) is None
    good.write(memoryview(buffer))
    assert saved_state.Layout.read(memoryview(buffer)) == good
    buffer[12] = 1
    assert saved_state.Layout.read(memoryview(buffer)) is None


def test_parts_follow_from_the_kind_of_memory() -> None:
    """Recurrent layers count no streams, a hybrid's attention does, and a window has its own part."""
    assert saved_state.streamed_bytes(108, 108, recurrent=False, hybrid=False) == (100, 0)
    assert saved_state.streamed_bytes(108, 48, recurrent=False, hybrid=False) == (60, 40)
    assert saved_state.streamed_bytes(108, 48, recurrent=False, hybrid=True) == (60, 0)
    assert saved_state.streamed_bytes(108, 108, recurrent=True, hybrid=False) == (0, 0)
