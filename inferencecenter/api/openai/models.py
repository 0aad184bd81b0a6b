"""``/v1/models``: the available models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, Field

from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply


class Model(BaseModel):
    """A model that the client may use."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds of the daemon's start.")
    owned_by: Literal["inferencecenter"] = "inferencecenter"


class ModelList(BaseModel):
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
        if model.id == wanted:
            return document(model.model_dump())
    raise InferenceCenterError(
        ErrorCode.MODEL_NOT_FOUND,
        f"there is no model {wanted[:64]!r} that this token may use",
        field="model",
        hint="/v1/models lists them.",
    )


def _models(call: Call) -> list[Model]:
    context = call.context
    created = int(context.clock() - context.uptime_s())
    return [Model(id=model.name, created=created) for model in context.models_for(call.caller.client)]


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
