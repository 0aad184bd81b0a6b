"""``/v1/models``: the available models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, Field

from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.api.foreign_fields import FieldRule, FieldTable
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.protocol.values import ModelSummary
    from inferencecenter.server.context import ServerContext


_ALL_LISTED: Final = "all models are listed at once"

MODELS_FIELDS: Final = FieldTable(
    "models",
    rules=(
        FieldRule(field="limit", why=_ALL_LISTED),
        FieldRule(field="after_id", why=_ALL_LISTED),
        FieldRule(field="before_id", why=_ALL_LISTED),
    ),
)
"""Query parameters of the list of models, which are Anthropic's."""


class Model(BaseModel, defer_build=True):
    """A model that the client may use, with the fields of OpenAI and of Anthropic."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds of the daemon's start.")
    type: Literal["model"] = "model"
    display_name: str = Field(description="The same as `id`, as of Anthropic.")
    created_at: str = Field(description="The same as `created`, as of Anthropic.")
    owned_by: Literal["inferencecenter"] = "inferencecenter"
    aliases: tuple[str, ...] = Field(default=(), description="Further names for `model` in requests.")
    state: Literal["unloaded", "loading", "loaded", "asleep", "failed"] = Field(
        description="Its state; a request loads a model that is `unloaded` or `asleep`."
    )
    capabilities: tuple[Literal["chat", "completion", "vision", "embedding", "rerank"], ...] = Field(
        description="Its capabilities."
    )
    context_length: int | None = Field(description="Tokens of prompt and answer; null before it was loaded.")
    max_model_len: int | None = Field(description="The same as `context_length`, as of vLLM.")
    meta: ModelMeta | None = Field(description="Properties of its file, as of llama-server; null before it was loaded.")


class ModelMeta(BaseModel, defer_build=True):
    """Properties of a model's file."""

    n_vocab: int = Field(description="Tokens of the vocabulary.")
    n_ctx_train: int = Field(description="Context size that it was trained with.")
    n_params: int = Field(description="Parameters.")
    size: int = Field(description="Bytes of its weights.")


_CAPABILITIES: Final[dict[str, tuple[Literal["chat", "completion", "vision", "embedding", "rerank"], ...]]] = {
    "chat": ("chat", "completion"),
    "embedding": ("embedding",),
    "reranking": ("rerank",),
}


class ModelList(BaseModel, defer_build=True):
    """All models, by name."""

    object: Literal["list"] = "list"
    data: list[Model] = Field(description="The models.")
    has_more: Literal[False] = Field(default=False, description="Always false: all models are listed at once.")
    first_id: str | None = Field(description="The first model, as of Anthropic; null without one.")
    last_id: str | None = Field(description="The last model, as of Anthropic; null without one.")


async def list_models(call: Call) -> Reply:
    """Return all models that the client may use."""
    found = _models(call)
    ids = [model.id for model in found]
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    return document(ModelList(data=found, first_id=first_id, last_id=last_id).model_dump())


async def get_model(call: Call) -> Reply:
    wanted = call.path["model"]
    for model in _models(call):
        if wanted in (model.id, *model.aliases):
            return document(model.model_dump())
    raise InferenceCenterError(
        ErrorCode.MODEL_NOT_FOUND,
        f"there is no model {wanted[:64]!r} that this token may use",
        field="model",
        hint="/v1/models lists them.",
    )


def _models(call: Call) -> list[Model]:
    return [_model(call.context, summary) for summary in call.context.models_for(call.caller.client)]


def _model(context: ServerContext, summary: ModelSummary) -> Model:
    models, name = context.models, summary.name
    status = models.statuses.get(name)
    info = None if status is None else status.model
    meta = None
    if info is not None:
        meta = ModelMeta(
            n_vocab=info.n_vocab, n_ctx_train=info.n_ctx_train, n_params=info.n_params, size=info.size_bytes
        )
    created = int(context.clock() - context.uptime_s())
    return Model(
        id=name,
        created=created,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        aliases=tuple(alias for alias, of in models.aliases.items() if of == name),
        state=summary.state,
        capabilities=(*_CAPABILITIES[models.kind_of(name)], *(("vision",) if models.sees(name) else ())),
        context_length=info and info.n_ctx,
        max_model_len=info and info.n_ctx,
        meta=meta,
    )


OPERATIONS: Final = (
    Operation(
        method="GET",
        path="/v1/models",
        summary="List the models.",
        handler=list_models,
        answer=ModelList,
        fields=MODELS_FIELDS,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Look up a model.",
        handler=get_model,
        answer=Model,
        errors=(ErrorCode.MODEL_NOT_FOUND,),
        fields=MODELS_FIELDS,
    ),
)
