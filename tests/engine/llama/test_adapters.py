"""Tests of ``engine.llama.adapters``, with adapters made for the demo model."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inferencecenter.config.sections import LoraSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.llama.backend import LlamaBackend, LlamaContext
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.engine.llama.saved_state import fingerprint
from inferencecenter.ipc.messages import Adapter, PromptSegment
from tests.engine.llama.conftest import Loaded
from tests.engine.llama.lora_files import random_tensors, write_adapter
from tests.engine.parked import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.ipc.engine_options import EngineOptions

PLAIN = "The capital of France is Paris."


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter's file."""
    return write_adapter(tmp_path_factory.mktemp("lora") / "wanderer.gguf")


@contextmanager
def _adapted(options: EngineOptions, log: LlamaLog, *adapters: LoraSettings) -> Iterator[Loaded]:
    options = options.replace(slots=2, lora=adapters)
    model = LlamaModel.load(options, on_progress=lambda _fraction: None, log=log)
    context = LlamaContext(model, options, n_threads=1, log=log)
    yield Loaded(model, context, options)
    context.close()
    model.close()


def _answer(loaded: Loaded, slot: int = 0) -> str:
    vocab = loaded.model.vocab
    pieces = [
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment("What is the capital of France?"),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    ]
    tokens, _ = loaded.greedy(slot, vocab.tokenize(pieces, first=True), 16)
    end = next((place for place, token in enumerate(tokens) if vocab.is_end(token)), len(tokens))
    return b"".join(map(vocab.token_bytes, tokens[:end])).decode()


def _refusal(options: EngineOptions, log: LlamaLog, path: Path) -> InferenceCenterError:
    with (
        pytest.raises(InferenceCenterError) as refusal,
        _adapted(options, log, LoraSettings(path=path)),
    ):
        pass
    assert refusal.value.code is ErrorCode.INVALID_MODEL_FILE
    assert refusal.value.field == "lora"
    assert refusal.value.hint
    assert str(path) in refusal.value.message
    return refusal.value


def test_adapter_effect_follows_its_scale(options: EngineOptions, log: LlamaLog, adapter: Path) -> None:
    """Scale 1 changes the answer, scale 0 changes nothing, and a scale between differs from both."""
    logits = {}
    for scale in (0.0, 0.5, 1.0):
        with _adapted(options, log, LoraSettings(path=adapter, scale=scale)) as loaded:
            assert (_answer(loaded) == PLAIN) is (scale < 1)
            logits[scale] = loaded.feed(1, [loaded.model.vocab.bos])
    with _adapted(options, log) as loaded:
        assert _answer(loaded) == PLAIN
        np.testing.assert_array_equal(loaded.feed(1, [loaded.model.vocab.bos]), logits[0.0])
    assert not np.allclose(logits[0.5], logits[0.0], atol=0.1)
    assert not np.allclose(logits[0.5], logits[1.0], atol=0.1)


def test_several_adapters_are_combined(options: EngineOptions, log: LlamaLog, adapter: Path) -> None:
    """Two opposite adapters cancel out, up to rounding."""
    pair = (LoraSettings(path=adapter, scale=1.0), LoraSettings(path=adapter, scale=-1.0))
    with _adapted(options, log, *pair) as both, _adapted(options, log) as plain:
        bos = [plain.model.vocab.bos]
        np.testing.assert_allclose(both.feed(1, bos), plain.feed(1, bos), atol=0.01)
        assert both.model.info(both.options, n_threads=1).lora == (
            Adapter(str(adapter), 1.0),
            Adapter(str(adapter), -1.0),
        )


def test_every_context_of_a_model_has_its_adapters(options: EngineOptions, log: LlamaLog, adapter: Path) -> None:
    """A context that is created later with other slots has them, too."""
    with _adapted(options, log, LoraSettings(path=adapter)) as loaded, loaded.with_slots(1) as later:
        assert _answer(later) == _answer(loaded) != PLAIN


def test_fingerprint_covers_adapter_and_scale(
    options: EngineOptions, log: LlamaLog, adapter: Path, tmp_path: Path
) -> None:
    """All that changes the KV changes the fingerprint; the file's path and an adapter of scale 0 do not."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(adapter.read_bytes())
    other = write_adapter(tmp_path / "other.gguf", tensors=random_tensors(seed=2))
    cases = {
        "plain": (),
        "whole": (LoraSettings(path=adapter),),
        "half": (LoraSettings(path=adapter, scale=0.5),),
        "other": (LoraSettings(path=other),),
        "both": (LoraSettings(path=adapter), LoraSettings(path=other)),
        "copy": (LoraSettings(path=copy),),
        "none": (LoraSettings(path=adapter, scale=0.0),),
    }
    digests = {}
    for name, adapters in cases.items():
        with _adapted(options, log, *adapters) as loaded:
            digests[name] = fingerprint(loaded.model, loaded.options)
    assert digests["copy"] == digests["whole"]
    assert digests["none"] == digests["plain"]
    assert len(set(digests.values())) == len(digests) - 2


def test_kv_of_other_adapters_is_not_found(options: EngineOptions, adapter: Path, tmp_path: Path) -> None:
    """An engine recovers entries of the same adapter, and deletes those of another scale."""
    found = []
    for scale in (1.0, 1.0, 0.5):
        adapted = options.replace(slots=2, lora=(LoraSettings(path=adapter, scale=scale),))
        backend = LlamaBackend.load(adapted, on_progress=lambda _fraction: None, on_log=lambda _level, _line: None)
        tokens = backend.tokenize([PromptSegment("A long history.")], first=True)
        store = open_store(backend, tmp_path, adopt=RecoveryMode.ALL)
        match = store.find("client", tokens)
        found.append(match.common_tokens if match else 0)
        if not found[:-1]:
            backend.decode([Chunk(0, 0, tokens, sample=True)])
            assert store.park(
                "session",
                scope="client",
                tokens=tokens,
                size_bytes=backend.state_bytes(0),
                write=partial(backend.save, 0),
                durable=True,
            )
        store.close()
        backend.close()
    assert found == [0, len(tokens), 0]


def test_missing_adapter_file_is_named(options: EngineOptions, log: LlamaLog, tmp_path: Path) -> None:
    """An adapter deleted since it was loaded has its own error."""
    path = write_adapter(tmp_path / "brief.gguf")
    with _adapted(options, log, LoraSettings(path=path)) as loaded:
        path.unlink()
        with pytest.raises(InferenceCenterError, match=r"brief\.gguf cannot be read any more"):
            fingerprint(loaded.model, loaded.options)


_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"general_type": "model"}, "no LoRA adapter: general.type is 'model'"),
    "another kind of adapter": ({"adapter_type": "control"}, "adapter.type is 'control'"),
    "no kind of adapter": ({"adapter_type": None}, "adapter.type is missing"),
    "another architecture": ({"architecture": "gemma2"}, "with demo.gguf: model arch and LoRA arch mismatch"),
    "an alpha that is text": ({"alpha": "eight"}, "adapter.lora.alpha of 'eight'"),
    "an alpha that is no number": ({"alpha": float("nan")}, "adapter.lora.alpha of nan"),
    "activated later": ({"invocation_tokens": [1, 2]}, "activated LoRA"),
    "no tensors": ({"tensors": {}}, "has no tensors"),
    "another width": ({"tensors": random_tensors(width=128)}, "incorrect shape"),
    "half of a pair": ({"tensors": dict(list(random_tensors().items())[:3])}, "missing one component"),
    "other tensors": ({"tensors": {"blk.0.attn_q.weight": np.ones((4, 192), np.float32)}}, "unexpected suffix"),
    "of no layer": (
        {"tensors": {name.replace("blk.5", "blk.50"): values for name, values in random_tensors().items()}},
        "does not exist in base model",
    ),
    "whole numbers": (
        {"tensors": {name: values.astype(np.int32) for name, values in random_tensors().items()}},
        "a type without matrix multiplication",
    ),
}


@pytest.mark.parametrize(("content", "reason"), _BAD.values(), ids=_BAD)
def test_unsuitable_adapter_is_refused(
    tmp_path: Path, options: EngineOptions, log: LlamaLog, content: dict[str, Any], reason: str
) -> None:
    """The error has the path and the reason, which comes from llama.cpp where only llama.cpp knows it."""
    path = write_adapter(tmp_path / "bad.gguf", **content)
    assert reason in _refusal(options, log, path).message


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_adapter_is_refused(
    tmp_path: Path, options: EngineOptions, log: LlamaLog, adapter: Path, share: float
) -> None:
    """The file may end within its header or its weights."""
    path = tmp_path / "torn.gguf"
    path.write_bytes(adapter.read_bytes()[: int(adapter.stat().st_size * share)])
    assert "The LoRA adapter" in _refusal(options, log, path).message


def test_non_file_is_refused(tmp_path: Path, options: EngineOptions, log: LlamaLog, demo_model_path: Path) -> None:
    """A missing path, a directory and the file of a model are refused with the reason."""
    assert "does not exist" in _refusal(options, log, tmp_path / "none.gguf").message
    assert "is a directory" in _refusal(options, log, tmp_path).message
    assert "is no LoRA adapter: general.type is" in _refusal(options, log, demo_model_path).message


def test_fallback_of_repacked_weights_is_no_warning(log: LlamaLog) -> None:
    """llama.cpp's line for each adapter tensor of repacked weights is not a warning."""
    heard: list[tuple[str, str]] = []
    quiet = LlamaLog(lambda level, line: heard.append((level, line)))
    quiet.write(3, "load: lora for 'blk.0.attn_q.weight' cannot use buft 'CPU_REPACK', fallback to CPU\n")
    assert [level for level, _ in heard] == ["debug"]
    assert quiet.take_problems() == ()
