"""The daemon's directory of models: what operators pull into it and delete from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.library import ModelLibrary
from tests.models.hub_stub import StubFile, StubHub

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.models.pull import PullProgress


def library(directory: Path, **configured: str) -> ModelLibrary:
    """Return the library of a directory, with the settings that name its files."""
    directory.mkdir(exist_ok=True)
    named = {(directory / f"{name}.gguf").resolve(): setting for name, setting in configured.items()}
    return ModelLibrary(directory=directory, configured=lambda: named, environment={})


def refused(models: ModelLibrary, name: str, path: Path) -> InferenceCenterError:
    """Delete a model and return the error."""
    with pytest.raises(InferenceCenterError) as caught:
        models.remove(name, path)
    return caught.value


def test_model_is_pulled_from_the_hub_of_the_environment(hub: StubHub, tmp_path: Path) -> None:
    """Its progress is reported."""
    hub.repos["ada/tiny"] = {"tiny-Q8_0.gguf": StubFile(b"x" * 1000)}
    told: list[PullProgress] = []
    models = ModelLibrary(directory=tmp_path, configured=dict, environment={"HF_ENDPOINT": hub.url})
    pulled = models.pull("ada/tiny:Q8_0", told.append)
    assert pulled.model.paths == (tmp_path / "tiny-Q8_0.gguf",)
    assert (told[-1].done_bytes, told[-1].total_bytes) == (1000, 1000)


def test_model_of_the_directory_is_deleted(tmp_path: Path) -> None:
    """Only the named model's file is deleted."""
    models = library(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    models.remove("a", tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["b.gguf"]


def test_configured_model_is_kept(tmp_path: Path) -> None:
    """The error names the setting."""
    models = library(tmp_path, a="models.a")
    path = tmp_path / "a.gguf"
    path.touch()
    assert "models.a" in refused(models, "a", path).message
    assert path.exists()


def test_file_elsewhere_is_kept(tmp_path: Path) -> None:
    """A file of the same name in the directory, hidden by the configured model, is kept, too."""
    models = library(tmp_path / "models")
    elsewhere, hidden = tmp_path / "a.gguf", tmp_path / "models" / "a.gguf"
    for path in (elsewhere, hidden):
        path.touch()
    error = refused(models, "a", elsewhere)
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "name")
    assert refused(models, "b", hidden).code is ErrorCode.MODEL_NOT_FOUND
    assert elsewhere.exists()
    assert hidden.exists()
