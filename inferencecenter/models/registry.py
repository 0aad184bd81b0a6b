"""Which models there are: the one of ``[model]``, those of ``[models.NAME]``, and the files in ``models_dir``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from pydantic import ValidationError

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.settings import EngineSettings, bundled_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from inferencecenter.settings import LoraSettings, ModelEntry, Settings

_SHARD: Final = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_LONGEST_NAME: Final = 256
_OWN_OF_ENGINE: Final = ("slots", "n_ctx", "n_gpu_layers", "kv_type_k", "kv_type_v")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model and how it is to be run; two that are equal run alike.

    Attributes:
        name: What clients call it.
        path: Its GGUF file, the first of a split one.
        engine: The engine's settings, with the model's own in their place.
        params: Parameters between those that the file recommends and the configuration's.
        lora: Adapters on top of it.
    """

    name: str
    path: Path
    engine: EngineSettings
    params: Mapping[str, Any]
    lora: tuple[LoraSettings, ...]


@dataclass(frozen=True, slots=True)
class Registry:
    """The models by their names; sessions that name none get ``default``."""

    default: str
    models: Mapping[str, ModelSpec]

    def get(self, name: str) -> ModelSpec:
        """Return a model.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        if (spec := self.models.get(name)) is None:
            raise not_registered(name, self.models)
        return spec


def not_registered(name: str, known: Mapping[str, object]) -> InferenceCenterError:
    """Return what is said to those who name a model that there is not."""
    return InferenceCenterError(
        ErrorCode.MODEL_NOT_FOUND,
        f"no model is named {name[:64]!r}" if name else "the model's name is empty",
        field="model",
        hint=f"There are {', '.join(sorted(known))}." if len(known) > 1 else f"The model is {next(iter(known))}.",
    )


def read_registry(settings: Settings) -> Registry:
    """Return the models that the settings name and those in ``models_dir``. Opens the default one's file.

    Raises:
        InferenceCenterError: ``invalid_config``: two models of one name, or settings of a model that exclude each
            other.
    """
    models = {spec.name: spec for spec in _found(settings)}
    models |= {name: _entry(name, entry, settings) for name, entry in settings.models.items()}
    default = _default(settings, models)
    if default.name in settings.models and models[default.name] != default:
        raise _invalid(
            f"model.path names a file for {default.name}, and so does models.{default.name}", field="model.path"
        )
    return Registry(default.name, {default.name: default} | models | {default.name: default})


def default_model(settings: Settings) -> ModelSpec:
    """Return the model of sessions that name none.

    Raises:
        InferenceCenterError: See ``read_registry``.
    """
    registry = read_registry(settings)
    return registry.get(registry.default)


def files_in(directory: Path) -> dict[str, Path]:
    """Return the GGUF files in a directory by their stems; of a split model the first part, by the stem of all."""
    found: dict[str, Path] = {}
    try:
        paths = sorted(directory.glob("*.gguf"))
    except OSError as error:
        _log.warning("models_dir_unreadable", path=str(directory), reason=error.strerror)
        return found
    for path in paths:
        shard = _SHARD.match(path.stem)
        if shard is None:
            found[path.stem] = path
        elif int(shard["number"]) == 1:
            found.setdefault(shard["stem"], path)
    return found


def _found(settings: Settings) -> Iterator[ModelSpec]:
    for name, path in files_in(settings.models_dir).items():
        yield ModelSpec(name=name, path=path, engine=settings.engine, params={}, lora=())


def _entry(name: str, entry: ModelEntry, settings: Settings) -> ModelSpec:
    own = {field: value for field in _OWN_OF_ENGINE if (value := getattr(entry, field)) is not None}
    if entry.keep_alive_s is not None:
        own["sleep_after_s"] = entry.keep_alive_s
    try:
        # A copy would not be validated.
        engine = EngineSettings(**(settings.engine.model_dump() | own))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        reason = str(detail.get("ctx", {}).get("error", detail["msg"]))
        raise _invalid(f"models.{name}: {reason}", field=f"models.{name}") from None
    path = entry.path or files_in(settings.models_dir).get(name, settings.models_dir / f"{name}.gguf")
    return ModelSpec(name=name, path=path, engine=engine, params=entry.params, lora=entry.lora)


def _default(settings: Settings, models: Mapping[str, ModelSpec]) -> ModelSpec:
    chosen = settings.model
    if chosen.path is None and chosen.name is not None and chosen.name in models:
        if chosen.lora:
            raise _invalid(f"model.lora has no effect on models.{chosen.name}", field="model.lora")
        return models[chosen.name]
    if chosen.path is None and chosen.name is not None and settings.engine.backend == "llama":
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"model.name is {chosen.name!r}, which is no model, and model.path names no file",
            hint=f"There are {', '.join(sorted(models))}." if models else f"{settings.models_dir} has no models.",
            field="model.name",
        )
    path = chosen.path or bundled_model()
    name = chosen.name or _own_name(path, backend=settings.engine.backend)
    return ModelSpec(name=name, path=path, engine=settings.engine, params={}, lora=chosen.lora)


def _own_name(path: Path, *, backend: str) -> str:
    """Return what the file calls itself; one that cannot be read has a stem, and its engine says what is wrong."""
    if backend != "llama":
        return backend
    try:
        own = read_gguf(path).metadata.get("general.name")
    except InferenceCenterError:
        own = None
    return own[:_LONGEST_NAME] if isinstance(own, str) and own else path.stem


def _invalid(message: str, *, field: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field=field)
