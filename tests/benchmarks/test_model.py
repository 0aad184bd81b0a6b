"""Tests of ``benchmarks.model``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from typer import Typer
from typer.testing import CliRunner

from benchmarks.model import Q4_0, SHAPES, Shape, main, write_model
from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import LlamaContext
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import PromptSegment

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TINY = SHAPES["tiny"]


def _logits(path: Path, text: str, *, n_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
    """Prefill a text and generate greedily; return the text's tokens and the logits of every step."""
    options = EngineOptions(
        backend="llama", parent_pid=1, model_path=str(path), slots=1, n_ctx=256, n_threads=1, n_batch=64, n_ubatch=64
    )
    log = LlamaLog(lambda _level, _line: None)
    model = LlamaModel.load(options, on_progress=lambda _fraction: None, log=log)
    context = LlamaContext(model, options, n_threads=1, log=log)
    prompt = fed = model.vocab.tokenize([PromptSegment(text)], first=True)
    rows: list[NDArray[np.float32]] = []
    for _ in range(n_tokens):
        context.decode([Chunk(0, context.length(0), fed, sample=True)])
        pointer = lib.llama_get_logits_ith(context.handle, context.batch_index(0))
        rows.append(np.ctypeslib.as_array(pointer, (model.vocab.n_tokens,)).copy())
        fed = [int(rows[-1].argmax())]
    context.close()
    model.close()
    return prompt, np.stack(rows)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TINY, id="qwen2-q8_0"),
        pytest.param(
            replace(TINY, architecture="llama", pretokenizer="llama-bpe", tied=False, biased=False, weights=Q4_0),
            id="llama-q4_0",
        ),
    ],
)
def test_llama_cpp_runs_the_model(tmp_path: Path, shape: Shape) -> None:
    """It loads every architecture and type; logits are finite, spread out and different at each step."""
    path = tmp_path / "model.gguf"
    write_model(path, shape, name="tiny")

    _, logits = _logits(path, " a b c", n_tokens=24)

    assert logits.shape == (24, shape.vocabulary)
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 0.1
    assert len(np.unique(logits[:, 0])) == 24


def test_words_and_bytes_have_known_token_counts(tmp_path: Path) -> None:
    """A letter after a space is one token; any other text is one token a byte."""
    path = tmp_path / "model.gguf"
    write_model(path, replace(TINY, layers=1), name="tiny")

    assert len(_logits(path, " a b z", n_tokens=1)[0]) == 3
    assert len(_logits(path, "no é\n", n_tokens=1)[0]) == 6


def test_seed_determines_the_file(tmp_path: Path) -> None:
    """Equal seeds give equal bytes."""
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        write_model(path, TINY, name="tiny", seed=seed)

    first, same, other = (path.read_bytes() for path in files)

    assert first == same
    assert len(first) == len(other)
    assert first != other


@pytest.mark.parametrize(("arguments", "layers"), [([], 2), (["--layers", "5"], 5)])
def test_command_writes_the_requested_layers(tmp_path: Path, arguments: list[str], layers: int) -> None:
    """It writes the named shape and prints size, layers and type."""
    app = Typer()
    app.command()(main)
    path = tmp_path / "model.gguf"

    result = CliRunner().invoke(app, ["tiny", str(path), *arguments])

    assert result.exit_code == 0
    assert f"{layers} layers, Q8_0" in result.output
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert f"blk.{layers - 1}.ffn_down.weight" in names
    assert f"blk.{layers}.ffn_down.weight" not in names


def test_shapes_have_their_models_parameter_counts() -> None:
    """The counts are those of the model cards; tied embeddings count once."""

    def parameters(shape: Shape) -> float:
        layer = 2 * shape.width * (shape.width + shape.kv_width) + 3 * shape.width * shape.ffn
        return shape.layers * layer + shape.vocabulary * shape.width * (1 if shape.tied else 2)

    assert parameters(SHAPES["qwen2.5-0.5b"]) == pytest.approx(0.494e9, rel=0.01)
    assert parameters(SHAPES["qwen2.5-1.5b"]) == pytest.approx(1.54e9, rel=0.01)
    assert parameters(SHAPES["llama3.2-1b"]) == pytest.approx(1.236e9, rel=0.01)
    assert parameters(SHAPES["llama3.1-8b"]) == pytest.approx(8.03e9, rel=0.01)


def test_vocabulary_of_another_file_is_copied(tmp_path: Path) -> None:
    """Its special tokens and template are copied, too; the weights are random."""
    source, path = tmp_path / "source.gguf", tmp_path / "model.gguf"
    write_model(source, replace(TINY, layers=1, width=32), name="source")

    write_model(path, TINY, name="tiny", vocabulary=source)

    fields, own = gguf.GGUFReader(path).fields, tmp_path / "own.gguf"
    write_model(own, TINY, name="tiny")
    expected = {name: field.contents() for name, field in gguf.GGUFReader(own).fields.items()}
    assert {name: field.contents() for name, field in fields.items()} == expected
    assert len(_logits(path, " a b z", n_tokens=1)[0]) == 3


def test_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    """So is a file without one."""
    source = tmp_path / "source.gguf"
    write_model(source, replace(TINY, layers=1, vocabulary=600), name="source")
    app = Typer()
    app.command()(main)

    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "model.gguf"), "--vocabulary", str(source)])

    assert result.exit_code == 2
    assert "600 tokens" in result.output
