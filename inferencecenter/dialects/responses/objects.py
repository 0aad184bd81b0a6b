"""What a client is told: responses and their items. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from inferencecenter.dialects.responses.names import Place, item_id, response_id
from inferencecenter.dialects.responses.requests import (
    AllowedTools,
    CreateResponse,
    FunctionChoice,
    FunctionTool,
    ReasoningConfig,
    TextConfig,
)
from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.protocol.events import Error
    from inferencecenter.protocol.values import ChatMessage, TokenLogprobs, Usage

MAX_NOTE_BYTES: Final = 256 * 1024
"""What a turn's note may hold, and so what is echoed of a request."""

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemState = Literal["in_progress", "completed", "incomplete"]

_CUT_BY_LENGTH: Final = ("length", "context_full")
_COMPLETE: Final = ("stop", "tool_calls")
_TOO_MANY: Final = 429


class Told(BaseModel):
    """Part of what a client is told: immutable; null where something is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TopLogprob(Told):
    """A token that might have come."""

    token: str = Field(description="Its text.")
    bytes: tuple[int, ...] = Field(description="The text in UTF-8.")
    logprob: float = Field(description="Natural logarithm of its probability.")


class Logprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: tuple[TopLogprob, ...] = Field(description="The likeliest tokens in its place.")


class OutputText(Told):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str = Field(description="The text.")
    annotations: tuple[()] = Field(default=(), description="There are none.")
    logprobs: tuple[Logprob, ...] = Field(default=(), description="Its tokens, where they were asked for.")


class OutputMessage(Told):
    """What the model said."""

    type: Literal["message"] = "message"
    id: str = Field(description="Its name.")
    role: Literal["assistant"] = "assistant"
    status: ItemState = Field(description="Whether it is all there.")
    content: tuple[OutputText, ...] = Field(description="Its text.")


class ThoughtText(Told):
    """What a model has thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = Field(description="The text.")


class OutputReasoning(Told):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str = Field(description="Its name.")
    status: ItemState = Field(description="Whether it is all there.")
    summary: tuple[()] = Field(default=(), description="There is none.")
    content: tuple[ThoughtText, ...] = Field(description="The thoughts.")


class OutputCall(Told):
    """A tool that the model asks for."""

    type: Literal["function_call"] = "function_call"
    id: str = Field(description="The item's name.")
    call_id: str = Field(description="Names the call.")
    name: str = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    status: ItemState = Field(description="Whether they are all there.")


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedTokens(Told):
    """Tokens that were not read again."""

    cached_tokens: int = Field(description="Whose KV was reused.")
    cache_write_tokens: int = Field(default=0, description="Nothing is counted for being kept.")


class ReasoningTokens(Told):
    """Tokens of thoughts."""

    reasoning_tokens: int = Field(description="They are not told apart from others: 0.")


class ResponseUsage(Told):
    """Tokens of a response."""

    input_tokens: int = Field(description="Those that the model was given.")
    input_tokens_details: CachedTokens = Field(description="Of those.")
    output_tokens: int = Field(description="Those that it made.")
    output_tokens_details: ReasoningTokens = Field(description="Of those.")
    total_tokens: int = Field(description="Both.")


class ResponseError(Told):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="What kind of reason.")
    message: str = Field(description="Which.")


class Incomplete(Told):
    """Why an answer is not complete."""

    reason: str = Field(description="`max_output_tokens` also where the context is full, else the turn's own reason.")


class Echo(Told):
    """What a response repeats of its request; kept as the note of its turn."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    object: Literal["response"] = "response"
    created_at: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answers.")
    instructions: str | None = Field(description="What the model was told first.")
    previous_response_id: str | None = Field(description="The response that this one goes on to.")
    background: bool = Field(description="Whether nobody waits for it.")
    store: bool = Field(description="Whether it may be written to disk.")
    max_output_tokens: int | None = Field(description="Most tokens.")
    max_tool_calls: int | None = Field(description="As it was asked for.")
    temperature: float | None = Field(description="As it was asked for.")
    top_p: float | None = Field(description="As it was asked for.")
    top_logprobs: int = Field(description="So many of the likeliest tokens each.")
    text: TextConfig = Field(description="What the answer looks like.")
    tools: tuple[FunctionTool, ...] = Field(description="Functions that may be asked for.")
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
    ) = Field(description="Whether one is.")
    parallel_tool_calls: bool = Field(description="Whether several may be at once.")
    reasoning: ReasoningConfig = Field(description="Whether the model thinks first.")
    truncation: Literal["auto", "disabled"] = Field(description="What happens when the context is full.")
    service_tier: Literal["default", "flex", "priority"] = Field(description="The class of the turn.")
    metadata: dict[str, str] = Field(description="As it was given.")
    user: str | None = Field(description="As it was given.")
    safety_identifier: str | None = Field(description="As it was given.")
    prompt_cache_key: str | None = Field(description="As it was given.")

    def note(self) -> str:
        """Return what is kept with the turn.

        Raises:
            InferenceCenterError: ``invalid_request`` when that is more than may be.
        """
        text = self.model_dump_json()
        if len(text.encode()) > MAX_NOTE_BYTES:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"instructions, tools, text and metadata take {len(text.encode())} bytes together;"
                f" at most {MAX_NOTE_BYTES} are kept with a response",
                field="tools" if self.tools else "instructions",
            )
        return text


class Response(Echo):
    """A response."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="Its name.")
    status: Status = Field(description="Where it is.")
    completed_at: int | None = Field(default=None, description="Unix seconds, told with its end alone.")
    error: ResponseError | None = Field(default=None, description="Why it failed.")
    incomplete_details: Incomplete | None = Field(default=None, description="Why it is not complete.")
    output: tuple[OutputItem, ...] = Field(default=(), description="What the model thought, said and asks for.")
    usage: ResponseUsage | None = Field(default=None, description="Its tokens, at its end.")


class Deleted(Told):
    """A response is gone."""

    id: str = Field(description="Its name.")
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Told):
    """A page of items."""

    object: Literal["list"] = "list"
    data: tuple[dict[str, Any], ...] = Field(description="The page.")
    first_id: str | None = Field(description="Name of the first.")
    last_id: str | None = Field(description="Name of the last, to go on after.")
    has_more: bool = Field(description="Whether there are more.")


_TIERS: Final[dict[str, Literal["default", "flex", "priority"]]] = {
    "auto": "default",
    "default": "default",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",
}


def echo_of(request: CreateResponse, *, model: str, created_at: float) -> Echo:
    """Return what the response to ``request`` repeats of it; ``created_at`` is Unix seconds."""
    return Echo(
        created_at=int(created_at),
        model=model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        background=request.background,
        store=request.store,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        temperature=request.temperature,
        top_p=request.top_p,
        top_logprobs=request.top_logprobs or 0,
        text=request.text,
        tools=tuple(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=request.reasoning,
        truncation=request.truncation,
        service_tier=_TIERS[request.service_tier],
        metadata=request.metadata,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )


def response_of(  # noqa: PLR0913 - keyword-only
    echo: Echo,
    place: Place,
    *,
    status: Status,
    output: tuple[OutputItem, ...] = (),
    finish_reason: str | None = None,
    usage: Usage | None = None,
    error: ResponseError | None = None,
    completed_at: float | None = None,
) -> Response:
    """Return a response as it stands."""
    return Response.model_construct(
        **dict(echo),
        id=response_id(place),
        status=status,
        completed_at=None if completed_at is None else int(completed_at),
        error=error,
        incomplete_details=Incomplete(reason=_reason(finish_reason))
        if finish_reason and status == "incomplete"
        else None,
        output=output,
        usage=None if usage is None else usage_of(usage),
    )


def status_of(finish_reason: str) -> Status:
    """Return what a response is whose turn has ended for this reason."""
    if finish_reason in _COMPLETE:
        return "completed"
    return "cancelled" if finish_reason == "aborted" else "incomplete"


def usage_of(usage: Usage) -> ResponseUsage:
    """Return a turn's tokens."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(reasoning_tokens=0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def error_of(error: Error) -> ResponseError:
    """Return why a turn failed, in the words that clients of this dialect know."""
    status = ERRORS[ErrorCode(error.code)].http_status if error.code in ERRORS else 500
    if status == _TOO_MANY:
        return ResponseError(code="rate_limit_exceeded", message=error.message)
    return ResponseError(code="invalid_prompt" if status < 500 else "server_error", message=error.message)


def logprobs_of(entries: tuple[TokenLogprobs, ...], *, top: int) -> tuple[Logprob, ...]:
    """Return tokens with the ``top`` likeliest ones in the place of each."""
    return tuple(
        Logprob(
            token=entry.token,
            bytes=tuple(entry.token.encode()),
            logprob=entry.logprob,
            top_logprobs=tuple(
                TopLogprob(token=each.token, bytes=tuple(each.token.encode()), logprob=each.logprob)
                for each in entry.top[:top]
            ),
        )
        for entry in entries
    )


def output_of(answer: ChatMessage, turn_id: str, *, state: ItemState) -> tuple[OutputItem, ...]:
    """Return the items of an answer as it is kept; ``state`` is that of the last of them."""
    items: list[OutputItem] = []
    if answer.reasoning:
        thoughts = (ThoughtText(text=answer.reasoning),)
        items.append(OutputReasoning(id=item_id("rs", turn_id), status="completed", content=thoughts))
    if answer.content or not answer.tool_calls:
        said = (OutputText(text=answer.content),)
        items.append(OutputMessage(id=item_id("msg", turn_id), status="completed", content=said))
    items += [
        OutputCall(
            id=item_id("fc", turn_id, index),
            call_id=call.call_id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        for index, call in enumerate(answer.tool_calls or ())
    ]
    return (*items[:-1], items[-1].model_copy(update={"status": state}))


def input_items(messages: tuple[ChatMessage, ...], turn_id: str) -> tuple[dict[str, Any], ...]:
    """Return what was said as items with names."""
    items: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            items += [
                item.model_dump(mode="json") | {"id": f"{item.id}_in{at}"}
                for item in output_of(message, turn_id, state="completed")
            ]
        else:
            items.append(_given_item(message, f"{turn_id.removeprefix('t_')}_in{at}"))
    return tuple(items)


def _given_item(message: ChatMessage, name: str) -> dict[str, Any]:
    if message.role == "tool":
        return {
            "type": "function_call_output",
            "id": f"fco_{name}",
            "call_id": message.tool_call_id or "",
            "output": message.content,
            "status": "completed",
        }
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": message.role,
        "status": "completed",
        "content": [{"type": "input_text", "text": message.content}],
    }


def _reason(finish_reason: str) -> str:
    return "max_output_tokens" if finish_reason in _CUT_BY_LENGTH else finish_reason
