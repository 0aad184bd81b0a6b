"""Tests of ``engine.llama.fingerprint``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.engine.llama.saved_state import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.engine.llama.log import LlamaLog
    from inferencecenter.ipc.engine_options import EngineOptions
    from tests.engine.llama.conftest import Loaded


@pytest.fixture
def copied(demo: Loaded, log: LlamaLog, tmp_path: Path) -> Iterator[LlamaModel]:
    """The demo model, loaded from a copy elsewhere."""
    path = tmp_path / "elsewhere.gguf"
    shutil.copyfile(demo.model.path, path)
    model = LlamaModel.load(demo.options.replace(model_path=str(path)), on_progress=lambda _fraction: None, log=log)
    yield model
    model.close()


def test_fingerprint_ignores_path_and_slots(demo: Loaded, options: EngineOptions, copied: LlamaModel) -> None:
    """The same file at another path, with other slots of another length, can use the saved KV."""
    expected = fingerprint(demo.model, options)
    other = options.replace(slots=3, n_ctx=128, n_batch=32, n_ubatch=32, n_threads=2)
    assert fingerprint(copied, other) == expected
    assert len(bytes.fromhex(expected)) == 32


@pytest.mark.parametrize(
    "change", [{"kv_type_k": "q8_0"}, {"kv_type_v": "q8_0"}, {"flash_attention": "off"}], ids=["k", "v", "attention"]
)
def test_fingerprint_covers_kv_types(demo: Loaded, options: EngineOptions, change: dict[str, str]) -> None:
    """KV of another type is not compatible."""
    changed = options.replace(**change)
    assert fingerprint(demo.model, changed) != fingerprint(demo.model, options)


def test_fingerprint_covers_weights(copied: LlamaModel, options: EngineOptions) -> None:
    """Other weights in a file of the same size and metadata are another model."""
    before = fingerprint(copied, options)
    with copied.path.open("r+b") as file:
        file.seek(copied.path.stat().st_size // 2)
        middle = file.read(100_000)
        file.seek(-len(middle), 1)
        file.write(bytes(byte ^ 1 for byte in middle))
    assert fingerprint(copied, options) != before


def test_fingerprint_covers_the_end_of_the_file(copied: LlamaModel, options: EngineOptions) -> None:
    """One more byte is another file, and so is another last one."""
    digests = {fingerprint(copied, options)}
    for last in (b"a", b"b"):
        with copied.path.open("ab") as file:
            file.write(last)
        digests.add(fingerprint(copied, options))
        with copied.path.open("r+b") as file:
            file.truncate(copied.path.stat().st_size - 1)
    assert len(digests) == 3


def test_fingerprint_covers_the_version_of_llama_cpp(
    demo: Loaded, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved KV of another version is not used."""
    before = fingerprint(demo.model, options)
    monkeypatch.setattr(lib, "llama_version", lambda: b"another")
    assert fingerprint(demo.model, options) != before


def test_deleted_model_file_is_named(copied: LlamaModel, options: EngineOptions) -> None:
    """A file deleted since it was loaded is a model file error."""
    copied.path.unlink()
    with pytest.raises(InferenceCenterError, match=r"elsewhere\.gguf cannot be read any more") as refusal:
        fingerprint(copied, options)
    assert refusal.value.code is ErrorCode.INVALID_MODEL_FILE


def test_metadata_is_listed_in_order(demo: Loaded) -> None:
    """Every entry that is no array is listed once, sorted."""
    entries = demo.model.all_metadata()
    assert list(entries) == sorted(set(entries))
    assert f"general.architecture={demo.model.metadata('general.architecture')}" in entries
