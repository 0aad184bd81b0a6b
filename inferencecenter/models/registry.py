"""The registry of models: the one of ``[model]``, those of ``[models.NAME]``, and the files in ``models_dir``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog
from pydantic import ValidationError

from inferencecenter.config.sections import EngineSettings, expand
from inferencecenter.config.settings import MODEL_NAME, bundled_model, bundled_projector
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.hardware import ggml
from inferencecenter.hardware.gguf import SHARD, read_summary
from inferencecenter.hardware.model_shape import ENCODERS
from inferencecenter.models.files import gguf_paths
from inferencecenter.models.reference import projector_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from inferencecenter.config.sections import LoraSettings, ModelKind
    from inferencecenter.config.settings import ModelEntry, Settings

DEMO: Final = "demo"
"""Name of the bundled model, unless a registered model has it."""

# Settings of ``[engine]`` that concern no single engine: changing them restarts no model.
DAEMON_SETTINGS: Final = frozenset(
    {"max_resident", "min_residency_s", "exit_when_failed", "max_client_crashes", "client_crash_window_s"}
)

LOCAL_NODE: Final = "local"
"""Stands for this machine among the nodes of a model."""
_PROJECTOR: Final = "clip"
"""The architecture of projectors."""
_NAME: Final = re.compile(MODEL_NAME)
_BUNDLED: Final = "InferenceCenter Demo"
"""Name of the bundled model where another one is called ``DEMO``."""
_LONGEST_NAME: Final = 256
_SHOWN_NAMES: Final = 5
_SHOWN_CHARS: Final = 80
_OWN_OF_ENGINE: Final = ("slots", "n_ctx", "n_gpu_layers", "kv_type_k", "kv_type_v", "speculative", "draft")
_OF_THE_DAEMON: Final = {name: EngineSettings.model_fields[name].default for name in DAEMON_SETTINGS}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model and its settings; engines of equal specs are interchangeable.

    Attributes:
        name: The name that clients use.
        path: Its GGUF file, the first part of a split one.
        engine: The engine's settings with the model's overrides; ``DAEMON_SETTINGS`` are at their defaults.
        params: Parameters with a precedence between the file's recommendations and the configuration.
        lora: LoRA adapters.
        draft: The GGUF file of the model that drafts tokens for it.
        mmproj: The GGUF file of its projector, if it takes images.
        text_only: Whether it takes no images, even if a projector is beside its file.
        kind: Its kind.
        matryoshka: Whether its vectors may be shortened.
        n_embd: Width of the vectors in its file; ``None`` where that does not state it.
        nodes: The machine of each of its engines.
        on_all_nodes: Whether it has further engines, on all machines that join the cluster.
        rpc_nodes: Other machines whose devices its one engine uses.
    """

    name: str
    path: Path
    engine: EngineSettings
    params: Mapping[str, Any] = field(default_factory=dict)
    lora: tuple[LoraSettings, ...] = ()
    draft: Path | None = None
    mmproj: Path | None = None
    text_only: bool = False
    kind: ModelKind = "chat"
    matryoshka: bool = False
    n_embd: int | None = None
    nodes: tuple[str, ...] = (LOCAL_NODE,)
    on_all_nodes: bool = False
    rpc_nodes: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """The number of its engines."""
        return len(self.nodes)

    @property
    def is_on_nodes(self) -> bool:
        """Whether it has replicas, or an engine on another machine."""
        return self.on_all_nodes or self.nodes != (LOCAL_NODE,)

    @property
    def uses_other_machines(self) -> bool:
        """Whether it has engines on other machines, or an engine that uses their devices."""
        return bool({*self.nodes} - {LOCAL_NODE} or self.on_all_nodes or self.rpc_nodes)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is loaded from."""
        others = (path for path in (self.draft, self.mmproj) if path is not None)
        return (self.path, *(adapter.path for adapter in self.lora), *others)


@dataclass(frozen=True, slots=True)
class Registry:
    """The models by name; sessions that name none get ``default``.

    ``aliases`` are further names, each with the model's. ``remarks`` are sentences about files in ``models_dir`` that
    cannot be used. ``reread`` reads it anew.
    """

    default: str
    models: Mapping[str, ModelSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    reread: Callable[[], Registry] | None = field(default=None, compare=False, repr=False)

    def with_new_files(self) -> Registry:
        """Return the registry with models added to ``models_dir`` since; reads the directory.

        Raises:
            InferenceCenterError: See ``read_registry``.
        """
        if self.reread is None:
            return self
        return replace(self, models={**self.reread().models, **self.models})

    def get(self, name: str, *, field: str = "model") -> ModelSpec:
        """Return the model that a request names in ``field``.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        if (spec := self.models.get(name)) is None:
            raise not_registered(name, self.models, field=field)
        return spec

    def log_remarks(self) -> None:
        """Log the remarks in the daemon; commands print them themselves."""
        for remark in self.remarks:
            _log.warning("models_dir", reason=remark)


def not_registered(name: str, known: Mapping[str, object], *, field: str = "model") -> InferenceCenterError:
    """Return the error for the name of a model that does not exist."""
    return InferenceCenterError(
        ErrorCode.MODEL_NOT_FOUND,
        f"no model is named {name[:64]!r}" if name else "the model's name is empty",
        field=field,
        hint=f"There are {', '.join(sorted(known))}." if len(known) > 1 else f"The model is {next(iter(known))}.",
    )


def _unreadable(reason: str) -> InferenceCenterError:
    return _invalid(
        f"the models cannot be read: {reason}",
        field="models_dir",
        hint="model.path, models.NAME.path and models_dir must name files and a directory.",
    )


def _invalid(message: str, *, field: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field=field, hint=hint)


@foreign_input(_unreadable)
def read_registry(settings: Settings) -> Registry:
    """Return the models of the settings and those in ``models_dir``. Reads the headers of files there.

    An entry hides a file of its name, and the model of ``model.path`` hides both.

    Raises:
        InferenceCenterError: ``invalid_config``: two models of one name, contradictory settings of a model, a file that
            is no projector, or a wrong file of scripted answers.
    """
    if settings.engine.backend == "script" and settings.engine.script is not None:
        from inferencecenter.models.script import read_script  # noqa: PLC0415 - its tables take a while to build

        read_script(settings.engine.script)
    scanned = _scan(settings.models_dir)
    shared = settings.engine.model_copy(update=_OF_THE_DAEMON)
    found = {name: ModelSpec(name=name, path=path, engine=shared) for name, path in scanned.models.items()}
    entries = {name: _entry(name, entry, settings, scanned.models) for name, entry in settings.models.items()}
    default = _default(settings, found, entries, shared)
    if default != entries.get(default.name, default):
        raise _invalid(
            f"the default model is called {default.name}, and models.{default.name} is another",
            field="model.name" if settings.model.path is None else "model.path",
            hint=f"Remove model.path and set model.name to {default.name!r} to have that one as the default, "
            "or call the default something else with model.name.",
        )
    models = found | entries | {default.name: default}
    models = {name: _with_kind(_with_draft(spec, models), settings) for name, spec in models.items()}
    for spec in models.values():
        _check_projector(spec, field="model.mmproj" if spec.name == default.name else f"models.{spec.name}.mmproj")
    models = {name: _with_projector(spec, scanned) for name, spec in models.items()}
    return Registry(
        default.name,
        models,
        aliases=_aliases(settings, models, default=default.name),
        remarks=scanned.remarks(named={spec.path for spec in models.values()}),
        reread=lambda: read_registry(settings),
    )


def default_model(settings: Settings) -> ModelSpec:
    """Return the model of sessions that name none.

    Raises:
        InferenceCenterError: See ``read_registry``.
    """
    registry = read_registry(settings)
    return registry.get(registry.default)


def draft_file(engine: EngineSettings, models: Mapping[str, ModelSpec], *, of: str) -> Path | None:
    """Return the file of the draft model of the model ``of``, which names a model or a file; ``None`` without one.

    Raises:
        InferenceCenterError: ``invalid_config`` for the name of a model that does not exist.
    """
    wanted = engine.draft
    if not wanted or engine.backend != "llama":
        return None
    if wanted in models:
        return models[wanted].path
    if "/" in wanted or wanted.endswith(".gguf"):
        return expand(Path(wanted))
    raise _invalid(
        f"the draft model of {of} is {wanted!r}, which is no model and no GGUF file",
        field="engine.draft",
        hint=f"There are {', '.join(sorted(models))}.",
    )


def files_in(directory: Path) -> dict[str, Path]:
    """Return the model files in a directory by stem; of a split model the first part, by the common stem."""
    return _scan(directory).models


def configured_files(settings: Settings) -> dict[Path, str]:
    """Return the configured files, with symbolic links resolved, and the setting that names each."""
    there = files_in(settings.models_dir)
    named: dict[Path | None, str] = {
        (entry.path or there.get(name)): f"models.{name}" for name, entry in settings.models.items()
    }
    if settings.model.path is not None:
        named[settings.model.path] = "model.path"
    elif settings.model.name is not None and settings.model.name not in settings.models:
        named[there.get(settings.model.name)] = "model.name"
    adapters = {adapter.path: "model.lora" for adapter in settings.model.lora}
    if isinstance(settings.model.mmproj, Path):
        adapters[settings.model.mmproj] = "model.mmproj"
    for name, entry in settings.models.items():
        adapters |= {adapter.path: f"models.{name}.lora" for adapter in entry.lora}
        if isinstance(entry.mmproj, Path):
            adapters[entry.mmproj] = f"models.{name}.mmproj"
    wanted = {f"models.{name}.draft": entry.draft for name, entry in settings.models.items()}
    wanted["engine.draft"] = settings.engine.draft
    drafts = {
        there.get(draft) or expand(Path(draft)): setting
        for setting, draft in wanted.items()
        if draft and draft not in settings.models
    }
    return {path.resolve(): setting for path, setting in (adapters | drafts | named).items() if path is not None}


@dataclass(frozen=True, slots=True)
class _Directory:
    """The contents of ``models_dir``, without adapters and other companions of models.

    Attributes:
        models: Files that sessions may name.
        unnameable: Files whose names are not allowed, by name.
        projectors: Projectors by the model's file that they belong to by their names.
        problem: Why the directory cannot be read.
    """

    path: Path
    models: dict[str, Path]
    unnameable: dict[str, Path]
    projectors: dict[Path, Path]
    problem: str = ""

    def remarks(self, *, named: Collection[Path]) -> tuple[str, ...]:
        """Return the remarks; the files ``named`` in settings have names there."""
        if self.problem:
            return (f"{self.path} cannot be read: {self.problem}",)
        # A name may contain bytes that are not text, or control sequences of a terminal.
        nameless = [ascii(name[:_SHOWN_CHARS]) for name, path in self.unnameable.items() if path not in named]
        if not nameless:
            return ()
        shown = ", ".join(nameless[:_SHOWN_NAMES]) + (", …" if len(nameless) > _SHOWN_NAMES else "")
        return (
            f"{self.path} has files whose names sessions cannot use: {shown}; rename them, or give them a name with "
            "[models.NAME] and path",
        )


def _scan(directory: Path) -> _Directory:
    found = _Directory(directory, {}, {}, {})
    projectors: set[str] = set()
    try:
        paths = gguf_paths(directory)
    except FileNotFoundError:
        return found
    except OSError as error:
        return replace(found, problem=error.strerror or str(error))
    for path in paths:
        shard = SHARD.match(path.stem)
        name = shard["stem"] if shard else path.stem
        if path.name.startswith(".") or (shard and int(shard["number"]) != 1):
            continue
        metadata = read_summary(path)
        if metadata.get("general.architecture") == _PROJECTOR:
            projectors.add(path.name)
        if not _is_model(metadata):
            continue
        group = found.models if _NAME.fullmatch(name) else found.unnameable
        if shard:
            group.setdefault(name, path)
        else:
            group[name] = path
    for name, path in (found.models | found.unnameable).items():
        if projector_name(name) in projectors:
            found.projectors[path] = directory / projector_name(name)
    return found


def _is_model(metadata: Mapping[str, object]) -> bool:
    """Return whether a file is a model, not an adapter or projector; an unreadable one fails when it is loaded."""
    return metadata.get("general.type", "model") == "model" and metadata.get("general.architecture") != _PROJECTOR


def _entry(name: str, entry: ModelEntry, settings: Settings, scanned: Mapping[str, Path]) -> ModelSpec:
    own = {field: value for field in _OWN_OF_ENGINE if (value := getattr(entry, field)) is not None}
    if entry.keep_alive_s is not None:
        own["sleep_after_s"] = entry.keep_alive_s
    try:
        # A copy would not be validated.
        engine = EngineSettings(**(settings.engine.model_dump() | own | _OF_THE_DAEMON))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        reason = str(detail.get("ctx", {}).get("error", detail["msg"]))
        raise _invalid(
            f"models.{name}: {reason}",
            field=f"models.{name}",
            hint="Its settings override [engine]; keep_alive_s overrides sleep_after_s.",
        ) from None
    path = entry.path or scanned.get(name, settings.models_dir / f"{name}.gguf")
    if settings.cluster.address is None and entry.replicas == "all":
        raise _invalid(
            f"models.{name}: it has replicas on all machines, but this daemon is in no cluster",
            field=f"models.{name}.replicas",
            hint="Set cluster.address, or a number of replicas.",
        )
    _check_nodes(name, entry, engine, settings)
    on_all_nodes = entry.replicas == "all" and not entry.nodes
    spec = ModelSpec(
        name=name,
        path=path,
        engine=engine,
        params=entry.params,
        lora=entry.lora,
        nodes=entry.nodes or (LOCAL_NODE,) * (1 if entry.replicas == "all" else entry.replicas),
        on_all_nodes=on_all_nodes,
        rpc_nodes=entry.rpc_nodes,
    )
    return _with_chosen_projector(spec, entry.mmproj)


def _check_nodes(name: str, entry: ModelEntry, engine: EngineSettings, settings: Settings) -> None:
    for setting, others in (("nodes", set(entry.nodes) - {LOCAL_NODE}), ("rpc_nodes", set(entry.rpc_nodes))):
        if others and settings.cluster.address is None:
            raise _invalid(
                f"models.{name}: it has {setting}, but this daemon is in no cluster",
                field=f"models.{name}.{setting}",
                hint="Set cluster.address.",
            )
    if not entry.rpc_nodes:
        return
    field = f"models.{name}.rpc_nodes"
    if entry.replicas != 1 or entry.nodes not in ((), (LOCAL_NODE,)):
        raise _invalid(
            f"models.{name}: rpc_nodes excludes replicas and nodes",
            field=field,
            hint="One engine, on this machine, uses the devices of the others.",
        )
    if LOCAL_NODE in entry.rpc_nodes or len(set(entry.rpc_nodes)) != len(entry.rpc_nodes):
        raise _invalid(
            f"models.{name}: rpc_nodes names a machine twice, or this one",
            field=field,
            hint="Name each other machine once; the GPUs of this one are always used.",
        )
    if engine.backend != "llama" or not ggml.reaches_servers():
        raise _invalid(
            f"models.{name}: it has rpc_nodes, but llama.cpp was built without RPC, or is not the backend",
            field=field,
            hint="Build it with CMAKE_ARGS=-DGGML_RPC=ON, here and on the nodes.",
        )


def _aliases(settings: Settings, models: Collection[str], *, default: str) -> dict[str, str]:
    """Return aliases by name, each with its model's name.

    Raises:
        InferenceCenterError: ``invalid_config`` for one that names two models.
    """
    pairs = [(alias, default, "model.aliases") for alias in settings.model.aliases]
    for name, entry in settings.models.items():
        pairs += [(alias, name, f"models.{name}.aliases") for alias in entry.aliases]
    aliases: dict[str, str] = {}
    for alias, name, where in pairs:
        other = alias if alias in models else aliases.get(alias, name)
        if other != name:
            raise _invalid(
                f"{alias} is an alias of {name} and names {other} too", field=where, hint="Give each name to one model."
            )
        aliases[alias] = name
    former = _former_name(settings)
    if former is not None and former not in models:
        aliases.setdefault(former, default)
    return aliases


def _former_name(settings: Settings) -> str | None:
    """Return the name of an unnamed default model up to version 0.1, which sessions may still ask for."""
    chosen = settings.model
    if chosen.name is not None or chosen.path is None or settings.engine.backend != "llama":
        return None
    own = read_summary(chosen.path).get("general.name")
    return own[:_LONGEST_NAME] if isinstance(own, str) and own else None


def _default(
    settings: Settings, found: Mapping[str, ModelSpec], entries: Mapping[str, ModelSpec], shared: EngineSettings
) -> ModelSpec:
    chosen, models = settings.model, {**found, **entries}
    if chosen.path is None and chosen.name is not None and chosen.name in models:
        return _with_companions(models[chosen.name], settings)
    if chosen.path is None and chosen.name not in (None, DEMO) and shared.backend == "llama":
        raise _invalid(
            f"model.name is {chosen.name!r}, which does not exist, and model.path names no file",
            field="model.name",
            hint=f"There are {', '.join(sorted(models))}." if models else f"{settings.models_dir} has no models.",
        )
    path = chosen.path or bundled_model()
    name = chosen.name or _stem_of(chosen.path, found) or _name_of(path, backend=shared.backend, taken=models)
    bundled = bundled_projector() if shared.backend == "llama" and path == bundled_model() else None
    spec = ModelSpec(name=name, path=path, engine=shared, lora=chosen.lora)
    return _with_chosen_projector(spec, chosen.mmproj or bundled)


def _with_companions(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Return a model of ``models_dir`` with the companions in ``[model]``; a model with an entry has its own."""
    for name in ("lora", "mmproj"):
        given = getattr(settings.model, name)
        if given and spec.name in settings.models:
            raise _invalid(
                f"model.{name} has no effect on models.{spec.name}",
                field=f"model.{name}",
                hint=f"That model has models.{spec.name}.{name}.",
            )
    spec = replace(spec, lora=settings.model.lora or spec.lora)
    return spec if settings.model.mmproj is None else _with_chosen_projector(spec, settings.model.mmproj)


def _with_chosen_projector(spec: ModelSpec, chosen: Literal["off"] | Path | None) -> ModelSpec:
    return replace(spec, mmproj=chosen if isinstance(chosen, Path) else None, text_only=chosen == "off")


def _check_projector(spec: ModelSpec, *, field: str) -> None:
    """Refuse a file that is no projector.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    if spec.mmproj is None or spec.engine.backend != "llama":
        return
    if read_summary(spec.mmproj).get("general.architecture") != _PROJECTOR:
        found = "is no projector" if spec.mmproj.exists() else "does not exist"
        raise _invalid(
            f"{field} is {spec.mmproj}, which {found}",
            field=field,
            hint="It must be a GGUF file of the architecture clip, usually called mmproj-….gguf.",
        )


def _with_projector(spec: ModelSpec, scanned: _Directory) -> ModelSpec:
    """Return a model without a configured projector with the one beside its file, if the engine can use it."""
    is_open = spec.mmproj is None and not spec.text_only
    may_see = spec.path in scanned.projectors and spec.kind == "chat" and spec.engine.backend == "llama"
    return replace(spec, mmproj=scanned.projectors[spec.path]) if is_open and may_see else spec


def _with_draft(spec: ModelSpec, models: Mapping[str, ModelSpec]) -> ModelSpec:
    draft = draft_file(spec.engine, models, of=spec.name)
    return spec if draft is None else replace(spec, draft=draft)


_POOLED: Final[Mapping[object, ModelKind]] = {1: "embedding", 2: "embedding", 3: "embedding", 4: "reranking"}
"""Kinds by ``llama_pooling_type``: mean, first token, last token, rank."""


def kind_of_file(path: Path) -> ModelKind:
    """Return the kind of the model in a file; an unreadable file counts as a chat model."""
    return _kind_of(read_summary(path))


def _kind_of(metadata: Mapping[str, object]) -> ModelKind:
    architecture = metadata.get("general.architecture")
    pooled = _POOLED.get(metadata.get(f"{architecture}.pooling_type"))
    return pooled or ("embedding" if architecture in ENCODERS else "chat")


def _with_kind(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Return a model with its kind and what its vectors are like, as configured or as in the file."""
    entry = settings.models.get(spec.name)
    metadata = read_summary(spec.path) if spec.engine.backend == "llama" else {}
    width = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
    return replace(
        spec,
        kind=(entry and entry.kind) or _kind_of(metadata),
        matryoshka=bool(entry and entry.matryoshka),
        n_embd=width if isinstance(width, int) and width > 0 else None,
    )


def _stem_of(path: Path | None, found: Mapping[str, ModelSpec]) -> str | None:
    """Return the name that a file has in ``models_dir``: by another name it would be a second model."""
    if path is None:
        return None
    return next((name for name, spec in found.items() if spec.path.resolve() == path.resolve()), None)


def _name_of(path: Path, *, backend: str, taken: Collection[str]) -> str:
    """Return the name of a model that the settings do not name: that of its file."""
    if backend != "llama":
        return backend
    if path.resolve() == bundled_model().resolve():
        return _BUNDLED if DEMO in taken else DEMO
    shard = SHARD.match(path.stem)
    return shard["stem"] if shard else path.stem
