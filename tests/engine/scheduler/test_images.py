"""Prompts with images: which rows are encoded and decoded when, and what waits for pixels."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.engine.images import ImageSpan, ImageStore, find_spans
from inferencecenter.engine.scheduler.state import RequestState
from inferencecenter.ipc.images import ImageRef, row_ids
from tests.engine.scheduler.harness import GRID_TOKENS, SchedulerHarness

RUN_ROWS = 6
MARK = 7


class FakeProjector:
    """Cuts an image into runs of six rows between marks: as many as its width says."""

    def __init__(self) -> None:
        self.encoded: list[tuple[str, int]] = []

    def tokens(self, image: ImageRef) -> list[int]:
        """Return the tokens."""
        return [token for run in range(image.width) for token in (MARK, *row_ids(image, run, RUN_ROWS))]

    def encode(self, image: ImageRef, pixels: bytes, run: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Return rows of zeros."""
        assert pixels
        self.encoded.append((image.digest, run))
        return np.zeros((RUN_ROWS, 4), np.float32)

    def positions(self, image: ImageRef, run: int) -> None:
        """Each row has the next position."""


class Images:
    """Images, a store of them, and the digests that it requested."""

    def __init__(self, *, max_bytes: int = 10_000) -> None:
        self.projector = FakeProjector()
        self.requested: list[str] = []
        self.store = ImageStore(
            self.projector, fetch=lambda image: self.requested.append(image.digest), max_bytes=max_bytes
        )

    def deliver(self) -> None:
        """Put all requested pixels."""
        for digest in self.requested:
            self.store.put(digest, b"pixels")

    def spans(self, tokens: list[int], *images: ImageRef) -> tuple[ImageSpan, ...]:
        """Return the spans of a prompt."""
        return find_spans(tokens, images, self.projector)


ONE, TWO = ImageRef("one", 1, 1), ImageRef("two", 2, 1)


@pytest.fixture
def images() -> Images:
    """No image is there."""
    return Images()


def test_spans_are_found_by_their_rows(images: Images) -> None:
    """In any order, more than once, and next to each other; an unknown image is an error."""
    one, two = row_ids(ONE, 0, 6), [row_ids(TWO, run, 6) for run in range(2)]
    tokens = [1, *two[0], *two[1], 2, *one, *one]
    assert images.spans(tokens, ONE, TWO) == (
        (1, 7, TWO, 0, 2),
        (7, 13, TWO, 1, 2),
        (14, 20, ONE, 0, 1),
        (20, 26, ONE, 0, 1),
    )
    with pytest.raises(InferenceCenterError, match="not known"):
        images.spans(tokens, ONE)


def test_rows_depend_on_the_image_alone() -> None:
    """They are negative 32-bit numbers, the first of which do not depend on how many there are."""
    rows = row_ids(ONE, 0, 1000)
    assert all(-(2**31) <= row < 0 for row in rows)
    assert len({*rows, *row_ids(ONE, 1, 1000), *row_ids(TWO, 0, 1000)}) == 3000
    assert row_ids(ONE, 0, 10) == rows[:10]


def test_prompt_is_cut_at_its_images(images: Images) -> None:
    """Text before is prefilled while pixels are awaited, then the run as a pass of its own, then the rest."""
    harness = SchedulerHarness(images=images.store)
    prompt = [1, 2, 3, 4, 5, *images.projector.tokens(ONE), 6, 8]
    request = harness.add(prompt, spans=images.spans(prompt, ONE))
    harness.step()
    assert images.requested == ["one"]
    harness.run(2)
    assert request.kv_tokens == 6
    assert harness.scheduler.blocked
    images.deliver()
    assert not harness.scheduler.blocked
    encoding = harness.step().encoding
    assert encoding is not None
    assert encoding.span == (6, 12, ONE, 0, 1)
    assert [len(row.chunk.tokens) for each in harness.step().passes for row in each.rows] == [RUN_ROWS]
    harness.run_to_end()
    assert images.requested == ["one"]
    assert images.projector.encoded == [("one", 0)]


def test_others_wait_for_one_run_at_most(images: Images) -> None:
    """Between two runs of an image those who generate get a token."""
    harness = SchedulerHarness(images=images.store, answer_tokens=30)
    harness.add([1, 2, 3])
    harness.run(3)
    prompt = [*images.projector.tokens(ImageRef("tiles", 5, 1)), 6]
    harness.add(prompt, spans=images.spans(prompt, ImageRef("tiles", 5, 1)), answer_tokens=2)
    kinds = []
    while len(images.projector.encoded) < 5:
        images.deliver()
        plan = harness.step()
        kinds.append("encode" if plan.encoding else "prefill" if plan.passes[0].prefill else "decode")
    assert kinds.count("encode") == 5
    assert "encode encode" not in " ".join(kinds)
    assert "encode prefill" not in " ".join(kinds)
    harness.run_to_end()


def test_text_overtakes_a_prompt_that_waits_for_pixels(images: Images) -> None:
    """Also in the same slot count; it keeps its slot meanwhile."""
    harness = SchedulerHarness(images=images.store)
    prompt = [*images.projector.tokens(ONE), 6]
    waiting = harness.add(prompt, spans=images.spans(prompt, ONE))
    text = harness.add([9, 9, 9])
    harness.run(20, until=lambda: text.state is RequestState.DONE)
    assert text.state is RequestState.DONE
    assert waiting.state is RequestState.PREFILL
    assert harness.scheduler.blocked
    harness.abort(waiting.turn_id)
    assert not harness.scheduler.has_work


def test_cached_rows_need_no_pixels(images: Images) -> None:
    """The session's next turn builds on its KV."""
    harness = SchedulerHarness(images=images.store)
    prompt = [1, *images.projector.tokens(ONE), 6]
    first = harness.add(prompt, session="s", spans=images.spans(prompt, ONE))
    harness.step()
    images.deliver()
    harness.run_to_end()
    following = [*first.tokens, 5, 5, 5]
    second = harness.add(following, session="s", spans=images.spans(following, ONE))
    harness.run_to_end()
    assert second.cached_tokens == len(first.tokens) - 1
    assert images.requested == ["one"]
    assert len(images.projector.encoded) == 1


def test_prompt_that_ends_with_an_image_decodes_all_of_it_again(images: Images) -> None:
    """The last row is decoded for its logits, and a run is decoded as a whole."""
    harness = SchedulerHarness(images=images.store)
    prompt = [1, 2, 3, 4, 5, *images.projector.tokens(ONE)]
    spans = images.spans(prompt, ONE)
    harness.add(prompt, spans=spans)
    harness.step()
    images.deliver()
    harness.run_to_end()
    again = harness.add(prompt, spans=spans)
    harness.run_to_end()
    assert again.cached_tokens == spans[0].start


@pytest.mark.parametrize("seed", range(8))
def test_every_turn_ends_with_little_memory_for_images(seed: int) -> None:
    """Embeddings that are evicted before their use are computed again, however late pixels come."""
    rng = random.Random(seed)
    images = Images(max_bytes=RUN_ROWS * 16 * 2)
    harness = SchedulerHarness(images=images.store, slots=3)
    pictures = [ImageRef(f"image {number}", 1 + number % 2, 1) for number in range(4)]
    for number in range(12):
        chosen = rng.sample(pictures, rng.randrange(3))
        prompt = [number, *(token for image in chosen for token in images.projector.tokens(image)), 5, 6]
        if len(prompt) < 50:
            harness.add(prompt, client=f"c{number % 2}", spans=images.spans(prompt, *chosen))
    for _ in range(2000):
        if not harness.scheduler.has_work:
            break
        if rng.random() < 0.3:
            images.deliver()
        harness.step()
    assert not harness.scheduler.has_work
    assert images.store.size_bytes <= RUN_ROWS * 16 * 2 + len(b"pixels")


def test_pixels_are_freed_by_age(images: Images) -> None:
    """The least recently used image is evicted; one alone may exceed the limit; unrequested pixels are ignored."""
    store = images.store
    spans = [ImageSpan(0, RUN_ROWS, ImageRef(name, 1, 1), 0) for name in "abc"]
    store.put("a", b"unrequested")
    assert not store.can_encode(spans[0])
    for span, size_bytes in zip(spans, (4000, 4000, 4000), strict=True):
        store.request(span)
        store.request(span)
        store.put(span.image.digest, bytes(size_bytes))
    assert images.requested == ["a", "b", "c"]
    assert [store.can_encode(span) for span in spans] == [False, True, True]
    store.request(spans[0])
    store.put("a", bytes(20_000))
    assert [store.can_encode(span) for span in spans] == [True, False, False]
    store.drop("d")


def test_grid_is_that_of_the_prompt(images: Images) -> None:
    """Text after an image is cut at the same positions whatever is cached."""
    prompt = [*range(1, 6), *images.projector.tokens(ONE), *range(20, 40)]
    harness = SchedulerHarness(images=images.store)
    request = harness.add(prompt, spans=images.spans(prompt, ONE))
    ends = [request.chunk_end(0, GRID_TOKENS)]
    while ends[-1] < len(prompt):
        ends.append(request.chunk_end(ends[-1], GRID_TOKENS))
    assert ends == [4, 6, 12, 16, 20, 24, 28, 32]
