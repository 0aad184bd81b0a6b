"""``/v1/models``: the available models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, Field

from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.protocol.values import ModelSummary
    from inferencecenter.server.context import ServerContext


class Model(BaseModel, defer_build=True):
    """A model that the client may use."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds of the daemon's start.")
    owned_by: Literal["inferencecenter"] = "inferencecenter"
    aliases: tuple[str, ...] = Field(default=(), description="Further names for `model` in requests.")
    state: Literal["unloaded", "loading", "loaded", "asleep", "failed"] = Field(
        description="Its state; a request loads a model that is `unloaded` or `asleep`."
    )
    capabilities: tuple[Literal["chat", "completion", "embedding", "rerank"], ...] = Field(
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


_CAPABILITIES: Final[dict[str, tuple[Literal["chat", "completion", "embedding", "rerank"], ...]]] = {
    "chat": ("chat", "completion"),
    "embedding": ("embedding",),
    "reranking": ("rerank",),
}


class ModelList(BaseModel, defer_build=True):
    """All models, by name."""

    object: Literal["list"] = "list"
    data: list[Model] = Field(description="The models.")


async def list_models(call: Call) -> Reply:
    """Return all models that the client may use."""
    return document(ModelList(data=_models(call)).model_dump())


async def get_model(call: Call) -> Reply:
    """Return one model."""
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
    return Model(
        id=name,
        created=int(context.clock() - context.uptime_s()),
        aliases=tuple(alias for alias, of in models.aliases.items() if of == name),
        state=summary.state,
        capabilities=_CAPABILITIES[models.kind_of(name)],
        context_length=info and info.n_ctx,
        max_model_len=info and info.n_ctx,
        meta=meta,
    )


OPERATIONS: Final = (
    Operation(method="GET", path="/v1/models", summary="List the models.", handler=list_models, answer=ModelList),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Look up a model.",
        handler=get_model,
        answer=Model,
        errors=(ErrorCode.MODEL_NOT_FOUND,),
    ),
)
