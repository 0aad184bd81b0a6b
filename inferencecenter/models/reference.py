"""References to models on a hub: a repository, and which of its models. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.gguf import SHARD

if TYPE_CHECKING:
    from collections.abc import Sequence

_REFERENCE: Final = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<quant>[\w.-]{1,32})|/(?P<file>\S+\.gguf))?$",
    re.ASCII,
)
_QUANT: Final = re.compile(
    r"(?:^|[-._])(?P<quant>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|(?:MX|NV)FP4(?:_MOE)?|BF16|F16|F32))(?=$|[-.])",
    re.IGNORECASE,
)
_NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}$")
_PREFERRED: Final = "Q4_K_M"
_IMATRIX: Final = "imatrix"
"""Prefix of GGUF files that were used to quantize a model."""
_MMPROJ: Final = "mmproj"
"""Part of the names of projectors."""
_PROJECTOR_QUANTS: Final = ("F16", "BF16", "F32", "Q8_0")
"""Types of projectors, the preferred first: F16 is half of F32 with the same rows, BF16 is slow on many processors and
older GPUs, and a projector is small beside its model."""
_MAX_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class ModelReference:
    """``owner/repo``, ``owner/repo:Q4_K_M`` or ``owner/repo/file.gguf``."""

    repo: str
    quant: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        path: Its path in the repository.
        sha256: Hex digest of its content, for files in large file storage.
        blob_id: Git's object name of its content, for others.
    """

    path: Annotated[str, Meta(min_length=1, max_length=1024)]
    size_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    sha256: str | None = None
    blob_id: str | None = None

    @property
    def digest(self) -> str | None:
        """The checksum to verify the content with, in hex; ``None`` if the hub has none."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A model in a repository: one GGUF file, or all parts of a split one in order."""

    name: str
    quant: str | None
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_projector(self) -> bool:
        return _MMPROJ in self.name.lower()

    @property
    def base_name(self) -> str:
        """The name without quantization, and without the sign of a projector, in lower case."""
        words = re.split(r"[-._]", _QUANT.sub("", self.name).lower())
        return "-".join(word for word in words if word not in ("", _MMPROJ, "model"))

    def is_quant(self, wanted: str) -> bool:
        """Return whether its quantization is ``wanted``, ignoring case; ``UD-Q4_K_XL`` is a ``Q4_K_XL`` too."""
        have = (self.quant or "").upper()
        return wanted.upper() in (have, have.removeprefix("UD-"))


def parse_reference(text: str) -> ModelReference:
    """Parse a reference.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{text!r} is not a reference to a model on a hub",
            field="reference",
            hint="Write owner/repo:Q4_K_M, owner/repo/file.gguf, or owner/repo.",
        )
    return ModelReference(**match.groupdict())


def check_name(name: str) -> str:
    """Return ``name`` if it is valid as a model's file name.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if _NAME.fullmatch(name) is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{name!r} is not a valid model name",
            field="name",
            hint="Up to 128 letters, digits and . _ + -, a letter or digit first.",
        )
    return name


def file_names(name: str, count: int) -> tuple[str, ...]:
    """Return the local file names of a model; llama.cpp finds the parts of a split one by these names."""
    return (f"{name}.gguf",) if count == 1 else shard_names(name, count)


def shard_names(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def projector_name(name: str) -> str:
    """Return the file name of the projector that belongs to the model ``name`` in the same directory."""
    return f"{_MMPROJ}-{name}.gguf"


def list_variants(files: Sequence[RemoteFile]) -> tuple[ModelVariant, ...]:
    """Return the models among a repository's files; one with missing parts is left out."""
    models: defaultdict[tuple[str, int], dict[int, RemoteFile]] = defaultdict(dict)
    for file in sorted(files, key=lambda file: file.path):
        path = PurePosixPath(file.path)
        if path.suffix != ".gguf":
            continue
        part = SHARD.match(path.stem)
        place = str(path.parent / (part["stem"] if part else path.stem))
        models[place, int(part["count"]) if part else 1][int(part["number"]) if part else 1] = file
    return tuple(
        ModelVariant(PurePosixPath(place).name, _quant_of(PurePosixPath(place)), tuple(parts.values()))
        for (place, count), parts in models.items()
        if list(parts) == list(range(1, count + 1))
    )


def choose(reference: ModelReference, files: Sequence[RemoteFile]) -> ModelVariant:
    """Return the model of a reference; if that names none, the only one, or the only Q4_K_M.

    Raises:
        InferenceCenterError: ``model_not_found``, with a list of the models.
    """
    variants = list_variants(files)
    if reference.file is not None:
        for variant in variants:
            if any(file.path == reference.file for file in variant.files):
                return variant
        raise _unknown(f"{reference.repo} has no whole model with the file {reference.file}", variants)
    models = [each for each in variants if not each.is_projector and not each.name.lower().startswith(_IMATRIX)]
    if not models:
        raise _unknown(f"{reference.repo} has no GGUF model", ())
    wanted = reference.quant or _PREFERRED
    matching = [variant for variant in models if variant.is_quant(wanted)]
    exact = [variant for variant in matching if (variant.quant or "").upper() == wanted.upper()]
    chosen = exact or matching
    if reference.quant is None and len(models) == 1:
        chosen = models
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise _unknown(f"{reference.repo} has {len(chosen)} models in {wanted}", chosen, by_file=True)
    if reference.quant is None:
        raise _unknown(f"{reference.repo} has {len(models)} models, and none in {_PREFERRED}", models)
    raise _unknown(f"{reference.repo} has no model in {reference.quant}", models)


def choose_projector(model: ModelVariant, files: Sequence[RemoteFile]) -> RemoteFile | None:
    """Return the projector of a model among its repository's files; ``None`` if there is none or it is unclear which.

    It is in the model's folder or in the repository's root. If there are projectors of several models, it is the one
    with the model's name. Of several types the first of ``_PROJECTOR_QUANTS`` is chosen.
    """
    folder = PurePosixPath(model.files[0].path).parent
    found = [each for each in list_variants(files) if each.is_projector and len(each.files) == 1]
    for place in (folder, PurePosixPath()):
        here = [each for each in found if PurePosixPath(each.files[0].path).parent == place]
        if len({each.base_name for each in here}) > 1:
            here = [each for each in here if each.base_name == model.base_name]
        if here:
            return min(here, key=_projector_rank).files[0]
    return None


def _projector_rank(projector: ModelVariant) -> tuple[int, str]:
    quant = projector.quant or ""
    rank = _PROJECTOR_QUANTS.index(quant) if quant in _PROJECTOR_QUANTS else len(_PROJECTOR_QUANTS)
    return rank, projector.name


def _quant_of(place: PurePosixPath) -> str | None:
    """Return the quantization in a model's file name, or in that of its folder."""
    for name in (place.name, place.parent.name):
        found = [match["quant"].upper() for match in _QUANT.finditer(name)]
        if found:
            return found[-1]
    return None


def _unknown(message: str, variants: Sequence[ModelVariant], *, by_file: bool = False) -> InferenceCenterError:
    shown = {variant.files[0].path if by_file or variant.quant is None else variant.quant: None for variant in variants}
    names = ", ".join(list(shown)[:_MAX_SHOWN]) + (", …" if len(shown) > _MAX_SHOWN else "")
    how = "owner/repo/file.gguf" if by_file else "owner/repo:Q4_K_M or owner/repo/file.gguf"
    hint = f"There are {names}. Name one as {how}." if shown else "Models of other forms cannot be run."
    return InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, message, field="reference", hint=hint)
