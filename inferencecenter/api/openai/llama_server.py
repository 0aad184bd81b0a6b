"""Endpoints of llama-server that user interfaces and scripts read: ``/props``, ``/slots``, ``/apply-template``."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, RootModel

import inferencecenter
from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.api.foreign_fields import FieldRule, FieldTable
from inferencecenter.api.openai.chat import checked_conversation, infer_of
from inferencecenter.api.openai.chat_schemas import CHAT_FIELDS, ChatRequest
from inferencecenter.api.prompt_counts import COUNT_ERRORS
from inferencecenter.api.session_match import SessionMatch
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.sessions.context import check_model
from inferencecenter.sessions.prompt_lookup import PromptQuery

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.ipc.messages import ModelInfo


PROPS_FIELDS: Final = FieldTable(
    "llama-server",
    rules=(
        FieldRule(field="model", why="the answer is about the default model"),
        FieldRule(field="autoload", why="turns load models"),
        FieldRule(field="fail_on_no_slot", why="turns wait for a slot"),
    ),
)
"""Query parameters of ``/props`` and ``/slots``."""


class GenerationDefaults(BaseModel, defer_build=True):
    """Defaults of a turn."""

    n_ctx: int = Field(description="Tokens of prompt and answer.")
    params: dict[str, Any] = Field(description="Parameters, as in `infer`.")


class Modalities(BaseModel, defer_build=True):
    """The model's input modalities besides text."""

    vision: bool = Field(description="Images.")
    audio: bool = Field(description="Audio.")


class ServerProperties(BaseModel, defer_build=True):
    """Properties of the default model."""

    default_generation_settings: GenerationDefaults = Field(description="Defaults of a turn.")
    total_slots: int = Field(description="Maximum number of concurrent turns.")
    model_alias: str = Field(description="The model.")
    model_path: str = Field(description="Name of its file.")
    chat_template: str = Field(description="Its chat template, empty if it has none.")
    bos_token: str = Field(description="Text of the token that begins a sequence.")
    eos_token: str = Field(description="Text of the token that ends a sequence.")
    modalities: Modalities = Field(description="Input modalities besides text.")
    build_info: str = Field(description="The daemon and its version.")
    is_sleeping: bool = Field(description="Whether its memory is free until the next turn.")


class SlotState(BaseModel, defer_build=True):
    """A slot."""

    id: int = Field(description="Its index.")
    n_ctx: int = Field(description="Tokens of prompt and answer.")
    is_processing: bool = Field(description="Whether a turn runs.")


class Slots(RootModel[list[SlotState]], defer_build=True):
    """The slots of the default model; turns occupy the first ones."""


class TemplateOutput(BaseModel, defer_build=True):
    """A prompt."""

    prompt: str = Field(description="The text that the model would be given.")


async def props(call: Call) -> Reply:
    """Return the properties of the default model."""
    context, model = call.context, _model(call)
    answer = ServerProperties(
        default_generation_settings=GenerationDefaults(
            n_ctx=model.n_ctx, params=context.sessions.default_params(None).model_dump(mode="json")
        ),
        total_slots=model.slots,
        model_alias=context.models.default,
        model_path=PurePath(model.path).name,
        chat_template=model.chat_template,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        modalities=Modalities(vision=model.sees, audio=False),
        build_info=f"inferencecenter-{inferencecenter.__version__}",
        is_sleeping=context.models.status.state is EngineState.ASLEEP,
    )
    return document(answer.model_dump())


async def slots(call: Call) -> Reply:
    """Return the slots of the default model."""
    model, n_running = _model(call), call.context.models.status.running
    return document(
        [
            SlotState(id=index, n_ctx=model.n_ctx, is_processing=index < n_running).model_dump()
            for index in range(model.slots)
        ]
    )


async def apply_template(call: Call) -> Reply:
    """Return the prompt of a conversation, without answering it."""
    request, client = call.body, call.caller.client
    messages = (await checked_conversation(call)).messages
    infer = infer_of(request, SessionMatch("-", messages[-1:]), 0)
    query = PromptQuery(
        messages=messages,
        model=request.model,
        tools=infer.tools or (),
        thinking=infer.thinking,
        prefix=infer.prefix or "",
    )
    rendered = await call.request_context.wait_for(call.context.sessions.render_prompt(client, query))
    return document({"prompt": rendered.prompt.text})


def _model(call: Call) -> ModelInfo:
    """Return the default model as it was loaded.

    Raises:
        InferenceCenterError: ``model_loading``, or ``forbidden``.
    """
    context, client = call.context, call.caller.client
    check_model(context.models.default, context.limits_of(client.client_id, client.token_id))
    model = context.models.status.model
    if model is None:
        raise InferenceCenterError(ErrorCode.MODEL_LOADING)
    return model


OPERATIONS: Final = (
    Operation(
        method="GET",
        path="/props",
        summary="Return the properties of the default model, as llama-server does.",
        handler=props,
        answer=ServerProperties,
        errors=(ErrorCode.MODEL_LOADING,),
        fields=PROPS_FIELDS,
    ),
    Operation(
        method="GET",
        path="/slots",
        summary="Return the slots of the default model, as llama-server does.",
        handler=slots,
        answer=Slots,
        errors=(ErrorCode.MODEL_LOADING,),
        fields=PROPS_FIELDS,
    ),
    Operation(
        method="POST",
        path="/apply-template",
        summary="Return the prompt of a conversation, as llama-server does.",
        handler=apply_template,
        body=ChatRequest,
        answer=TemplateOutput,
        fields=CHAT_FIELDS,
        errors=COUNT_ERRORS,
    ),
)
