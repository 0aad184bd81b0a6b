"""Turns with images in a real engine process: the demo model with a projector of random weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from inferencecenter.ipc.images import ImageRef, is_row
from inferencecenter.ipc.messages import (
    AbortTurn,
    Failed,
    ImageData,
    ImageNeeded,
    PromptSegment,
    Started,
    StepOutput,
    Submit,
    TokenDelta,
    unpack_tokens,
)
from tests.engine.harness import submit
from tests.engine.llama.tiny_models import MODEL_WIDTH, write_mrope_model
from tests.engine.llama.tiny_projectors import ROWS, write_grid_projector, write_projector
from tests.engine.process import Child, demo_options, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from inferencecenter.ipc.engine_options import EngineOptions

DEMO_WIDTH = 192
GREEDY = b'{"temperature":0,"max_tokens":12,"n_probs":5}'
SIDE = 32


class Picture:
    """A picture of noise."""

    def __init__(self, seed: int, side: int = SIDE) -> None:
        self.pixels = np.random.default_rng(seed).integers(0, 256, 3 * side * side, np.uint8).tobytes()
        self.ref = ImageRef(hashlib.sha256(self.pixels).hexdigest(), side, side)


RED, BLUE = Picture(1), Picture(2)


def asking(turn_id: str, *pictures: Picture, session: str = "", history: bytes = b"", params: bytes = GREEDY) -> Submit:
    """Return a turn with pictures before its question; those of a history are in it already."""
    turn = submit(turn_id, "What is it?", session=session, tokens=history, params=params)
    if history:
        return msgspec.structs.replace(turn, images=tuple(picture.ref for picture in pictures))
    images = tuple(PromptSegment("", image=picture.ref) for picture in pictures)
    return msgspec.structs.replace(turn, pieces=(turn.pieces[0], *images, *turn.pieces[1:]))


def requested(child: Child) -> list[str]:
    """Return the digests of the images that the engine has requested."""
    return [frame.digest for frame in child.front.frames if isinstance(frame, ImageNeeded)]


def encodings(child: Child) -> int:
    """Return in how many steps an image was encoded."""
    outputs = (frame for frame in child.front.frames if isinstance(frame, StepOutput))
    return sum(output.work is not None and output.work.encode_s > 0 for output in outputs)


def answer(child: Child, *turns: Submit, pictures: tuple[Picture, ...] = (RED, BLUE)) -> list[str]:
    """Run turns, send the pixels that the engine requests meanwhile, and return the texts."""
    known = {picture.ref.digest: picture.pixels for picture in pictures}
    n_sent = len(requested(child))
    child.front.send(*turns)
    while not all(child.front.ended(turn.turn_id) for turn in turns):
        seen = len(child.front.frames)
        child.front.read_until(lambda seen=seen: len(child.front.frames) > seen)  # type: ignore[misc]
        for digest in requested(child)[n_sent:]:
            child.front.send(ImageData(digest, known.get(digest)))
            n_sent += 1
    return [child.front.text(turn.turn_id) for turn in turns]


def logprobs(child: Child, turn_id: str) -> NDArray[np.float64]:
    """Return those of the fifth likeliest token at each position of an answer.

    The demo model does not know pictures and is certain of its answer, but not of the others.
    """
    deltas = (event for event in child.front.events[turn_id] if isinstance(event, TokenDelta))
    return np.array([each.top[4].logprob for delta in deltas for each in delta.logprobs])


def started(child: Child, turn_id: str) -> Started:
    """Return a turn's beginning."""
    return next(event for event in child.front.events[turn_id] if isinstance(event, Started))


@pytest.fixture(scope="module")
def options(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """Options for the demo model with a projector."""
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_projector(path, n_embd=DEMO_WIDTH)
    return demo_options(demo_model_path, mmproj_path=str(path), prefill_grid_tokens=16)


@pytest.fixture
def child(options: EngineOptions) -> Iterator[Child]:
    """An engine with a projector."""
    with running(options) as child:
        yield child


def test_answer_depends_on_the_image(child: Child) -> None:
    """The engine requests the pixels once, and the prompt has a row for each of the projector's."""
    answer(child, asking("red", RED), asking("blue", BLUE), submit("blind", "What is it?", params=GREEDY))
    red, blue, blind = (logprobs(child, turn_id) for turn_id in ("red", "blue", "blind"))
    for one, other in ((red, blue), (red, blind), (blue, blind)):
        assert np.abs(one - other).max() > 0.3
    assert sorted(requested(child)) == sorted([RED.ref.digest, BLUE.ref.digest])
    assert sum(map(is_row, unpack_tokens(started(child, "red").tokens))) == ROWS
    assert encodings(child) == 2


def test_next_turn_uses_the_rows_in_kv(child: Child) -> None:
    """It needs neither pixels nor embeddings, and all of the history is cached."""
    answer(child, asking("one", RED, session="s"))
    history = child.front.history("one")
    answer(child, asking("two", RED, session="s", history=history))
    assert requested(child) == [RED.ref.digest]
    assert encodings(child) == 1
    # The last token of an answer is sampled and not decoded.
    assert started(child, "two").cached_tokens == len(unpack_tokens(history)) - 1


@pytest.fixture(scope="module")
def mrope_options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """Options for a model of random weights with M-RoPE, and a projector."""
    folder = tmp_path_factory.mktemp("mrope")
    write_mrope_model(folder / "model.gguf")
    write_grid_projector(folder / "mmproj.gguf", n_embd=MODEL_WIDTH)
    return demo_options(folder / "model.gguf", mmproj_path=str(folder / "mmproj.gguf"), prefill_grid_tokens=16)


@pytest.mark.parametrize("kind", ["options", "mrope_options"])
def test_lost_kv_is_computed_again(kind: str, request: pytest.FixtureRequest) -> None:
    """Another engine requests the image of the history, and answers as the first would have."""
    options: EngineOptions = request.getfixturevalue(kind)
    with running(options) as first:
        answer(first, asking("one", RED, session="s"))
        history = first.front.history("one")
        expected = answer(first, asking("two", RED, session="s", history=history))
        expected_logprobs = logprobs(first, "two")
    with running(options) as second:
        assert answer(second, asking("two", RED, session="s", history=history)) == expected
        assert requested(second) == [RED.ref.digest]
        # Prompts are prefilled in other chunks than answers are decoded in, which rounds differently.
        np.testing.assert_allclose(logprobs(second, "two"), expected_logprobs, atol=0.1)


def test_image_may_have_more_rows_than_a_batch(mrope_options: EngineOptions) -> None:
    """With M-RoPE it has up to a quarter of a slot: here 256, while a batch has 64."""
    large = Picture(3, side=512)
    with running(mrope_options.replace(n_ctx=1024)) as child:
        assert answer(child, asking("one", large, session="s"), pictures=(large,))[0]
        rows = [token for token in unpack_tokens(started(child, "one").tokens) if is_row(token)]
        answer(child, asking("two", large, session="s", history=child.front.history("one")), pictures=(large,))
        assert started(child, "two").cached_tokens > len(rows)
    assert len(rows) == 256


def test_image_of_many_sessions_is_encoded_once(child: Child) -> None:
    """Whether they ask at once or later, first for it or after another image."""
    turns = [asking(f"t{number}", RED) for number in range(8)]
    texts = answer(child, *turns)
    assert len(set(texts)) == 1
    for turn in turns[1:]:
        np.testing.assert_allclose(logprobs(child, turn.turn_id), logprobs(child, "t0"), atol=0.1)
    answer(child, asking("both", BLUE, RED), asking("again", RED, BLUE))
    assert sorted(requested(child)) == sorted([RED.ref.digest, BLUE.ref.digest])
    assert encodings(child) == 2


def test_turns_go_on_while_pixels_are_awaited(child: Child) -> None:
    """Text is generated for another client, and the turn that waits can be aborted."""
    endless = b'{"temperature":0,"ignore_eos":true,"max_tokens":100}'
    child.front.send(asking("waits", RED), submit("text", "Hello", params=endless))
    child.front.wait_for("text")
    assert requested(child) == [RED.ref.digest]
    assert not child.front.ended("waits")
    child.front.send(AbortTurn("waits"))
    assert child.front.finished("waits").reason == "aborted"
    # The pixels still come, for turns to come.
    child.front.send(ImageData(RED.ref.digest, RED.pixels))
    assert answer(child, asking("late", RED))[0]
    assert len(requested(child)) == 1


def test_missing_image_fails_its_turns_alone(child: Child) -> None:
    """The error says what to do; another turn is answered."""
    texts = answer(child, asking("gone", RED), submit("text", "Hello", params=GREEDY), pictures=())
    assert texts[1]
    (failed,) = (event for event in child.front.events["gone"] if isinstance(event, Failed))
    assert (failed.code, failed.field, failed.hint) == ("invalid_request", "images", "Send it again.")
    # It is requested anew by the next turn.
    assert answer(child, asking("again", RED))[0]


def test_pixels_of_another_size_fail_the_turn(child: Child) -> None:
    """The engine goes on."""
    wrong = Picture(1)
    wrong.pixels = wrong.pixels[:-3]
    answer(child, asking("t", wrong), pictures=(wrong,))
    assert any(isinstance(event, Failed) for event in child.front.events["t"])
    assert answer(child, submit("text", "Hello", params=GREEDY))[0]


def test_model_without_projector_refuses_images(demo_model_path: Path) -> None:
    """By name, and it goes on."""
    with running(demo_options(demo_model_path)) as child:
        answer(child, asking("t", RED))
        (failed,) = (event for event in child.front.events["t"] if isinstance(event, Failed))
        assert (failed.code, failed.field) == ("invalid_request", "images")
        assert answer(child, submit("text", "Hello", params=GREEDY))[0]


def test_image_at_the_end_of_a_prompt(child: Child) -> None:
    """The first token is sampled from its last row, also where another session has the same prompt in KV."""
    turn = asking("one", RED)
    turn = msgspec.structs.replace(turn, pieces=turn.pieces[:2])
    answers = [answer(child, msgspec.structs.replace(turn, turn_id=name, session_id=name))[0] for name in "abc"]
    assert answers[0]
    assert len(set(answers)) == 1


def test_repetition_penalties_ignore_rows(child: Child) -> None:
    """A row is no token of the vocabulary."""
    params = b'{"temperature":0,"max_tokens":8,"repeat_penalty":1.3,"repeat_last_n":-1,"dry_multiplier":0.8}'
    assert answer(child, asking("t", RED, params=params))[0]
    assert any(isinstance(event, TokenDelta) for event in child.front.events["t"])
