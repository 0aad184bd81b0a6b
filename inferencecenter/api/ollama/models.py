"""``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``: the models as Ollama describes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
from pydantic import Field

from inferencecenter.api.body import invalid_field
from inferencecenter.api.endpoint import LATEST, Call, Operation, document, known_name
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.ollama.answers import timestamp
from inferencecenter.api.ollama.errors import OLLAMA_ERRORS
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.sampling import Name
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.gguf import Array, read_gguf
from inferencecenter.ipc.port import EngineState
from inferencecenter.models.files import read_facts
from inferencecenter.sessions.context import check_model

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.api.endpoint import Call, Reply
    from inferencecenter.ipc.messages import InfillTokens, ModelInfo
    from inferencecenter.models.files import ModelFacts
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.server.context import ServedModels


# Names of models in Ollama's requests and answers.


def tagged(name: str) -> str:
    """Return a name as Ollama shows it, which has a tag."""
    return name if ":" in name else name + LATEST


def allowed_model(call: Call, name: str | None) -> str:
    """Return the name of a model that the caller may use; ``None`` is the default.

    Raises:
        InferenceCenterError: ``forbidden``, or ``model_not_found``.
    """
    context, client = call.context, call.caller.client
    name = context.models.default if name is None else name
    check_model(name, context.limits_of(client.client_id, client.token_id))
    context.models.spec_of(name)
    return name


OLLAMA_VERSION: Final = "0.12.6"
"""The version of Ollama whose API this is; some clients refuse older ones."""
_INFILL_TOKENS: Final = frozenset({"tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"})
"""Keys of a file that names the tokens around a gap."""
NEVER: Final = "9999-12-31T23:59:59Z"
"""Expiry of a loaded model: far in the future, since models are evicted on demand."""


class NamedModel(DialectModel):
    """The name of a model, in either field."""

    model: Name | None = Field(default=None, description="A name listed by `/api/tags`, with or without `:latest`.")
    name: Name | None = Field(default=None, description="The same, as the field was called first.")

    def given(self, models: ServedModels) -> str:
        """Return the daemon's name of the model.

        Raises:
            InferenceCenterError: ``invalid_request`` without a name.
        """
        found = self.model or self.name
        if found is None:
            raise invalid_field("model", "model is required")
        return known_name(models, found)


class OllamaShowRequest(NamedModel):
    """The model to be described."""


OLLAMA_SHOW_FIELDS: Final = FieldTable(
    "ollama-show",
    OllamaShowRequest,
    rules=(
        FieldRule(
            field="verbose",
            values="`true`",
            why="vocabularies are not returned",
            applies=lambda value, _: value is True,
        ),
        FieldRule(field="system", why="prompts are part of requests"),
        FieldRule(field="template", why="the template is that of the model file"),
        FieldRule(field="options", why="parameters are part of requests"),
    ),
)
"""The fields of ``/api/show``."""


OLLAMA_QUERY: Final = FieldTable("ollama")
"""Query parameters of the lists, of which there are none."""


class OllamaDetails(AnswerModel):
    """Facts of a model's file; empty if it cannot be read."""

    parent_model: str = Field(description="Always empty.")
    format: Literal["gguf"] = Field(description="Format of the file.")
    family: str = Field(description="Architecture.")
    families: list[str] = Field(description="The same.")
    parameter_size: str = Field(description="Number of parameters, such as `7.6B`.")
    quantization_level: str = Field(description="Type of most weights.")


class OllamaModel(AnswerModel):
    """A model that the client may use."""

    name: str = Field(description="Its name, with a tag.")
    model: str = Field(description="The same.")
    modified_at: str = Field(description="When its file was changed.")
    size: int = Field(description="Bytes of its files.")
    digest: str = Field(description="Identifies the version of its file; not a checksum.")
    details: OllamaDetails = Field(description="Properties of its file.")


class OllamaModels(AnswerModel):
    """All models that the client may use, by name."""

    models: list[OllamaModel] = Field(description="The models.")


class ModelInMemory(AnswerModel):
    """A model in memory."""

    name: str = Field(description="Its name, with a tag.")
    model: str = Field(description="The same.")
    size: int = Field(description="Bytes in memory.")
    size_vram: int = Field(description="Of those, bytes in memory of GPUs.")
    digest: str = Field(description="As in `/api/tags`.")
    details: OllamaDetails = Field(description="Properties of its file.")
    expires_at: str = Field(description="Always far in the future: a model stays until its memory is needed.")
    context_length: int = Field(description="Context size of a session in tokens.")


class ModelsInMemory(AnswerModel):
    """All models in memory that the client may use."""

    models: list[ModelInMemory] = Field(description="The models.")


class ShownModel(AnswerModel):
    """A model in detail."""

    modelfile: str = Field(description="Its name and its parameters, in the form of a Modelfile.")
    parameters: str = Field(
        description="Its context size as `num_ctx`, if it is loaded, and its configured parameters, one a line."
    )
    template: str = Field(
        description="Chat template of the file; for a loaded model that fills gaps with the tokens around them."
    )
    details: OllamaDetails = Field(description="Properties of its file.")
    model_info: dict[str, Any] = Field(description="Metadata of the file; lists are null.")
    capabilities: list[Literal["completion", "vision", "embedding", "tools", "thinking", "insert"]] = Field(
        description="What it does; tools and thinking are those that its template mentions, insert those that its file "
        "or, once it is loaded, its vocabulary has tokens for."
    )
    modified_at: str = Field(description="When its file was changed.")


class OllamaVersion(AnswerModel):
    """The version of Ollama's API."""

    version: str = Field(description="A version of Ollama; that of the daemon is in `/healthz`.")


@dataclass(frozen=True, slots=True)
class FileState:
    """A model's file as it is now; ``facts`` is ``None`` if it cannot be read."""

    size_bytes: int
    modified_s: float
    digest: str
    facts: ModelFacts | None

    @classmethod
    def of(cls, spec: ModelSpec) -> FileState:
        """Read the file of a model; to be called off the event loop."""
        try:
            found = spec.path.stat()
        except OSError:
            return cls(0, 0.0, hashlib.sha256(spec.name.encode()).hexdigest(), None)
        facts = _facts(spec.path, found.st_mtime_ns, found.st_size)
        identity = f"{spec.name}\0{found.st_size}\0{found.st_mtime_ns}"
        size = found.st_size if facts is None else facts.size_bytes
        return cls(size, found.st_mtime, hashlib.sha256(identity.encode()).hexdigest(), facts)

    @property
    def modified_at(self) -> str:
        """Time of the last change in RFC 3339."""
        return timestamp(self.modified_s)

    @property
    def details(self) -> dict[str, Any]:
        """The fields of ``OllamaDetails``."""
        facts = self.facts
        family = "" if facts is None else facts.architecture
        return {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "" if facts is None else _counted(facts.parameters),
            "quantization_level": "" if facts is None else facts.quantization,
        }


@lru_cache(maxsize=256)
def _facts(path: Path, _mtime_ns: int, _size: int) -> ModelFacts | None:
    """Return the metadata of a file, read once for each version of it."""
    try:
        return read_facts(path)
    except InferenceCenterError:
        return None


def _counted(number: int) -> str:
    """Return a number of parameters as Ollama shows it."""
    for unit, suffix, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if number >= unit:
            return f"{number / unit:.{digits}f}{suffix}"
    return str(number)


async def tags(call: Call) -> Reply:
    """Return all models that the client may use."""
    context = call.context
    specs = [context.models.spec_of(model.name) for model in context.models_for(call.caller.client)]
    states = await _states(call, specs)
    models = [
        {
            **_named(spec),
            "modified_at": state.modified_at,
            "size": state.size_bytes,
            "digest": state.digest,
            "details": state.details,
        }
        for spec, state in zip(specs, states, strict=True)
    ]
    return document({"models": models})


async def loaded(call: Call) -> Reply:
    """Return all models in memory that the client may use."""
    context, client = call.context, call.caller.client
    limits = context.limits_of(client.client_id, client.token_id)
    infos = {
        name: status.model
        for name, status in context.models.statuses.items()
        if status.state is EngineState.READY and status.model is not None and limits.allows_model(name)
    }
    specs = [context.models.spec_of(name) for name in infos]
    states = await _states(call, specs)
    models = [
        {
            **_named(spec),
            "size": _bytes_of(info, on_gpu=False),
            "size_vram": _bytes_of(info, on_gpu=True),
            "digest": state.digest,
            "details": state.details,
            "expires_at": NEVER,
            "context_length": info.n_ctx,
        }
        for spec, state, info in zip(specs, states, infos.values(), strict=True)
    ]
    return document({"models": models})


async def show(call: Call) -> Reply:
    """Return a model in detail."""
    request: OllamaShowRequest = call.body
    call.context.operations.charge(call.caller.client.client_id)
    spec = call.context.models.spec_of(allowed_model(call, request.given(call.context.models)))
    loaded = call.context.models.engine(spec.name).status.model
    shown = await call.context.disk_worker.run(call.caller.client.client_id, partial(_shown, spec, loaded))
    return document(shown)


async def version(_call: Call) -> Reply:
    """Return the version of Ollama's API."""
    return document({"version": OLLAMA_VERSION})


async def _states(call: Call, specs: list[ModelSpec]) -> list[FileState]:
    client_id = call.caller.client.client_id
    return await call.context.disk_worker.run(client_id, lambda: [FileState.of(spec) for spec in specs])


def _named(spec: ModelSpec) -> dict[str, str]:
    return {"name": tagged(spec.name), "model": tagged(spec.name)}


def _bytes_of(info: ModelInfo, *, on_gpu: bool) -> int:
    """Return a model's use of all memory, or of GPU memory; without a measurement the size of its weights."""
    if not info.memory:
        return 0 if on_gpu else info.size_bytes
    return sum(
        use.weight_bytes + use.kv_bytes + use.compute_bytes + use.output_bytes
        for use in info.memory
        if not on_gpu or not (use.name.startswith("CPU") or use.name.endswith("_Host"))
    )


def _shown(spec: ModelSpec, loaded: ModelInfo | None) -> dict[str, Any]:
    """Return the fields of ``ShownModel``; reads the file.

    Clients read the context size from the parameters, a line each, and take ``.Suffix`` in the template for the sign of
    a model that fills gaps, so both are as Ollama writes them.
    """
    state = FileState.of(spec)
    metadata = {} if state.facts is None else dict(read_gguf(spec.path).metadata)
    stated = metadata.pop("tokenizer.chat_template", "")
    template = stated if isinstance(stated, str) else ""
    info = {name: None if isinstance(value, Array) else value for name, value in metadata.items()}
    if state.facts is not None:
        info["general.parameter_count"] = state.facts.parameters
    infill = None if loaded is None else loaded.infill
    inserts = infill is not None or not _INFILL_TOKENS.isdisjoint(metadata)
    parameters = [] if loaded is None else [f"num_ctx {loaded.n_ctx}"]
    for name, value in spec.params.items():
        values = value if isinstance(value, list) else [value]
        parameters += [f"{name} {orjson.dumps(each).decode()}" for each in values]
    return {
        "modelfile": "\n".join([f"FROM {spec.name}", *(f"PARAMETER {each}" for each in parameters)]),
        "parameters": "\n".join(parameters),
        "template": template if infill is None else _with_gap(template, infill),
        "details": state.details,
        "model_info": info,
        "capabilities": _capabilities(spec, template, inserts=inserts),
        "modified_at": state.modified_at,
    }


def _with_gap(template: str, infill: InfillTokens) -> str:
    """Return a template with the tokens around a gap, in Ollama's notation."""
    gap = f"{infill.prefix}{{{{ .Prompt }}}}{infill.suffix}{{{{ .Suffix }}}}{infill.middle}"
    return f"{{{{ if .Suffix }}}}{gap}{{{{ else }}}}{template}{{{{ end }}}}"


def _capabilities(spec: ModelSpec, template: str, *, inserts: bool) -> list[str]:
    if spec.kind != "chat":
        return ["embedding"] if spec.kind == "embedding" else []
    thinks = "enable_thinking" in template or "<think>" in template
    found = {"vision": spec.mmproj is not None, "tools": "tools" in template, "thinking": thinks, "insert": inserts}
    return ["completion", *(name for name, has in found.items() if has)]


OPERATIONS: Final = (
    Operation(
        method="GET",
        path="/api/tags",
        summary="List the models, as Ollama does.",
        handler=tags,
        answer=OllamaModels,
        fields=OLLAMA_QUERY,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
    Operation(
        method="HEAD",
        path="/api/tags",
        summary="Return the head of the list of models.",
        handler=tags,
        fields=OLLAMA_QUERY,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
    Operation(
        method="GET",
        path="/api/ps",
        summary="List the models in memory, as Ollama does.",
        handler=loaded,
        answer=ModelsInMemory,
        fields=OLLAMA_QUERY,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
    Operation(
        method="POST",
        path="/api/show",
        summary="Describe a model, as Ollama does.",
        handler=show,
        body=OllamaShowRequest,
        answer=ShownModel,
        errors=(ErrorCode.MODEL_NOT_FOUND,),
        fields=OLLAMA_SHOW_FIELDS,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
    Operation(
        method="GET",
        path="/api/version",
        summary="Return the version of Ollama whose API this is.",
        handler=version,
        answer=OllamaVersion,
        scope=None,
        fields=OLLAMA_QUERY,
        error_format=OLLAMA_ERRORS,
    ),
    Operation(
        method="HEAD",
        path="/api/version",
        summary="Return the head of the version.",
        handler=version,
        scope=None,
        fields=OLLAMA_QUERY,
        error_format=OLLAMA_ERRORS,
    ),
)
