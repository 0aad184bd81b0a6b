"""``/v1/fim/completions``: generates the text of a gap, in Mistral's form, which code editors speak."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from inferencecenter.api.body import invalid_field
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, stream_turns
from inferencecenter.api.foreign_fields import FieldTable
from inferencecenter.api.openai.answers import head_fields
from inferencecenter.api.openai.chat import ChatChunkWriter, ChatCollector, ChatHead
from inferencecenter.api.openai.chat_schemas import ChatCompletion, ChatCompletionChunk
from inferencecenter.api.openai.completions import TEXT_FIELD_NAMES, raw_turns
from inferencecenter.api.openai.sampling import SAMPLING_RULES, Sampling, raw_params
from inferencecenter.api.openai.token_fields import with_token_biases

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.protocol.requests import RawParams


class FimRequest(Sampling):
    """A text with a gap, as Mistral's API has it."""

    prompt: str = Field(description="Text before the gap.")
    suffix: str | None = Field(
        default=None, description="Text after the gap; absent, the prompt is continued, which any model can."
    )
    random_seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="The same as `seed`, which takes precedence."
    )
    n: Literal[1] = Field(default=1, description="One text is generated.")


FIM_FIELDS: Final = FieldTable("fim", FimRequest, rules=SAMPLING_RULES)
"""The fields of ``/v1/fim/completions``."""


async def create(call: Call) -> Reply:
    """Handle a request: generate the text of a gap."""
    call = await with_token_biases(call)
    request: FimRequest = call.body
    if not request.prompt and request.suffix is None:
        raise invalid_field("prompt", "the prompt is empty, which requires a suffix")
    _params(request, 0)
    turns = raw_turns(
        call,
        (request.prompt,),
        infill=None if request.suffix is None else {"suffix": request.suffix},
        params=partial(_params, request),
        names=TEXT_FIELD_NAMES,
    )
    head = ChatHead(**head_fields(call, "chatcmpl"))
    if not request.stream:
        return await collect_turns(turns, ChatCollector(head))
    chunks = ChatChunkWriter(head)
    return stream_turns(turns, chunks.write, last=chunks.last)


def _params(request: FimRequest, choice: int) -> RawParams:
    if request.seed is None and request.random_seed is not None:
        request = request.model_copy(update={"seed": request.random_seed})
    return raw_params(request, max_tokens=request.max_tokens or request.n_predict, n_probs=0, choice=choice)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/fim/completions",
        summary="Fill a gap in a text, as Mistral does.",
        handler=create,
        body=FimRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=TURN_ERRORS,
        fields=FIM_FIELDS,
    ),
)
