"""Vectors and scores by llama.cpp: the same in any batch, pooled as the file says, over the engine's own socket."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from benchmarks.model import SHAPES, write_model
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.embedding import normalized
from inferencecenter.engine.llama.embedder import LlamaEmbedder
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Embed, EmbeddingDelta, EmbeddingDone, EmbeddingInput
from tests.embedding_models import BertFile, write_embedding_model, write_reranking_model, write_topic_model
from tests.engine.process import child_of, demo_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

ROUNDING = 1e-3
"""Of scores: GELU rounds to 16 bits, and some processors add in another order in another batch."""


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[LlamaEmbedder]:
    """Load a model with one thread."""
    settings = {"kind": "embedding", "n_threads": 1, "n_ubatch": 64, "flash_attention": "off"} | options
    embedder = LlamaEmbedder.load(
        EngineOptions(model_path=str(path), **settings),
        on_progress=lambda _fraction: None,
        on_log=lambda _level, _line: None,
        on_tick=lambda: None,
    )
    try:
        yield embedder
    finally:
        embedder.close()


def vectors(embedder: LlamaEmbedder, *texts: str) -> NDArray[np.float32]:
    """Return the vectors of texts, of length 1, computed in one batch."""
    return normalized(embedder.embed([embedder.sequence(text) for text in texts]))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the mean of all tokens."""
    path = tmp_path_factory.mktemp("models") / "bert.gguf"
    write_embedding_model(path)
    return path


def test_vector_does_not_depend_on_the_batch(bert: Path) -> None:
    """It does not depend on earlier batches, either."""
    texts = ["the cat", "a dog barks in the road", "bread", "x" * 90]
    with loaded(bert) as embedder:
        together = vectors(embedder, *texts)
        alone = np.concatenate([vectors(embedder, text) for text in texts])
        np.testing.assert_allclose(together, alone, atol=1e-5)
        assert abs(together[0] @ together[1]) < 0.999


def test_texts_are_framed_by_special_tokens(bert: Path) -> None:
    """A BERT text begins with its class token and ends with a separator; names of special tokens are text."""
    with loaded(bert) as embedder:
        tokens = embedder.sequence("the [SEP]")
        assert (tokens[0], tokens[-1]) == (2, 3)
        assert 3 not in tokens[1:-1]
        assert embedder.pair("cat", "dog") == [2, *embedder.sequence("cat")[1:-1], 3, *embedder.sequence("dog")[1:-1]]


def test_text_length_is_limited_to_the_trained_context(bert: Path) -> None:
    """A longer n_ctx would use positions that the model does not have."""
    with loaded(bert, n_ctx=4096) as embedder:
        assert embedder.model.n_ctx == 128
        assert embedder.embed([[2] * 128]).shape == (1, 64)


def test_batch_has_at_most_as_many_texts_as_sequences(bert: Path) -> None:
    """llama.cpp limits the sequences of a batch."""
    with loaded(bert, n_ubatch=1024) as embedder:
        assert len(vectors(embedder, *["the cat"] * embedder.max_texts)) == embedder.max_texts


def test_similar_texts_have_similar_vectors(tmp_path: Path) -> None:
    """Texts of one topic are closer to each other than to those of another."""
    write_topic_model(tmp_path / "topics.gguf")
    with loaded(tmp_path / "topics.gguf") as embedder:
        question, near, far = vectors(embedder, "the cat", "dog and puppy", "the engine of the car")
        assert question @ near > question @ far + 0.2


def test_decoder_can_embed_by_its_last_token(tmp_path: Path) -> None:
    """A text generator without pooling, configured for embeddings, returns the vector of the last token."""
    write_model(tmp_path / "tiny.gguf", SHAPES["tiny"], name="tiny")
    with loaded(tmp_path / "tiny.gguf", n_ctx=64) as embedder:
        first = vectors(embedder, "one text", "another text")
        again = vectors(embedder, "another text", "one text")
        np.testing.assert_allclose(first, again[::-1], atol=1e-5)
        assert first.shape == (2, 64)


def test_encoder_without_pooling_uses_the_mean(tmp_path: Path, bert: Path) -> None:
    """Its vectors equal those of a file that specifies the mean."""
    model = BertFile(tmp_path / "unstated.gguf", pooling=None)
    model.tensor("token_embd.weight", len(model.tokens), model.width)
    model.close()
    with loaded(tmp_path / "unstated.gguf") as embedder:
        unstated = vectors(embedder, "the cat")
    with loaded(bert) as embedder:
        np.testing.assert_allclose(unstated, vectors(embedder, "the cat"), atol=1e-6)


def test_documents_get_scores(tmp_path: Path) -> None:
    """A reranking model gives one number for each document, whatever is beside it in the batch."""
    write_reranking_model(tmp_path / "rerank.gguf")
    with loaded(tmp_path / "rerank.gguf", kind="reranking") as embedder:
        pairs = [embedder.pair("the cat", document) for document in ("a dog", "the car drives")]
        scores = embedder.embed(pairs)
        assert scores.shape == (2, 1)
        np.testing.assert_allclose(scores[1], embedder.embed(pairs[1:])[0], atol=ROUNDING)
        assert abs(scores[0] - scores[1]) > 100 * ROUNDING


def test_reranker_without_a_classification_head_is_refused(bert: Path) -> None:
    """llama.cpp would abort the process."""
    with pytest.raises(InferenceCenterError, match="no classification head") as refused, loaded(bert, kind="reranking"):
        pass
    assert refused.value.code is ErrorCode.INVALID_MODEL_FILE


def test_template_of_the_file_joins_query_and_document(tmp_path: Path) -> None:
    """The text between the placeholders may hold special tokens; query and document are plain text."""
    model = BertFile(tmp_path / "template.gguf", pooling=gguf.PoolingType.RANK)
    model.writer.add_string("tokenizer.chat_template.rerank", "[CLS]{query}[SEP]{document}[MASK]")
    model.tensor("token_embd.weight", len(model.tokens), model.width)
    model.linear("cls", model.width, model.width)
    model.linear("cls.output", 1, model.width)
    model.close()
    with loaded(tmp_path / "template.gguf", kind="reranking") as embedder:
        tokens = embedder.pair("cat {document}", "dog [SEP]")
        assert (tokens[0], tokens[-1], tokens.count(3)) == (2, 4, 1)
        assert embedder.tokenize([], first=False) == []


def test_engine_process_computes_embeddings(bert: Path) -> None:
    """They equal those computed in the test."""
    child = child_of(demo_options(bert, kind="embedding", flash_attention="off"))
    model = child.ready()
    assert (model.kind, model.n_embd, model.n_ctx) == ("embedding", 64, 128)
    front = child.front
    inputs = (EmbeddingInput("the cat"), EmbeddingInput("a dog"))
    front.send(Embed(turn_id="one", client_id="ada", priority=1, inputs=inputs))
    front.read_until(lambda: any(isinstance(event, EmbeddingDone) for event in front.events.get("one", ())))
    deltas = [event for event in front.events["one"] if isinstance(event, EmbeddingDelta)]
    found = np.frombuffer(b"".join(delta.vectors for delta in deltas), "<f4").reshape(2, 64)
    with loaded(bert) as embedder:
        np.testing.assert_allclose(found, vectors(embedder, "the cat", "a dog"), atol=1e-5)
    assert sum(delta.n_tokens for delta in deltas) == 4 + 4
    front.close()
    assert child.wait() == 0
