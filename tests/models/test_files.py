"""Model files in a directory: listing, reading, verifying, removing."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

import gguf
import msgspec
import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models import files
from inferencecenter.models.files import Manifest, copy, find_model, list_models, read_facts, remove, verify

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def models(tmp_path: Path, demo_model_path: Path) -> Path:
    """A directory with a pulled model, a copied one, parts of a split one, and other files."""
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("pulled.gguf", "own.gguf"):
        shutil.copyfile(demo_model_path, directory / name)
    write_manifest(directory, "pulled")
    (directory / "split-00001-of-00003.gguf").write_bytes(b"a")
    (directory / "split-00003-of-00003.gguf").write_bytes(b"ccc")
    (directory / "notes.txt").write_text("no model")
    (directory / ".incoming").mkdir()
    (directory / "folder.gguf").mkdir()
    return directory


def write_manifest(directory: Path, name: str) -> None:
    """Write the model's checksum beside it, as a pull does."""
    file = directory / f"{name}.gguf"
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest = Manifest(source="ada/tiny/a.gguf", commit="c0", pulled_at=1.0, sha256=digests)
    (directory / f"{name}.json").write_bytes(msgspec.json.encode(manifest))


def test_models_are_listed_by_name(models: Path) -> None:
    """Parts of a split model are one entry, with the missing ones."""
    found = {model.name: model for model in list_models(models)}
    assert list(found) == ["own", "pulled", "split"]
    assert found["split"].missing == ("split-00002-of-00003.gguf",)
    assert found["split"].size_bytes == 4
    assert found["own"].manifest is None
    assert found["pulled"].manifest is not None
    assert found["pulled"].manifest.source == "ada/tiny/a.gguf"


def test_missing_directory_has_no_models(tmp_path: Path) -> None:
    """A path that is no directory is an error."""
    assert list_models(tmp_path / "none") == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(InferenceCenterError) as caught:
        list_models(tmp_path / "file")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE


def test_model_is_found_by_name(models: Path) -> None:
    """The suffix is optional; the error for an unknown name lists the models."""
    assert find_model(models, "own") == find_model(models, "own.gguf")
    with pytest.raises(InferenceCenterError) as caught:
        find_model(models, "../own")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert caught.value.hint == "There are own, pulled, split."


def test_description_of_the_demo_model(demo_model_path: Path) -> None:
    """It is that of its header."""
    facts = read_facts(demo_model_path)
    assert facts.architecture == "llama"
    assert facts.quantization == "Q8_0"
    assert facts.has_template
    assert facts.size_bytes == demo_model_path.stat().st_size
    reader = gguf.GGUFReader(demo_model_path)
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)


def test_file_types_equal_the_reference() -> None:
    """A type that llama.cpp adds fails here when the reference is updated."""
    reference = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    reference.pop(int(gguf.LlamaFileType.GUESSED))
    assert dict(files._FILE_TYPES) == reference


def test_verification_of_complete_models(models: Path) -> None:
    """All bytes are read with a manifest, only the header without; the result says which."""
    told: list[tuple[int, int]] = []
    verdict = verify(find_model(models, "pulled"), report=lambda done, total: told.append((done, total)))
    size = (models / "pulled.gguf").stat().st_size
    assert (verdict.checksum_known, verdict.problems) == (True, ())
    assert told[-1] == (size, size)
    assert verify(find_model(models, "own")) == files.IntegrityReport("own", checksum_known=False, problems=())


def test_flipped_bit_is_detected(models: Path) -> None:
    """Its checksum shows it, since the header is intact."""
    with (models / "pulled.gguf").open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes([byte ^ 1]))
    (problem,) = verify(find_model(models, "pulled")).problems
    assert problem == "pulled.gguf has changed since it was pulled: its SHA-256 differs"


def test_truncated_file_is_detected(models: Path) -> None:
    """No checksum is needed: a tensor ends after the end of the file."""
    path = models / "own.gguf"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    (problem,) = verify(find_model(models, "own")).problems
    assert "truncated" in problem


def test_missing_and_extra_parts_are_detected(models: Path) -> None:
    """Exactly the pulled files belong to the model."""
    assert verify(find_model(models, "split")).problems == ("split-00002-of-00003.gguf does not exist",)
    manifest = Manifest(source="s", commit="c", pulled_at=1.0, sha256={"own-00001-of-00002.gguf": "00"})
    (models / "own.json").write_bytes(msgspec.json.encode(manifest))
    assert verify(find_model(models, "own")).problems == (
        "own.gguf is not among the files that were pulled",
        "own-00001-of-00002.gguf was pulled and does not exist",
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"source": 1}',
        b"\xff",
        b"[" * 100_000,
        b'{"source": "a", "commit": "b", "pulled_at": 1e300, "sha256": {}}',
        b'{"source": "a", "commit": "b", "pulled_at": -1, "sha256": {}}',
        b'{"source": "a", "commit": "b", "pulled_at": 1, "sha256": {"a": 5}}',
        b'{"source": "\xff", "commit": "b", "pulled_at": 1, "sha256": {}}',
    ],
    ids=range(9),
)
def test_invalid_manifest_is_ignored(models: Path, content: bytes) -> None:
    """The model is listed nevertheless."""
    (models / "pulled.json").write_bytes(content)
    assert find_model(models, "pulled").manifest is None


def test_removal_deletes_all_files_of_a_model(models: Path) -> None:
    """All parts of a split model, or a pulled file with its manifest, are deleted; other models stay."""
    assert remove(models, "split", configured={}).name == "split"
    remove(models, "pulled.gguf", configured={})
    assert sorted(path.name for path in models.iterdir()) == [".incoming", "folder.gguf", "notes.txt", "own.gguf"]


def test_copy_has_all_parts_of_a_model(models: Path) -> None:
    """One that lacks a part, or whose parts' names are taken, is not copied at all."""
    with pytest.raises(InferenceCenterError, match="lacks split-00002-of-00003"):
        copy(find_model(models, "split"), "twice")
    (models / "split-00002-of-00003.gguf").write_bytes(b"bb")
    (models / "twice-00002-of-00003.gguf").write_bytes(b"")
    with pytest.raises(InferenceCenterError, match=r"twice-00002-of-00003\.gguf exists"):
        copy(find_model(models, "split"), "twice")
    assert [path.name for path in find_model(models, "twice").paths] == ["twice-00002-of-00003.gguf"]
    (models / "twice-00002-of-00003.gguf").unlink()
    copy(find_model(models, "split"), "twice")
    remove(models, "split", configured={})
    assert [path.read_bytes() for path in find_model(models, "twice").paths] == [b"a", b"bb", b"ccc"]


def test_configured_model_is_not_removed(models: Path) -> None:
    """The error names the setting, also through a link."""
    link = models.parent / "link.gguf"
    link.symlink_to(models / "own.gguf")
    for path in (models / "own.gguf", link.resolve()):
        with pytest.raises(InferenceCenterError) as caught:
            remove(models, "own", configured={path: "model.path"})
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert "model.path" in caught.value.message
    assert (models / "own.gguf").exists()


@pytest.mark.parametrize("name", ["../own", "/etc/passwd", "folder", "notes", "", ".incoming"])
def test_unknown_name_removes_nothing(models: Path, name: str) -> None:
    """The name must be of a model in the directory."""
    (models.parent / "own.gguf").write_text("elsewhere")
    before = sorted(models.parent.rglob("*"))
    with pytest.raises(InferenceCenterError) as caught:
        remove(models, name, configured={})
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert sorted(models.parent.rglob("*")) == before
