"""``/v1/chat/completions``: a conversation is answered, at once or as a stream."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from inferencecenter.dialects import sse
from inferencecenter.dialects.endpoint import TURN_ERRORS, Call, Operation
from inferencecenter.dialects.openai.chat_answer import Chunks, Gathered, Head
from inferencecenter.dialects.openai.chat_meaning import FIELDS, check, conversation_of, infer_of
from inferencecenter.dialects.openai.chat_request import ChatRequest
from inferencecenter.dialects.openai.chat_shapes import ChatCompletion, ChatCompletionChunk
from inferencecenter.dialects.openai.choices import answered
from inferencecenter.dialects.openai.sampling import rephrased
from inferencecenter.dialects.replies import Stream, document
from inferencecenter.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from inferencecenter.dialects.answer import Turns
    from inferencecenter.dialects.conversation import Conversation
    from inferencecenter.dialects.replies import Reply

_MANY_MESSAGES: Final = 256
"""From here on a conversation takes more than a millisecond to understand."""


async def create(call: Call) -> Reply:
    """Answer a conversation."""
    conversation = await _conversation(call)
    if call.body.stream:
        return Stream(_chunks(call, conversation))
    with _turns(call, conversation) as turns:
        gathered = Gathered(_head(call))
        async for batch in turns.batches():
            for index, event in batch:
                gathered.take(index, event)
    return document(gathered.document())


async def _conversation(call: Call) -> Conversation:
    """Return what is to be answered; one of many messages is made in a thread, in which clients take turns.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    request: ChatRequest = call.body
    if len(request.messages) < _MANY_MESSAGES:
        return _checked(request)
    return await call.context.worker.run(call.caller.client.client_id, partial(_checked, request))


def _checked(request: ChatRequest) -> Conversation:
    check(request)
    return conversation_of(request)


async def _chunks(call: Call, conversation: Conversation) -> AsyncGenerator[bytes, None]:
    with _turns(call, conversation) as turns:
        chunks = Chunks(_head(call))
        async for batch in turns.batches():
            if written := b"".join([chunks.write(index, event) for index, event in batch]):
                yield written
            elif not batch:
                yield sse.KEEPALIVE
        yield chunks.last()


@contextmanager
def _turns(call: Call, conversation: Conversation) -> Iterator[Turns]:
    """Have the turns of a request run.

    Raises:
        InferenceCenterError: They cannot begin; with fields as the request names them.
    """
    request: ChatRequest = call.body
    try:
        with answered(
            call.context,
            call.visit,
            (conversation,),
            n=request.n,
            infer=lambda place, choice: infer_of(request, place, choice),
        ) as turns:
            yield turns
    except InferenceCenterError as error:
        raise rephrased(error, FIELDS) from None


def _head(call: Call) -> Head:
    request: ChatRequest = call.body
    return Head(
        completion_id=f"chatcmpl-{secrets.token_urlsafe(16)}",
        created=int(call.context.clock()),
        model=request.model or call.context.models.default,
        n=request.n,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        handler=create,
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=TURN_ERRORS,
    ),
)
