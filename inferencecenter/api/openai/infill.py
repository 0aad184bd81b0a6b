"""``POST /infill``: generates the text of a gap, in llama-server's form, which editors speak."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from pydantic import Field, StringConstraints

from inferencecenter.api import sse
from inferencecenter.api.body import checked
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, Stream, document
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.finish_reason import finish_of, merged_warnings, raise_failure
from inferencecenter.api.openai.sampling import (
    SAMPLING_RULES,
    Sampling,
    form_of,
    infer_fields,
    raw_params,
    request_fields,
    with_request_fields,
)
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event

_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType({"infill": "model", "params.max_tokens": "n_predict"})
"""Fields of ``infer`` by their names here; a model that cannot fill gaps is to blame for it."""


class InfillChunk(DialectModel):
    """A part of another file."""

    filename: Annotated[str, StringConstraints(max_length=4096)] = Field(
        default="tmp", description="The name of the file."
    )
    text: str = Field(description="The text.")


class InfillRequest(Sampling):
    """A text with a gap."""

    input_prefix: str = Field(description="Text before the gap.")
    input_suffix: str = Field(description="Text after the gap.")
    input_extra: Annotated[list[InfillChunk], Field(max_length=256, fail_fast=True)] = Field(
        default=[], description="Parts of other files, the least important first."
    )
    prompt: str = Field(default="", description="Text after `input_prefix`, such as the beginning of the line.")
    n: Literal[1] = Field(default=1, description="One text is generated.")


INFILL_FIELDS: Final = FieldTable(
    "infill",
    InfillRequest,
    rules=(
        FieldRule(field="samplers", why="the samplers have a fixed order"),
        FieldRule(field="t_max_prompt_ms", why="a prompt is always read whole"),
        FieldRule(field="t_max_predict_ms", why="see `params.max_time_ms`"),
        FieldRule(field="n_indent", why="lines end by `stop` or by the model"),
        FieldRule(field="response_fields", why="the answer has all fields"),
        *SAMPLING_RULES,
    ),
)
"""The fields of ``/infill``."""


class InfillTimings(AnswerModel):
    """Times of the generation."""

    prompt_n: int = Field(description="Tokens of the prompt that were computed.")
    prompt_ms: float = Field(description="Milliseconds until the first token, without waiting.")
    predicted_n: int = Field(description="Tokens generated.")
    predicted_ms: float = Field(description="Milliseconds from the first token to the last.")
    predicted_per_second: float = Field(description="Tokens per second after the first token.")


class InfillAnswer(AnswerModel):
    """The text of the gap, or a part of it: the last part has an empty ``content`` and all other fields."""

    content: str = Field(description="The text.")
    stop: bool = Field(description="Whether this is the end.")
    model: str | None = Field(default=None, description="The model.")
    tokens_predicted: int | None = Field(default=None, description="Tokens generated.")
    tokens_evaluated: int | None = Field(default=None, description="Tokens of the prompt.")
    tokens_cached: int | None = Field(default=None, description="Of those, tokens whose KV was reused.")
    truncated: bool | None = Field(default=None, description="Always false: a prompt that is too long is refused.")
    stop_type: Literal["eos", "limit", "word"] | None = Field(
        default=None, description="Whether the model, a limit or a text of `stop` ended it."
    )
    stopping_word: str | None = Field(default=None, description="The text of `stop` that ended it, or empty.")
    timings: InfillTimings | None = Field(default=None, description="Times of the generation.")
    warnings: list[str] | None = Field(
        default=None, description="Valid parameters that had no effect; absent if there are none."
    )


@dataclass(slots=True)
class InfillWriter:
    """Makes responses of events.

    Attributes:
        model: Name of the model.
        warnings: Warnings about the request.
        texts: The text so far.
    """

    model: str
    warnings: Sequence[str] = ()
    texts: list[str] = field(default_factory=list)

    def write(self, event: Event) -> bytes:
        """Return the event of a stream, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                return sse.event(orjson.dumps({"content": event.content, "stop": False}))
            case events.End():
                return sse.event(orjson.dumps(self.end(event)))
            case _:
                raise_failure(event)
                return b""

    def end(self, event: events.End) -> dict[str, Any]:
        """Return the last part, with the text of ``texts``.

        Raises:
            InferenceCenterError: The turn was ended by another party.
        """
        stats, usage = event.stats, event.usage
        answer: dict[str, Any] = {
            "content": "".join(self.texts),
            "stop": True,
            "model": self.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": "limit" if finish_of(event) == "length" else "eos" if event.stop is None else "word",
            "stopping_word": event.stop or "",
            "timings": {
                "prompt_n": usage.prompt_tokens - usage.cached_tokens,
                "prompt_ms": max(0.0, stats.ttft_ms - stats.queue_ms),
                "predicted_n": usage.completion_tokens,
                "predicted_ms": max(0.0, stats.total_ms - stats.ttft_ms),
                "predicted_per_second": stats.tps,
            },
        }
        warnings = merged_warnings(self.warnings, [event])
        return {**answer, "warnings": warnings} if warnings else answer

    def take(self, event: Event) -> dict[str, Any] | None:
        """Store the text of an event, and return the whole response at the end.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self.texts.append(event.content)
            case events.End():
                return self.end(event)
            case _:
                raise_failure(event)
        return None


async def create(call: Call) -> Reply:
    """Handle a request: generate the text of a gap."""
    _params(call.body)
    if call.body.stream:
        return Stream(_parts(call))
    answer: dict[str, Any] | None = None
    with _turns(call) as turns:
        writer = _writer(call)
        async for batch in turns.batches():
            for _, event in batch:
                answer = writer.take(event) or answer
    assert answer is not None, "a turn that did not fail has an end"
    return document(answer)


async def _parts(call: Call) -> AsyncGenerator[bytes, None]:
    with _turns(call) as turns:
        writer = _writer(call)
        async for written in turns.write_events(lambda _, event: writer.write(event)):
            yield written


@contextmanager
def _turns(call: Call) -> Iterator[RequestTurns]:
    """Run the turn of a request.

    Raises:
        InferenceCenterError: It cannot start; the error names the request's fields.
    """
    request: InfillRequest = call.body
    form = form_of(request)
    conversation = ConversationRequest(
        messages=(ChatMessage(role="user", content=request.input_prefix + request.prompt),),
        model=request.model,
        mode="raw",
        metadata={} if request.user is None else {"user": request.user},
    )

    def infer(place: SessionMatch, _choice: int) -> Infer:
        extra = [chunk.model_dump() for chunk in request.input_extra]
        body = {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.remaining),
            "params": _params(request),
            "infill": {"suffix": request.input_suffix, "extra": extra},
            **infer_fields(form),
        }
        return checked(Infer, body)

    try:
        with run_choices(call.context, call.request_context, [conversation], n=1, infer=infer) as turns:
            yield turns
    except InferenceCenterError as error:
        raise with_request_fields(error, request_fields(_FIELD_NAMES, form)) from None


def _params(request: InfillRequest) -> dict[str, Any]:
    return raw_params(request, max_tokens=request.max_tokens or request.n_predict, n_probs=0, choice=0)


def _writer(call: Call) -> InfillWriter:
    return InfillWriter(call.body.model or call.context.models.default, call.warnings)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/infill",
        summary="Fill a gap in a text.",
        handler=create,
        body=InfillRequest,
        answer=InfillAnswer,
        event=InfillAnswer,
        errors=TURN_ERRORS,
        fields=INFILL_FIELDS,
    ),
)
