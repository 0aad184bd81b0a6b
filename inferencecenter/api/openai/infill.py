"""``POST /infill``: generates the text of a gap, in llama-server's form, which editors speak."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from pydantic import Field, StringConstraints

from inferencecenter.api import sse
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, stream_turns
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.openai.answers import finish_of, merged_warnings, raise_failure
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.completions import raw_turns
from inferencecenter.api.openai.sampling import (
    SAMPLING_RULES,
    Sampling,
    raw_params,
)
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import RawParams

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


class InfillWriter:
    """Makes responses of events: a stream of them, or one document."""

    def __init__(self, model: str, warnings: Sequence[str] = ()) -> None:
        self._model = model
        self._warnings = warnings
        self._texts: list[str] = []
        self._document: dict[str, Any] = {}

    def write(self, _index: int, event: Event) -> bytes:
        """Return the event of a stream, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                return sse.event(orjson.dumps({"content": event.content, "stop": False}))
            case events.End():
                return sse.event(orjson.dumps(self._end(event)))
            case _:
                raise_failure(event)
                return b""

    def take(self, _index: int, event: Event) -> None:
        """Store an event for ``document``.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self._texts.append(event.content)
            case events.End():
                self._document = self._end(event)
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._document

    def _end(self, event: events.End) -> dict[str, Any]:
        """Return the last part, with the text of the events taken.

        Raises:
            InferenceCenterError: The turn was ended by another party.
        """
        stats, usage = event.stats, event.usage
        answer: dict[str, Any] = {
            "content": "".join(self._texts),
            "stop": True,
            "model": self._model,
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
        warnings = merged_warnings(self._warnings, [event])
        return {**answer, "warnings": warnings} if warnings else answer


async def create(call: Call) -> Reply:
    """Handle a request: generate the text of a gap."""
    request: InfillRequest = call.body
    _params(request, 0)
    extra = [chunk.model_dump() for chunk in request.input_extra]
    turns = raw_turns(
        call,
        (request.input_prefix + request.prompt,),
        infill={"suffix": request.input_suffix, "extra": extra},
        params=partial(_params, request),
        names=_FIELD_NAMES,
    )
    writer = InfillWriter(request.model or call.context.models.default, call.warnings)
    return stream_turns(turns, writer.write) if request.stream else await collect_turns(turns, writer)


def _params(request: InfillRequest, choice: int) -> RawParams:
    return raw_params(request, max_tokens=request.max_tokens or request.n_predict, n_probs=0, choice=choice)


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
