"""Which models are served: settings and files in every combination."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.config.sections import LoraSettings
from inferencecenter.config.settings import Settings, bundled_model
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import ggml
from inferencecenter.models.registry import DAEMON_SETTINGS, DEMO, Registry, default_model, files_in, read_registry
from tests.engine.llama.lora_files import write_adapter

ROOT = os.geteuid() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty ``models_dir``."""
    path = tmp_path / "models"
    path.mkdir()
    return path


def _write(path: Path, **metadata: str) -> Path:
    """Write a header-only model; ``name`` is its own name."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    for key, value in metadata.items():
        writer.add_string(f"general.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _read(folder: Path, **tables: Any) -> Registry:
    return read_registry(Settings.model_validate({"models_dir": folder, **tables}))


def _refused(folder: Path, **tables: Any) -> InferenceCenterError:
    with pytest.raises(InferenceCenterError) as caught:
        _read(folder, **tables)
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert caught.value.hint
    return caught.value


# Kinds.


def _write_kind(path: Path, architecture: str, pooling: int | None) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "pooling", "kind"),
    [
        ("llama", None, "chat"),
        ("qwen3", 0, "chat"),
        ("qwen3", 3, "embedding"),
        ("bert", 1, "embedding"),
        ("bert", 2, "embedding"),
        ("nomic-bert", None, "embedding"),
        ("bert", 4, "reranking"),
        ("qwen3", 4, "reranking"),
    ],
)
def test_model_kind_is_read_from_the_file(folder: Path, architecture: str, pooling: int | None, kind: str) -> None:
    """Pooling, or an architecture that generates no text, selects embeddings or scores."""
    _write_kind(folder / "some.gguf", architecture, pooling)
    assert _read(folder).get("some").kind == kind


@pytest.mark.parametrize(("written", "width"), [(384, 384), (0, None), (None, None)])
def test_vector_width_is_read_from_the_file(folder: Path, written: int | None, width: int | None) -> None:
    """The size of an answer is known before the model is loaded."""
    writer = gguf.GGUFWriter(folder / "some.gguf", "bert")
    if written is not None:
        writer.add_embedding_length(written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert _read(folder).get("some").n_embd == width


def test_configured_kind_overrides_the_file(folder: Path) -> None:
    """This is for files without pooling metadata, and for text models that are used for embeddings."""
    _write_kind(folder / "some.gguf", "qwen3", None)
    spec = _read(folder, models={"some": {"kind": "embedding", "matryoshka": True}}).get("some")
    assert (spec.kind, spec.matryoshka) == ("embedding", True)
    assert not _read(folder).get("some").matryoshka


def test_echo_model_has_the_configured_kind(folder: Path) -> None:
    """No file is read for it."""
    models = _read(folder, engine={"backend": "echo"}, models={"vectors": {"kind": "embedding"}, "text": {}})
    assert [models.get(name).kind for name in ("vectors", "text", models.default)] == ["embedding", "chat", "chat"]


# Default model.


def test_demo_model_is_the_default_without_settings(folder: Path) -> None:
    """It has its usual name and the engine's settings."""
    settings = Settings(models_dir=folder)
    registry = read_registry(settings)
    spec = registry.get(DEMO)
    assert (registry.default, dict(registry.models)) == (DEMO, {DEMO: spec})
    assert (spec.path, spec.engine, spec.params, spec.lora) == (bundled_model(), settings.engine, {}, ())
    assert default_model(settings) == spec


def test_former_name_of_the_default_model_is_an_alias(folder: Path) -> None:
    """Sessions of earlier versions may name it as its metadata do; a name of its own has no such alias."""
    path = folder / "other" / "file.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Old Name")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert _read(folder, model={"path": path}).aliases == {"Old Name": "file"}
    assert _read(folder, model={"path": path, "name": "mine"}).aliases == {}
    taken = {"path": path, "aliases": ["Old Name", "o"]}
    assert _read(folder, model=taken).aliases == {"Old Name": "file", "o": "file"}


@pytest.mark.parametrize("chosen", [{"path": bundled_model()}, {"name": "demo"}])
def test_demo_model_can_be_configured(folder: Path, chosen: dict[str, Any]) -> None:
    """Its file or its name selects it."""
    assert default_model(Settings.model_validate({"models_dir": folder, "model": chosen})) == default_model(
        Settings(models_dir=folder)
    )


@pytest.mark.parametrize("model", [None, bundled_model()])
def test_another_model_may_be_named_demo(folder: Path, model: Path | None) -> None:
    """The bundled one then has its full name."""
    own = _write(folder / "demo.gguf")
    for tables in ({}, {"models": {"demo": {"n_ctx": 512}}}):
        registry = _read(folder, model={"path": model}, **tables)
        assert {name: spec.path for name, spec in registry.models.items()} == {
            "demo": own,
            "InferenceCenter Demo": bundled_model(),
        }
        assert registry.default == "InferenceCenter Demo"


def test_echo_backend_needs_no_file(folder: Path) -> None:
    """Found files are listed, so that names can be tried without a model."""
    _write(folder / "phi.gguf")
    registry = _read(folder, engine={"backend": "echo"})
    assert (registry.default, sorted(registry.models)) == ("echo", ["echo", "phi"])
    named = _read(folder, engine={"backend": "echo"}, model={"name": "parrot"})
    assert (named.default, sorted(named.models)) == ("parrot", ["parrot", "phi"])
    assert _read(folder, engine={"backend": "echo"}, model={"name": "phi"}).default == "phi"


def test_default_by_path(folder: Path, tmp_path: Path) -> None:
    """Its name is the setting, else that of the file, whatever the file says."""
    path = _write(tmp_path / "mine.gguf", name="Ada's own")
    assert _read(folder, model={"path": path}).default == "mine"
    assert _read(folder, model={"path": path, "name": "ada"}).get("ada").path == path
    first = _write(tmp_path / "large-00001-of-00002.gguf")
    assert _read(folder, model={"path": first}).default == "large"


def test_aliases_name_one_model_each(folder: Path) -> None:
    """They are further names of the default and of entries; a name of two models is refused."""
    for name in ("phi", "qwen"):
        _write(folder / f"{name}.gguf")
    model = {"name": "phi", "aliases": ["gpt-4o"]}
    registry = _read(folder, model=model, models={"qwen": {"aliases": ["gpt-4", "o3"]}})
    assert registry.aliases == {"gpt-4o": "phi", "gpt-4": "qwen", "o3": "qwen"}
    assert _refused(folder, model=model, models={"qwen": {"aliases": ["gpt-4o"]}}).field == "models.qwen.aliases"
    assert _refused(folder, model={"name": "phi", "aliases": ["qwen"]}).field == "model.aliases"


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 and more", b"GGUF"])
def test_default_that_is_no_model_is_listed(folder: Path, tmp_path: Path, content: bytes | None) -> None:
    """It has the name of its file; the engine reports the defect."""
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    registry = _read(folder, model={"path": path})
    assert (registry.default, registry.get("broken").path) == ("broken", path)


def test_default_by_entry_name(folder: Path, tmp_path: Path) -> None:
    """It has all settings of the entry."""
    path = _write(tmp_path / "phi-3.gguf", name="Phi 3")
    registry = _read(folder, model={"name": "phi"}, models={"phi": {"path": path, "slots": 2}})
    assert (registry.default, list(registry.models)) == ("phi", ["phi"])
    assert (registry.get("phi").path, registry.get("phi").engine.slots) == (path, 2)


def test_default_by_file_name(folder: Path, tmp_path: Path) -> None:
    """It may have adapters, since it has no entry."""
    path, adapter = _write(folder / "phi.gguf"), tmp_path / "lora.gguf"
    assert _read(folder, model={"name": "phi"}).get("phi").path == path
    spec = default_model(
        Settings.model_validate(
            {"models_dir": folder, "model": {"name": "phi", "lora": [{"path": adapter, "scale": 0.5}]}}
        )
    )
    assert (spec.path, spec.lora) == (path, (LoraSettings(path=adapter, scale=0.5),))


def test_default_in_models_dir_is_listed_once(folder: Path, tmp_path: Path) -> None:
    """It has the name of its file there, even if it is configured through a link."""
    path = _write(folder / "phi.gguf", name="Phi 3")
    (tmp_path / "link.gguf").symlink_to(path)
    for chosen in (path, tmp_path / "link.gguf"):
        registry = _read(folder, model={"path": chosen})
        assert (registry.default, list(registry.models)) == ("phi", ["phi"])
    assert sorted(_read(folder, model={"path": path, "name": "other"}).models) == ["other", "phi"]


def test_default_takes_precedence_over_a_file(folder: Path, tmp_path: Path) -> None:
    """A pulled file never fails the start."""
    _write(folder / "phi.gguf")
    path = _write(tmp_path / "other.gguf")
    registry = _read(folder, model={"path": path, "name": "phi"})
    assert registry.get("phi").path == path


# Refused settings.


def test_unknown_default_is_refused(folder: Path) -> None:
    """The error lists the models, if any."""
    error = _refused(folder, model={"name": "phy"})
    assert error.field == "model.name"
    assert "'phy'" in error.message
    assert str(folder) in (error.hint or "")
    _write(folder / "phi.gguf")
    assert "phi, qwen" in (_refused(folder, model={"name": "phy"}, models={"qwen": {}}).hint or "")


def test_duplicate_model_name_is_refused(folder: Path, tmp_path: Path) -> None:
    """A default cannot have the name of an entry for another model."""
    path = _write(tmp_path / "a.gguf", name="phi")
    entry = {"phi": {"path": tmp_path / "b.gguf"}}
    error = _refused(folder, model={"path": path, "name": "phi"}, models=entry)
    assert (error.field, "models.phi" in error.message) == ("model.path", True)
    assert "model.name" in (error.hint or "")
    same = _write(tmp_path / "phi.gguf")
    assert _refused(folder, model={"path": same}, models=entry).field == "model.path"
    assert _refused(folder, engine={"backend": "echo"}, models={"echo": {}}).field == "model.name"


def test_same_model_configured_twice(folder: Path, tmp_path: Path) -> None:
    """Equal file, name and settings are no conflict."""
    path = _write(tmp_path / "a.gguf")
    registry = _read(folder, model={"path": path, "name": "phi"}, models={"phi": {"path": path}})
    assert (registry.default, list(registry.models)) == ("phi", ["phi"])
    assert (
        _refused(folder, model={"path": path, "name": "phi"}, models={"phi": {"path": path, "n_ctx": 512}}).field
        == "model.path"
    )


def test_adapters_beside_an_entry_are_refused(folder: Path) -> None:
    """They belong in the entry."""
    error = _refused(folder, model={"name": "phi", "lora": [{"path": "/a.gguf"}]}, models={"phi": {}})
    assert error.field == "model.lora"
    assert "models.phi.lora" in (error.hint or "")


def test_conflicting_overrides_are_refused(folder: Path) -> None:
    """An entry is validated together with the engine's settings."""
    error = _refused(folder, models={"phi": {"keep_alive_s": -0.5}})
    assert error.field == "models.phi"
    assert "keep_alive_s" in (error.hint or "")
    assert "above 0" in error.message


# Entries.


def test_entry_overrides_engine_settings(folder: Path) -> None:
    """Other settings are those of every engine."""
    settings = Settings.model_validate(
        {
            "models_dir": folder,
            "engine": {"slots": 8, "n_threads": 3, "swap_patience_s": 7.0},
            "models": {
                "phi": {
                    "path": "/m/phi.gguf",
                    "slots": 2,
                    "n_ctx": 1024,
                    "n_gpu_layers": 5,
                    "kv_type_k": "q8_0",
                    "kv_type_v": "q4_0",
                    "speculative": "lookup",
                    "keep_alive_s": 60,
                    "replicas": 3,
                    "params": {"temperature": 0.1},
                    "lora": [{"path": "/m/lora.gguf", "scale": 0.5}],
                },
                "plain": {"path": "/m/plain.gguf"},
            },
        }
    )
    registry = read_registry(settings)
    spec, plain = registry.get("phi"), registry.get("plain")
    changed = {
        "slots": 2, "n_ctx": 1024, "n_gpu_layers": 5, "kv_type_k": "q8_0", "kv_type_v": "q4_0", "sleep_after_s": 60.0,
        "speculative": "lookup",
    }  # fmt: skip
    assert spec.engine.model_dump() == settings.engine.model_dump() | changed
    assert (spec.path, spec.params) == (Path("/m/phi.gguf"), {"temperature": 0.1})
    assert spec.lora == (LoraSettings(path=Path("/m/lora.gguf"), scale=0.5),)
    assert (plain.engine, plain.params, plain.lora) == (settings.engine, {}, ())
    assert (spec.replicas, plain.replicas) == (3, 1)


def test_draft_model_is_a_model_or_a_file(folder: Path, tmp_path: Path) -> None:
    """It is set by name or path, for all models or for one; an empty text is none."""
    small, other = _write(folder / "small.gguf"), tmp_path / "other.gguf"
    entries = {"one": {"path": "/one.gguf", "draft": str(other)}, "none": {"path": "/none.gguf", "draft": ""}}
    models = _read(folder, engine={"draft": "small"}, models=entries).models
    assert {name: spec.draft for name, spec in models.items()} == {
        "small": small,
        "one": other,
        "none": None,
        DEMO: small,
    }
    assert models["one"].files == (Path("/one.gguf"), other)
    assert models["none"].files == (Path("/none.gguf"),)
    assert _read(folder).get(DEMO).draft is None


def test_projector_must_be_a_projector(folder: Path, tmp_path: Path) -> None:
    """The error names the setting, the file and what it must be."""
    model, missing = _write(tmp_path / "model.gguf"), tmp_path / "none.gguf"
    for tables, field in (
        ({"model": {"path": str(model), "mmproj": "FILE"}}, "model.mmproj"),
        ({"models": {"big": {"path": str(model), "mmproj": "FILE"}}}, "models.big.mmproj"),
    ):
        for file, problem in ((model, "is no projector"), (missing, "does not exist")):
            refusal = _refused(folder, **json.loads(json.dumps(tables).replace("FILE", str(file))))
            assert (refusal.field, refusal.message) == (field, f"{field} is {file}, which {problem}")
            assert "architecture clip" in str(refusal.hint)


def test_unknown_draft_model_is_refused(folder: Path) -> None:
    """The error names the model, its requested draft model, and the available ones."""
    refusal = _refused(folder, models={"big": {"path": "/big.gguf", "draft": "tiny"}})
    assert "big" in refusal.message
    assert "'tiny'" in refusal.message
    assert DEMO in (refusal.hint or "")
    assert refusal.field == "engine.draft"


def test_echo_backend_needs_no_draft_model(folder: Path) -> None:
    """It has no vocabulary to share."""
    registry = _read(folder, engine={"backend": "echo", "draft": "none"})
    assert registry.get(registry.default).draft is None


def test_keep_alive_can_be_unlimited(folder: Path) -> None:
    """-1 never unloads, also where other engines sleep."""
    assert _read(folder, models={"phi": {"keep_alive_s": -1}}).get("phi").engine.sleep_after_s == -1


def test_entry_without_a_path(folder: Path, tmp_path: Path) -> None:
    """It means the file or split model of its name in ``models_dir``, which need not exist yet."""
    whole = _write(folder / "phi.gguf")
    first = _write(folder / "big-00001-of-00002.gguf")
    registry = _read(folder, models={"phi": {"slots": 1}, "big": {}, "later": {}})
    assert registry.get("phi").path == whole
    assert registry.get("phi").engine.slots == 1
    assert registry.get("big").path == first
    assert registry.get("later").path == folder / "later.gguf"
    assert _read(tmp_path / "nowhere", models={"phi": {}}).get("phi").path == tmp_path / "nowhere" / "phi.gguf"


def test_entry_takes_precedence_over_a_file(folder: Path) -> None:
    """A file of the entry's name is ignored if the entry has a path of its own."""
    _write(folder / "phi.gguf")
    assert _read(folder, models={"phi": {"path": "/m/other.gguf"}}).get("phi").path == Path("/m/other.gguf")


@given(st.sampled_from(sorted(DAEMON_SETTINGS)))
def test_unrelated_settings_keep_the_model_equal(name: str) -> None:
    """Otherwise a reload would reload every engine."""
    tables = {"models_dir": "/nowhere", "models": {"phi": {"slots": 2}}}
    changed = True if name == "exit_when_failed" else 7
    before = read_registry(Settings.model_validate(tables))
    after = read_registry(Settings.model_validate({**tables, "engine": {name: changed}}))
    assert before == after
    assert read_registry(Settings.model_validate({**tables, "engine": {"n_threads": 3}})) != before


def test_unknown_name_is_refused(folder: Path) -> None:
    """The error lists the models; hostile names are shortened."""
    registry = _read(folder, models={"phi": {}})
    for name in ("", "nope", "x" * 1000, "../../etc/passwd"):
        with pytest.raises(InferenceCenterError) as caught:
            registry.get(name)
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        assert "phi" in (caught.value.hint or "")
        assert len(caught.value.message) < 100


def test_rescan_adds_new_files(folder: Path) -> None:
    """Known models stay, also when their file is gone."""
    first = _write(folder / "first.gguf")
    registry = _read(folder, models={"phi": {"slots": 2}})
    first.unlink()
    _write(folder / "second.gguf")
    _write(folder / "phi.gguf")
    later = registry.with_new_files()
    assert sorted(later.models) == [DEMO, "first", "phi", "second"]
    assert {name: later.get(name) for name in registry.models} == registry.models
    assert Registry("a", {}).with_new_files() == Registry("a", {})


# Files.


def test_files_are_named_by_stem(folder: Path) -> None:
    """A single file takes precedence over a split model of its name."""
    names = ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "rest-00002-of-00002.gguf", "notes.txt")
    paths = {name: _write(folder / name) for name in names}
    assert files_in(folder) == {"a": paths["a-00001-of-00002.gguf"], "b": paths["b.gguf"]}
    whole = _write(folder / "a.gguf")
    assert files_in(folder)["a"] == whole


def test_non_files_are_ignored(folder: Path, tmp_path: Path) -> None:
    """Directories, dangling links, pipes and hidden files are ignored; links to files are listed."""
    (folder / "directory.gguf").mkdir()
    (folder / "dangling.gguf").symlink_to(tmp_path / "nowhere.gguf")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    os.mkfifo(folder / "pipe.gguf")
    _write(folder / "._phi.gguf")
    (folder / "linked.gguf").symlink_to(_write(tmp_path / "real.gguf"))
    assert files_in(folder) == {"linked": folder / "linked.gguf"}
    assert _read(folder).remarks == ()


def test_adapters_and_projectors_are_no_models(folder: Path) -> None:
    """They cannot be the default either."""
    write_adapter(folder / "lora.gguf")
    _write(folder / "mmproj.gguf", type="mmproj")
    _write(folder / "old-mmproj.gguf", architecture="clip")
    _write(folder / "said.gguf", type="model")
    _write(folder / "unsaid.gguf")
    assert sorted(files_in(folder)) == ["said", "unsaid"]
    assert _read(folder).remarks == ()
    assert _refused(folder, model={"name": "lora"}).field == "model.name"


def test_projector_beside_a_model_is_used(folder: Path, tmp_path: Path) -> None:
    """It has the model's name; one that is configured takes precedence, other names and directories do not count."""
    for name in ("seeing", "blind", "split-00001-of-00002", "split-00002-of-00002"):
        _write(folder / f"{name}.gguf")
    own = _write(folder / "mmproj-seeing.gguf", architecture="clip")
    split = _write(folder / "mmproj-split.gguf", architecture="clip")
    _write(folder / "mmproj-blind.gguf", type="adapter")
    outside, other = _write(tmp_path / "out.gguf"), _write(tmp_path / "mmproj-out.gguf", architecture="clip")
    entries = {
        "second": {"path": str(folder / "seeing.gguf")},
        "third": {"path": str(folder / "seeing.gguf"), "mmproj": str(other)},
        "out": {"path": str(outside)},
    }
    registry = _read(folder, models=entries)
    assert {name: spec.mmproj for name, spec in registry.models.items() if name != DEMO} == {
        "seeing": own,
        "second": own,
        "third": other,
        "split": split,
        "blind": None,
        "out": None,
    }
    assert registry.remarks == ()
    assert _read(folder, engine={"backend": "echo"}).get("seeing").mmproj is None
    assert _read(folder, model={"name": "seeing"}).get("seeing").mmproj == own
    assert _read(folder, model={"name": "seeing", "mmproj": "off"}).get("seeing").mmproj is None
    entries["second"]["mmproj"] = "off"
    registry = _read(folder, models=entries, model={"name": "third"})
    assert (registry.get("second").mmproj, registry.get("third").mmproj) == (None, other)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_broken_file_is_listed(folder: Path, content: bytes) -> None:
    """A request for it gets the reason."""
    (folder / "broken.gguf").write_bytes(content)
    assert sorted(files_in(folder)) == ["broken"]


@pytest.mark.skipif(ROOT, reason="root may read everything")
def test_unreadable_file_is_listed(folder: Path) -> None:
    """It is listed like a broken file, so that a request for it gets the reason."""
    _write(folder / "sealed.gguf").chmod(0)
    assert sorted(files_in(folder)) == ["sealed"]


def test_empty_or_missing_directory(folder: Path, tmp_path: Path) -> None:
    """There are no models, and nothing is logged."""
    for directory in (folder, tmp_path / "nowhere"):
        assert files_in(directory) == {}
        assert _read(directory).remarks == ()


def test_models_dir_that_is_no_directory(folder: Path) -> None:
    """The problem is logged once, and the bundled model is available."""
    (folder / "file").touch()
    registry = _read(folder / "file")
    assert list(registry.models) == [DEMO]
    (remark,) = registry.remarks
    assert remark == f"{folder / 'file'} cannot be read: Not a directory"
    with capture_logs() as logs:
        registry.log_remarks()
    assert [(line["event"], line["reason"]) for line in logs] == [("models_dir", remark)]


@pytest.mark.skipif(ROOT, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600])
def test_unreadable_models_dir(folder: Path, mode: int) -> None:
    """Neither an unlistable nor an untraversable directory has models."""
    _write(folder / "phi.gguf")
    folder.chmod(mode)
    try:
        registry = _read(folder)
    finally:
        folder.chmod(0o700)
    assert list(registry.models) == [DEMO]
    assert "cannot be read: Permission denied" in registry.remarks[0]


def test_unusable_names_are_logged(folder: Path) -> None:
    """They are in one printable line of bounded length; a model with a configured name is usable."""
    for name in ("My Model", "-rf", "\x1b[31mred", "ü" * 100, "a\nb", "x" * 129, "é", "$(id)"):
        _write(folder / f"{name}.gguf")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.gguf"))
    _write(odd)
    _write(folder / "good.gguf")
    registry = _read(folder)
    assert sorted(registry.models) == [DEMO, "good"]
    (remark,) = registry.remarks
    assert remark.isprintable()
    assert remark.encode()
    assert (remark.count("'"), ", …; " in remark, "'My Model'" in remark) == (10, True, True)
    assert "My Model" not in _read(folder, models={"m": {"path": folder / "My Model.gguf"}}).remarks[0]


def test_logged_names_are_bounded(folder: Path) -> None:
    """A log line has a limit."""
    _write(folder / f"{'ü' * 100}.gguf")
    (remark,) = _read(folder).remarks
    assert remark.count("\\xfc") == 80


@given(st.text(min_size=1, max_size=40))
def test_listed_names_are_valid_in_settings(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Any listed model can be given an entry."""
    directory = tmp_path_factory.mktemp("any")
    try:
        (directory / f"{name}.gguf").write_bytes(b"GGUF")
    except (OSError, ValueError):
        return
    for found in files_in(directory):
        assert Settings.model_validate({"models": {found: {}}}).models.keys() == {found}


def test_scan_reads_only_the_beginning_of_files(folder: Path) -> None:
    """A reload scans every file on the event loop."""

    def read_bytes() -> int:
        (so_far,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar: ")]
        return int(so_far.removeprefix("rchar: "))

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    entries += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 150_000) + text("token") * 150_000
    first = folder / "m0.gguf"
    first.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entries)
    for number in range(1, 50):
        os.link(first, folder / f"m{number}.gguf")

    assert first.stat().st_size * 50 > 90_000_000
    before = read_bytes()
    assert len(files_in(folder)) == 50
    assert read_bytes() - before < 50 * 2**16


def test_symlink_loop_is_refused(folder: Path, tmp_path: Path) -> None:
    """Resolving it raises an error of settings."""
    circle = tmp_path / "circle.gguf"
    circle.symlink_to(circle)
    with pytest.raises(InferenceCenterError, match="the models cannot be read: RuntimeError") as caught:
        _read(folder, model={"path": str(circle)})
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_wrong_script_is_found_before_an_engine_starts(tmp_path: Path) -> None:
    """The registry is what `config check` and the start of the daemon read."""
    rules = tmp_path / "rules.toml"
    engine = {"backend": "script", "script": rules}
    rules.write_text("[[rules]]\nreply = { text = 'Hi' }\n")
    assert _read(tmp_path, engine=engine).default == "script"
    rules.write_text("[[rules]]\nreply = { text = 1 }\n")
    assert (
        _refused(tmp_path, engine=engine).message == f"{rules}: rules.1.reply.text is 1: input should be a valid string"
    )


def test_replicas_on_all_nodes(folder: Path) -> None:
    """This machine has one from the beginning; with `nodes` these are all. A daemon without a cluster has none."""
    entries: dict[str, Any] = {
        "everywhere": {"path": "/m.gguf", "replicas": "all"},
        "some": {"path": "/m.gguf", "replicas": "all", "nodes": ["local", "box"]},
    }
    models = _read(folder, models=entries, cluster={"address": "10.0.0.1:6380"}).models
    assert (models["everywhere"].nodes, models["everywhere"].on_all_nodes) == (("local",), True)
    assert (models["some"].nodes, models["some"].on_all_nodes) == (("local", "box"), False)
    assert [models[name].is_on_nodes for name in ("everywhere", "some", DEMO)] == [True, True, False]
    with pytest.raises(InferenceCenterError) as refusal:
        _read(folder, models={"everywhere": entries["everywhere"]})
    assert refusal.value.field == "models.everywhere.replicas"


# Nodes.


@pytest.mark.parametrize("field", ["nodes", "rpc_nodes"])
def test_nodes_need_a_cluster(folder: Path, field: str) -> None:
    """Their names are those of its machines."""
    refusal = _refused(folder, models={"a": {"path": str(folder / "a.gguf"), field: ["box2"]}})
    assert refusal.field == f"models.a.{field}"


def test_devices_of_nodes_need_a_build_with_rpc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's own llama.cpp reaches them."""
    tables = {"models": {"a": {"path": str(folder / "a.gguf"), "rpc_nodes": ["box2"]}}, "cluster": {"address": "h:1"}}
    monkeypatch.setattr(ggml, "reaches_servers", lambda: False)
    assert "without RPC" in _refused(folder, **tables).message
    monkeypatch.setattr(ggml, "reaches_servers", lambda: True)
    assert _read(folder, **tables).models["a"].rpc_nodes == ("box2",)
    assert "backend" in _refused(folder, engine={"backend": "echo"}, **tables).message


@pytest.mark.parametrize(
    "others",
    [
        {"replicas": 2},
        {"nodes": ["local", "box2"]},
        {"nodes": ["box2"]},
        {"rpc_nodes": ["local"]},
        {"rpc_nodes": ["box3", "box3"]},
    ],
)
def test_devices_of_nodes_are_those_of_one_engine_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]
) -> None:
    """An engine on another machine would reach them by way of the daemon's."""
    monkeypatch.setattr(ggml, "reaches_servers", lambda: True)
    entry = {"path": str(folder / "a.gguf"), "rpc_nodes": ["box3"]} | others
    assert _refused(folder, models={"a": entry}, cluster={"address": "h:1"}).field == "models.a.rpc_nodes"
