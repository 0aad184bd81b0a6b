"""The loop of an embedding engine: batches, fairness, errors and the end of requests, with the echo embedder."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inferencecenter.engine.backend import EmbeddingError
from inferencecenter.engine.echo import EchoEmbedder
from inferencecenter.engine.embedding import EmbeddingLoop, EmbeddingQueue, EmbeddingRequest, normalized
from inferencecenter.engine.inbox import FrontDisconnected, Inbox, ReceivedCommand
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import (
    AbortTurn,
    Cancelled,
    Embed,
    EmbeddingDelta,
    EmbeddingDone,
    EmbeddingInput,
    EngineLimits,
    Failed,
    FromEngine,
    StepOutput,
    Submit,
    Suspend,
    Suspended,
    ToEngine,
    Tokenized,
    TokenizeRequest,
    TurnEvent,
    pack_tokens,
)
from tests.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TIMEOUT_S = 60  # as in tests.engine.harness


class GatedEmbedder(EchoEmbedder):
    """An echo embedder that computes when a test allows it, and fails for a text that begins with byte 255."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[list[bytes]] = []

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Record a batch and compute it."""
        self.batches.append([bytes(token % 256 for token in text) for text in texts])
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if any(text[0] == 255 for text in texts):
            raise EmbeddingError("cannot be computed")
        return super().embed(texts)


class EmbeddingEngine:
    """A loop on a thread; what it sends is collected by turn."""

    def __init__(self, **options: Any) -> None:
        settings = {"kind": "embedding", "n_ctx": 100, "n_ubatch": 64, "n_batch": 64, "worker_threads": 1} | options
        configured = EngineOptions(backend="echo", parent_pid=0, **settings)
        self.embedder = GatedEmbedder(configured)
        self.inbox = Inbox()
        self.heartbeat = Heartbeat.create()
        self.frames: list[FromEngine] = []
        self.events: dict[str, list[TurnEvent]] = {}
        self._sent: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        loop = EmbeddingLoop(
            self.embedder,
            configured,
            inbox=self.inbox,
            heartbeat=self.heartbeat,
            send=self._sent.put,
            clock=time.monotonic,
        )
        self._thread = threading.Thread(target=loop.run, daemon=True)
        self._thread.start()
        leftovers.callback(self.stop)

    def send(self, *messages: ToEngine) -> None:
        """Put commands into the loop's inbox."""
        for message in messages:
            self.inbox.put(ReceivedCommand(message, time.monotonic()))  # type: ignore[arg-type]

    def hold(self) -> None:
        """Let the loop enter a batch and no further, until ``release``; what is sent meanwhile comes together."""
        self.embedder.gate.clear()
        self.send(embed("held", "x"))
        assert self.embedder.entered.wait(TIMEOUT_S)
        self.embedder.batches.clear()

    def release(self) -> None:
        """Let the loop compute."""
        self.embedder.gate.set()

    def wait_for(self, *turn_ids: str) -> None:
        """Read until these requests have ended."""
        while not all(self.ended(turn_id) for turn_id in turn_ids):
            self.read()

    def read(self) -> FromEngine:
        """Read a frame."""
        frame = self._sent.get(timeout=TIMEOUT_S)
        self.frames.append(frame)
        for event in frame.events if isinstance(frame, StepOutput) else ():
            self.events.setdefault(event.turn_id, []).append(event)
        return frame

    def ended(self, turn_id: str) -> bool:
        """Return whether the terminal event has come."""
        return any(isinstance(event, EmbeddingDone | Failed | Cancelled) for event in self.events.get(turn_id, ()))

    def vectors(self, turn_id: str) -> NDArray[np.float32]:
        """Return the vectors of a request that succeeded, a row for each input."""
        self.wait_for(turn_id)
        deltas = [event for event in self.events[turn_id] if isinstance(event, EmbeddingDelta)]
        assert isinstance(self.events[turn_id][-1], EmbeddingDone)
        packed = b"".join(delta.vectors for delta in deltas)
        return np.frombuffer(packed, "<f4").reshape(sum(delta.n_inputs for delta in deltas), -1)

    def failure(self, turn_id: str) -> Failed:
        """Return how a request failed."""
        self.wait_for(turn_id)
        last = self.events[turn_id][-1]
        assert isinstance(last, Failed), last
        return last

    def stop(self) -> None:
        """End the loop."""
        self.embedder.gate.set()
        self.inbox.put(FrontDisconnected())
        self._thread.join(TIMEOUT_S)


def embed(turn_id: str, *inputs: str | bytes, client: str = "ada", **more: Any) -> Embed:
    """Return a request of a client."""
    texts = tuple(EmbeddingInput(each) if isinstance(each, str) else EmbeddingInput(tokens=each) for each in inputs)
    return Embed(turn_id=turn_id, client_id=client, inputs=texts, **({"priority": 1} | more))


def expected(*texts: str) -> NDArray[np.float32]:
    """Return what the echo embedder makes of texts."""
    counts = [np.bincount([byte % 16 for byte in text.encode()], minlength=16) for text in texts]
    return normalized(np.array(counts, np.float32))


def test_each_input_gets_a_vector_of_length_1() -> None:
    """The vectors of a request come in the order of its inputs, and are normalized."""
    engine = EmbeddingEngine()
    engine.send(embed("one", "the cat", "a dog", "a car"))
    vectors = engine.vectors("one")
    np.testing.assert_allclose(vectors, expected("the cat", "a dog", "a car"), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)


def test_tokens_are_taken_as_they_are() -> None:
    """An input of packed tokens is not tokenized again."""
    engine = EmbeddingEngine()
    engine.send(embed("one", pack_tokens([97, 98]), "ab"))
    vectors = engine.vectors("one")
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_requests_of_several_clients_share_a_batch() -> None:
    """Texts of different requests are computed together, up to the batch's number of tokens."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("ada", "a" * 10, "b" * 10), embed("bob", "c" * 10, client="bob"))
    engine.release()
    engine.wait_for("ada", "bob")
    assert len(engine.embedder.batches) == 1
    assert len(engine.embedder.batches[0]) == 3


def test_batch_is_limited_in_tokens_unless_it_has_one_text() -> None:
    """A batch is closed before the text that would exceed it; a longer text is computed alone."""
    engine = EmbeddingEngine()
    engine.send(embed("one", "a" * 40, "b" * 40, "c" * 90, "d" * 30, "e" * 30))
    engine.wait_for("one")
    assert [[len(text) for text in batch] for batch in engine.embedder.batches] == [[40], [40], [90], [30, 30]]


def test_dimensions_shorten_and_renormalize() -> None:
    """Shortened vectors have their first numbers, and length 1."""
    engine = EmbeddingEngine()
    engine.send(embed("whole", "some text", dimensions=16), embed("short", "some text", dimensions=6, matryoshka=True))
    short = engine.vectors("short")
    np.testing.assert_allclose(short, normalized(engine.vectors("whole")[:, :6]), rtol=1e-6)


def test_long_request_is_tokenized_by_the_workers() -> None:
    """The loop computes other requests meanwhile."""
    engine = EmbeddingEngine()
    texts = ["many words" * 5] * 200
    engine.send(embed("long", *texts), embed("short", "text"))
    assert engine.vectors("long").shape == (200, 16)
    engine.wait_for("short")


def test_abort_cancels_the_tokenization_of_a_long_request() -> None:
    """Its result is dropped."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("long", *["many words" * 5] * 200), AbortTurn("long"), embed("short", "text"))
    engine.release()
    engine.wait_for("long", "short")
    assert engine.events["long"] == [Cancelled("long")]
    assert engine.embedder.batches == [[b"text"]]


def test_oversized_text_is_named_by_its_index() -> None:
    """The request fails as a whole, before any computation; the index counts inputs computed earlier."""
    engine = EmbeddingEngine()
    engine.send(embed("one", "short", "x" * 101, done=3))
    failure = engine.failure("one")
    assert (failure.code, failure.field) == ("prompt_too_long", "input.4")
    assert "input.4 has 101 tokens" in failure.message
    assert "100" in failure.message
    assert engine.embedder.batches == []


def test_text_is_truncated_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that the model wants at the end stay; tokens that a client sent are refused all the same."""
    monkeypatch.setattr(GatedEmbedder, "sequence", lambda _self, text: [*text.encode(), 1, 2])
    engine = EmbeddingEngine()
    engine.send(embed("one", "x" * 150, "y" * 98, truncate=True))
    engine.wait_for("one")
    assert [text for batch in engine.embedder.batches for text in batch] == [
        b"x" * 98 + bytes([1, 2]),
        b"y" * 98 + bytes([1, 2]),
    ]
    engine.send(embed("two", pack_tokens([5] * 101), truncate=True))
    assert engine.failure("two").code == "prompt_too_long"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (embed("one", b""), "input.0"),
        (embed("one", pack_tokens([5, 999])), "input.0"),
        (embed("one", "text", dimensions=17, matryoshka=True), "dimensions"),
        (embed("one", "text", dimensions=8), "dimensions"),
        (embed("one", "text", query="what?"), "model"),
    ],
)
def test_invalid_embedding_request_is_refused(request_: Embed, field: str) -> None:
    """Empty inputs, unknown token ids, too many dimensions and documents are refused by name."""
    engine = EmbeddingEngine()
    engine.send(request_)
    failure = engine.failure("one")
    assert (failure.code, failure.field) == ("invalid_request", field)


def test_turn_on_an_embedding_model_is_refused() -> None:
    """An embedding model generates no text."""
    engine = EmbeddingEngine()
    engine.send(
        Submit(turn_id="one", session_id="one", client_id="ada", priority=1, tokens=b"", pieces=(), params_json=b"{}")
    )
    assert engine.failure("one").code == "invalid_request"


def test_documents_are_scored_for_their_query() -> None:
    """A reranking model gives one number for each document, not normalized; it refuses plain texts."""
    engine = EmbeddingEngine(kind="reranking")
    engine.send(embed("one", "abc", "xyz", "abx", query="abcd"), embed("two", "abc"))
    assert engine.vectors("one").tolist() == [[3], [0], [2]]
    assert engine.failure("two").field == "model"


def test_failing_text_fails_only_its_request() -> None:
    """A failed batch is repeated text by text, so that other requests get their vectors."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("bad", pack_tokens([255]), "fine"), embed("good", "text", client="bob"))
    engine.release()
    assert engine.failure("bad").code == "internal"
    np.testing.assert_allclose(engine.vectors("good"), expected("text"), rtol=1e-6)
    assert len(engine.events["bad"]) == 1


def test_numbers_that_are_not_finite_are_an_error() -> None:
    """A model that computes NaN gives no vectors that a client would store."""
    engine = EmbeddingEngine()
    engine.embedder.embed = lambda texts: np.full((len(texts), 16), np.nan, np.float32)  # type: ignore[method-assign]
    engine.send(embed("one", "text"))
    assert engine.failure("one").code == "internal"


def test_aborted_request_ends_at_once_and_costs_one_batch() -> None:
    """Its remaining texts are not computed."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("one", *["a" * 60] * 5), embed("two", "text", client="bob"))
    engine.send(AbortTurn("one"), AbortTurn("unknown"))
    engine.release()
    engine.wait_for("one", "two")
    assert engine.events["one"] == [Cancelled("one")]
    assert engine.embedder.batches == [[b"text"]]


def test_suspending_drops_requests_without_events() -> None:
    """The next engine receives them, so the suspended one sends no event for them."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("one", "text"), Suspend())
    engine.release()
    while not isinstance(engine.read(), Suspended):
        pass
    assert "one" not in engine.events


def test_texts_are_tokenized_for_lookups_too() -> None:
    """`/tokenize` works with an embedding model."""
    engine = EmbeddingEngine()
    engine.send(TokenizeRequest(7, (), first=True))
    while not isinstance(frame := engine.read(), Tokenized):
        pass
    assert frame.lookup_id == 7


def test_barred_classes_wait_for_the_next_limits() -> None:
    """While only interactive requests may run, others wait, and run when the limits are lifted."""
    engine = EmbeddingEngine()
    engine.send(EngineLimits(active_slots=1, lowest_class=0), embed("batch", "b", priority=2))
    engine.send(embed("urgent", "u", priority=0))
    engine.wait_for("urgent")
    assert not engine.ended("batch")
    engine.send(EngineLimits(active_slots=1))
    engine.wait_for("batch")


def test_waiting_request_times_out() -> None:
    """With a queue timeout a request that has not started in time fails."""
    engine = EmbeddingEngine(queue_timeout_s=0.001)
    engine.send(EngineLimits(active_slots=1, lowest_class=0), embed("one", "text", priority=2))
    assert engine.failure("one").code == "queue_timeout"


def test_heartbeat_lists_the_requests_of_a_batch() -> None:
    """If the engine dies in a batch, its requests are suspects, and no others."""
    engine = EmbeddingEngine()
    engine.hold()
    engine.send(embed("one", "text"))
    assert engine.heartbeat.suspects[0] == "held"
    engine.release()
    engine.wait_for("one")
    assert engine.heartbeat.suspects == ()


def _request(
    turn_id: str, client: str, lengths: Sequence[int], *, priority: int = 1, at_s: float = 0
) -> EmbeddingRequest:
    request = EmbeddingRequest(embed(turn_id, client=client, priority=priority), at_s, 1)
    request.texts = [[0] * length for length in lengths]
    return request


def _take(line: EmbeddingQueue, *, now: float = 0, lowest_class: int = 2, max_tokens: int = 10) -> list[str]:
    batch = line.take(max_tokens=max_tokens, max_texts=100, lowest_class=lowest_class, now=now)
    return [text.request.turn_id for text in batch]


def test_clients_share_batches_by_tokens() -> None:
    """A client with many texts does not delay another client's few; long texts count more than short ones."""
    line = EmbeddingQueue(ageing_s=30)
    line.add(_request("many", "ada", [1] * 100))
    assert _take(line) == ["many"] * 10
    line.add(_request("few", "bob", [2] * 3))
    assert [_take(line).count("few") for _ in range(2)] == [2, 1]


def test_new_client_starts_at_the_service_of_waiting_ones() -> None:
    """The length of its idle time does not matter."""
    line = EmbeddingQueue(ageing_s=30)
    line.add(_request("first", "ada", [1] * 100))
    for _ in range(5):
        _take(line)
    line.add(_request("second", "bob", [1] * 100))
    assert sorted(_take(line)) == ["first"] * 5 + ["second"] * 5


def test_higher_classes_go_first_and_waiting_raises_a_class() -> None:
    """Interactive requests precede others, until those have waited long enough."""
    line = EmbeddingQueue(ageing_s=30)
    line.add(_request("batch", "ada", [10], priority=2, at_s=0))
    line.add(_request("normal", "bob", [10], priority=1, at_s=59))
    assert _take(line, now=61) == ["batch"]
    assert _take(line, now=61) == ["normal"]
    assert not line


def test_queue_drops_clients_without_requests() -> None:
    """No entry of a client outlives its requests."""
    line = EmbeddingQueue(ageing_s=30)
    request = _request("one", "ada", [1])
    line.add(request)
    line.discard(request)
    assert not line
    assert _take(line) == []
    assert not line._served
