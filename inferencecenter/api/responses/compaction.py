"""Compaction: has the model summarize a conversation, on request or when its prompt exceeds a threshold.

The resulting items replace the conversation in a later request: the client's latest messages, as one user message, and
the summary as an item of the type ``compaction``, which the model receives as an assistant message. So roles alternate,
which some chat templates require. A summary is text with a prefix that distinguishes it from encrypted content of other
servers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
from pydantic import Field

from inferencecenter.api.endpoint import TURN_ERRORS, Document, Operation
from inferencecenter.api.openai.answers import finish_of, raise_failure
from inferencecenter.api.prompt_counts import count_prompt_tokens
from inferencecenter.api.responses.conversations import find_conversation
from inferencecenter.api.responses.request_mapping import (
    CompactedInput,
    conversation_of,
    infer_of,
    load_context,
    query_of,
)
from inferencecenter.api.responses.request_schemas import (
    OWN_SUMMARY,
    RESPONSE_FIELDS,
    Compaction,
    CreateResponse,
    PlainText,
    ReasoningConfig,
    TextConfig,
)
from inferencecenter.api.responses.response_schemas import OutputCompaction, ResponseObject, ResponseUsage
from inferencecenter.api.responses.serializers import input_items, usage_of
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import IMAGE_MARK, ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.endpoint import Call, Reply
    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.server.context import ServerContext

PATH: Final = "/v1/responses/compact"

_ASK: Final = (
    "Summarize our conversation so far, so that you can continue from the summary alone: what I want, what was decided"
    " and done, with names, paths and figures as they are, and what is left to do. Answer with the summary only."
)
_SUMMARY_SHARE: Final = 8
"""The summary has at most this part of the context's tokens."""
_LEAST_TOKENS: Final = 64


class CompactedConversation(ResponseObject):
    """A conversation made shorter."""

    id: str = Field(description="Its id; it cannot be retrieved.")
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int = Field(description="Unix seconds.")
    output: tuple[dict[str, Any], ...] = Field(
        description="The items for the next request: the latest messages of the user, and the summary."
    )
    usage: ResponseUsage = Field(description="Token usage of the summary.")
    warnings: tuple[str, ...] = Field(default=(), description="Valid fields and parameters that had no effect.")


@dataclass(frozen=True, slots=True)
class _Summary:
    """The summary of a conversation, the latest messages of the user in it, and how the model's turn ended."""

    item: OutputCompaction
    kept: str
    end: events.End
    warnings: tuple[str, ...]


async def compact(call: Call) -> Reply:
    """Handle a request: summarize a conversation."""
    request: CreateResponse = call.body
    await load_context(call.context, call.caller.client, request)
    messages = conversation_of(call.context, call.caller.client, request)
    if not any(message.role != "system" for message in messages):
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "there is no conversation to summarize", field="input")
    summary = await _compact(call.context, call.request_context, request, messages)
    kept = input_items((ChatMessage(role="user", content=summary.kept),), summary.item.id) if summary.kept else ()
    answer = CompactedConversation(
        id=f"resp_{secrets.token_urlsafe(16)}",
        created_at=int(call.context.clock()),
        output=(*kept, summary.item.model_dump(mode="json")),
        usage=usage_of(summary.end.usage),
        warnings=tuple(dict.fromkeys((*call.warnings, *summary.warnings))),
    )
    return Document(orjson.dumps(answer.model_dump(mode="json")))


async def compacted_input(
    context: ServerContext, request_context: RequestContext, request: CreateResponse
) -> tuple[CompactedInput | None, tuple[str, ...]]:
    """Return what is answered in place of a conversation that exceeds its threshold, and warnings.

    All but the latest input is summarized; function outputs keep their calls.

    Raises:
        InferenceCenterError: The tokens cannot be counted, or the summary has failed.
    """
    if not request.context_management:
        return None, ()
    client, name = request_context.client, request.conversation_name
    stored = () if name is None else find_conversation(context.sessions, client, name).messages
    messages = conversation_of(context, client, request)
    n_system = 0 if request.instructions is None else 1
    before, latest = _split(messages[n_system:])
    is_answered = any(message.role == "assistant" for message in before)
    if not is_answered or not await _exceeds_threshold(context, request_context, request, messages):
        return None, ()
    summary = await _compact(context, request_context, request, (*messages[:n_system], *before))
    kept = (ChatMessage(role="user", content=summary.kept),) if summary.kept else ()
    summary_text = Compaction(type="compaction", encrypted_content=summary.item.encrypted_content).text
    stands_for = (*kept, ChatMessage(role="assistant", content=summary_text))
    return CompactedInput(summary.item, stands_for, latest, stored), summary.warnings


def _split(messages: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], tuple[ChatMessage, ...]]:
    """Return the messages before the latest input, and that input."""
    cut = max((n for n, message in enumerate(messages, start=1) if message.role == "assistant"), default=0)
    if 0 < cut < len(messages) and messages[cut].role == "tool":
        cut -= 1
    return messages[:cut], messages[cut:]


async def _exceeds_threshold(
    context: ServerContext, request_context: RequestContext, request: CreateResponse, messages: tuple[ChatMessage, ...]
) -> bool:
    threshold = request.context_management[0].compact_threshold
    if threshold is None:
        threshold = _n_ctx(context, request.model) * 3 // 4
    try:
        return await count_prompt_tokens(context, request_context, query_of(request, messages)) > threshold
    except InferenceCenterError as error:
        if error.code is not ErrorCode.PROMPT_TOO_LONG:
            raise
        return True


async def _compact(
    context: ServerContext, request_context: RequestContext, request: CreateResponse, messages: tuple[ChatMessage, ...]
) -> _Summary:
    """Return the summary of a conversation with its instructions.

    Raises:
        InferenceCenterError: See ``_summarize``.
    """
    n_ctx = _n_ctx(context, request.model)
    text, end, warnings = await _summarize(
        context, request_context, request, messages, max_tokens=max(_LEAST_TOKENS, n_ctx // _SUMMARY_SHARE)
    )
    item = OutputCompaction(id=f"cmp_{secrets.token_urlsafe(16)}", encrypted_content=OWN_SUMMARY + text)
    return _Summary(item, _kept(messages, max_chars=n_ctx), end, tuple(warnings))


def _n_ctx(context: ServerContext, model: str | None) -> int:
    """Return the tokens of the model's context; 0 while it was never loaded, where no turn starts either.

    Raises:
        InferenceCenterError: ``model_not_found``.
    """
    models = context.models
    info = models.engine(models.default if model is None else model).status.model
    return 0 if info is None else info.n_ctx


async def _summarize(
    context: ServerContext,
    request_context: RequestContext,
    request: CreateResponse,
    messages: tuple[ChatMessage, ...],
    *,
    max_tokens: int,
) -> tuple[str, events.End, list[str]]:
    """Return the model's summary of a conversation, the end of its turn, and warnings.

    If the conversation exceeds the context its oldest turns are omitted, with a warning. Tools stay in the prompt, so
    that the conversation's KV is reused, but are not called.

    Raises:
        InferenceCenterError: The turn cannot start, or has failed.
    """
    client = request_context.client
    limit = context.limits_of(client.client_id, client.token_id).max_tokens
    summary_request = request.model_copy(
        update={
            "max_output_tokens": max_tokens if limit is None else min(max_tokens, limit),
            "reasoning": ReasoningConfig(effort="none"),
            "text": TextConfig(format=PlainText(type="text")),
            "tool_choice": "none",
            "top_logprobs": None,
            "include": [],
            "params": {},
        }
    )
    conversation = ConversationRequest(messages=_with_question(messages), model=request.model, on_full="shift")
    text: list[str] = []
    warnings: list[str] = []
    end: events.End | None = None
    with run_choices(
        context,
        request_context,
        (conversation,),
        n=1,
        infer=lambda place, _: infer_of(summary_request, place.remaining).model_copy(
            update={"session_id": place.session_id, "messages": list(place.remaining)}
        ),
    ) as turns:
        async for batch in turns.batches():
            for _, event in batch:
                raise_failure(event)
                match event:
                    case events.Token():
                        text.append(event.content)
                    case events.ContextShifted():
                        warnings.append("the summary lacks the oldest turns, which exceed the context")
                    case events.End():
                        finish_of(event)
                        end = event
    assert end is not None, "a turn that did not fail has an end"
    return "".join(text).strip(), end, warnings


def _with_question(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return the conversation with the request for a summary, within the last message if that is the user's."""
    last = messages[-1]
    if last.role != "user":
        return (*messages, ChatMessage(role="user", content=_ASK))
    return (*messages[:-1], last.model_copy(update={"content": f"{last.content}\n\n{_ASK}"}))


def _kept(messages: Sequence[ChatMessage], *, max_chars: int) -> str:
    """Return the latest messages of the user, up to a number of characters in total."""
    kept: list[str] = []
    for message in reversed(messages):
        if message.role == "user":
            text = message.content if message.images is None else message.content.replace(IMAGE_MARK, "")
            max_chars -= len(text)
            if max_chars < 0:
                break
            kept.append(text)
    return "\n\n".join(reversed(kept))


OPERATIONS: Final = (
    Operation(
        method="POST",
        path=PATH,
        summary="Summarize a conversation into a shorter one.",
        handler=compact,
        body=CreateResponse,
        answer=CompactedConversation,
        errors=(*TURN_ERRORS, ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, ErrorCode.SESSION_NOT_FOUND),
        fields=RESPONSE_FIELDS,
    ),
)
"""HTTP operations of compaction."""
