"""The model files in a directory: listing, metadata, verification and removal."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.gguf import SHARD, read_gguf
from inferencecenter.hardware.model_shape import describe
from inferencecenter.models.reference import projector_name, shard_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inferencecenter.hardware.gguf import GgufFile

_HASHED_BYTES: Final = 2**22
_MAX_MANIFEST_BYTES: Final = 2**24
_YEAR_9999: Final = 253_370_764_800

# ``llama_ftype``: the type of most of a file's weights.
_FILE_TYPES: Final[Mapping[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest that ``model pull`` writes beside a model, ``NAME.json``.

    Attributes:
        source: The pulled file, as owner/repo/file.gguf.
        commit: The repository's commit.
        pulled_at: Unix time in seconds.
        sha256: Hex digest of each file, by its local name.
    """

    source: str
    commit: str
    pulled_at: Annotated[float, msgspec.Meta(ge=0, le=_YEAR_9999)]
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model in a directory: one file, or all existing parts of a split one.

    Attributes:
        missing: Names of parts that do not exist.
        manifest: The manifest; ``None`` for a file that was not pulled.
        mmproj: Its projector, if one with its name is beside it.
    """

    name: str
    paths: tuple[Path, ...]
    missing: tuple[str, ...]
    manifest: Manifest | None
    mmproj: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Its parts and its projector."""
        return self.paths if self.mmproj is None else (*self.paths, self.mmproj)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def manifest_file(self) -> Path:
        """The path of the manifest, whether it exists or not."""
        return manifest_path(self.paths[0].parent, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Metadata from a model's header.

    Attributes:
        title: The model's name in the file.
        quantization: The type of most weights, by llama.cpp's name.
        n_ctx_train: The context length of the training, in tokens.
        has_template: Whether it contains a chat template.
    """

    title: str
    architecture: str
    parameters: int
    quantization: str
    n_ctx_train: int
    n_layers: int
    n_vocab: int
    size_bytes: int
    has_template: bool
    n_files: int


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Whether a model's files are intact; ``problems`` lists what is wrong."""

    name: str
    checksum_known: bool
    problems: tuple[str, ...]


def manifest_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def gguf_paths(directory: Path) -> list[Path]:
    """Return the GGUF files in a directory, sorted.

    Raises:
        OSError: It cannot be read.
    """
    return sorted(path for path in directory.iterdir() if path.suffix == ".gguf" and path.is_file())


def list_models(directory: Path) -> tuple[ModelFiles, ...]:
    """Return the models in a directory, by name; none if it does not exist.

    Raises:
        InferenceCenterError: ``storage_unavailable`` if it cannot be read.
    """
    groups: dict[str, list[Path]] = {}
    try:
        paths = gguf_paths(directory)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE, f"{directory} cannot be read: {error.strerror}", field="models_dir"
        ) from None
    for path in paths:
        part = SHARD.match(path.stem)
        groups.setdefault(part["stem"] if part else path.stem, []).append(path)
    projectors = {
        name: groups.pop(own) for name in list(groups) if (own := projector_name(name).removesuffix(".gguf")) in groups
    }
    return tuple(
        ModelFiles(
            name,
            tuple(parts),
            _missing(parts),
            _read_manifest(directory, name),
            mmproj=projectors[name][0] if name in projectors else None,
        )
        for name, parts in sorted(groups.items())
    )


def find_model(directory: Path, name: str) -> ModelFiles:
    """Return a model by its name, with or without ``.gguf``.

    Raises:
        InferenceCenterError: ``model_not_found``, or ``storage_unavailable``.
    """
    models = {model.name: model for model in list_models(directory)}
    if (found := models.get(name) or models.get(name.removesuffix(".gguf"))) is not None:
        return found
    raise InferenceCenterError(
        ErrorCode.MODEL_NOT_FOUND,
        f"{directory} has no model {name!r}",
        field="name",
        hint=f"There are {', '.join(models)}." if models else "`inferencecenter model pull` puts one there.",
    )


def read_facts(path: Path) -> ModelFacts:
    """Return the metadata of a GGUF file; for a split model pass the first part.

    Raises:
        InferenceCenterError: ``invalid_model_file``.
    """
    file = read_gguf(path)
    shape = describe(file)
    return ModelFacts(
        title=shape.name,
        architecture=shape.architecture,
        parameters=sum(prod(tensor.shape) for tensor in file.tensors),
        quantization=_quantization(file),
        n_ctx_train=shape.n_ctx_train,
        n_layers=shape.n_layers,
        n_vocab=shape.n_vocab,
        size_bytes=sum(part.stat().st_size for part in file.paths),
        has_template=bool(file.metadata.get("tokenizer.chat_template")),
        n_files=len(file.paths),
    )


def verify(model: ModelFiles, *, report: Callable[[int, int], None] = lambda _done, _total: None) -> IntegrityReport:
    """Read all of a model's files and compare them with the manifest; without one, check only their headers.

    ``report`` is called with the bytes read so far and in total.
    """
    problems = [f"{name} does not exist" for name in model.missing]
    digests = model.manifest.sha256 if model.manifest else {}
    if digests:
        total, done = model.size_bytes, 0
        for path in model.files:
            problems += _checked(path, digests.get(path.name), partial(_report_on, report, done, total))
            done += path.stat().st_size
        problems += [f"{name} was pulled and does not exist" for name in digests if not _has(model, name)]
    if not model.missing:
        try:
            describe(read_gguf(model.paths[0]))
        except InferenceCenterError as error:
            problems.append(error.message)
    return IntegrityReport(model.name, bool(digests), tuple(problems))


def copy(model: ModelFiles, name: str) -> None:
    """Give a model's files a second name in their directory. They take no more space, and each name can be removed.

    Raises:
        InferenceCenterError: ``invalid_request`` for a name that is taken or that of a part, and for a model that lacks
            parts; ``storage_unavailable``.
    """
    if SHARD.match(name) is not None:
        raise _not_copied(f"{name!r} is the name of a part")
    if model.missing:
        raise _not_copied(f"{model.name} lacks {model.missing[0]}")
    directory = model.paths[0].parent
    names = (f"{name}.gguf",) if len(model.paths) == 1 else shard_names(name, len(model.paths))
    if model.mmproj is not None:
        names = (*names, projector_name(name))
    links: list[Path] = []
    try:
        # The first part last: without it the others are not recognized as a model.
        for path, other in reversed([*zip(model.files, names, strict=True)]):
            (directory / other).hardlink_to(path)
            links.append(directory / other)
    except OSError as error:
        for link in links:
            link.unlink()
        if isinstance(error, FileExistsError):
            raise _not_copied(f"{other} exists already") from None
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE, f"{model.name} cannot be copied: {error.strerror}"
        ) from None


def _not_copied(message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field="destination")


def remove(directory: Path, name: str, *, configured: Mapping[Path, str]) -> ModelFiles:
    """Delete a model's files and manifest, and return it. An engine that has it loaded continues.

    Args:
        directory: The models' directory; nothing else is deleted.
        name: The model.
        configured: Files that settings name, with the name of the setting.

    Raises:
        InferenceCenterError: ``model_not_found``; ``invalid_request`` for one that is configured;
            ``storage_unavailable``.
    """
    model = find_model(directory, name)
    for path in model.files:
        if (setting := configured.get(path.resolve()) or configured.get(path)) is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{model.name} is the file of {setting}",
                field="name",
                hint=f"Set {setting} to another model first.",
            )
    try:
        # The first part first: without it the others are not recognized as a model.
        for path in (*model.files, model.manifest_file):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE, f"{path} cannot be deleted: {error.strerror}"
        ) from None
    return model


def _missing(parts: list[Path]) -> tuple[str, ...]:
    part = SHARD.match(parts[-1].stem)
    if part is None:
        return ()
    names = {path.name for path in parts}
    return tuple(name for name in shard_names(part["stem"], int(part["count"])) if name not in names)


def _read_manifest(directory: Path, name: str) -> Manifest | None:
    """Return a model's manifest; ``None`` if it cannot be read."""
    # An unrelated file of that name may raise anything: the model was not pulled.
    with suppress(Exception), manifest_path(directory, name).open("rb") as file:
        return msgspec.json.decode(file.read(_MAX_MANIFEST_BYTES), type=Manifest)
    return None


def _has(model: ModelFiles, name: str) -> bool:
    return name in model.missing or any(path.name == name for path in model.files)


def _checked(path: Path, digest: str | None, report: Callable[[int], None]) -> list[str]:
    if digest is None:
        return [f"{path.name} is not among the files that were pulled"]
    found = hashlib.sha256()
    done = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASHED_BYTES):
                found.update(chunk)
                done += len(chunk)
                report(done)
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return [] if found.hexdigest() == digest else [f"{path.name} has changed since it was pulled: its SHA-256 differs"]


def _report_on(report: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    report(before + done, total)


def _quantization(file: GgufFile) -> str:
    stated = file.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in _FILE_TYPES:
        return _FILE_TYPES[stated]
    weights: Counter[int] = Counter()
    for tensor in file.tensors:
        weights[tensor.type] += prod(tensor.shape)
    return f"type {weights.most_common(1)[0][0]}" if weights else "none"
