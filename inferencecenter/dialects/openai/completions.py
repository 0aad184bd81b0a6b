"""``/v1/completions``: plain text is gone on with, at once or as a stream."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from inferencecenter.dialects import sse
from inferencecenter.dialects.body import checked
from inferencecenter.dialects.conversation import Conversation
from inferencecenter.dialects.endpoint import TURN_ERRORS, Call, Operation
from inferencecenter.dialects.openai.chat_meaning import FIELDS
from inferencecenter.dialects.openai.choices import answered
from inferencecenter.dialects.openai.completion_answer import Head, Pieces
from inferencecenter.dialects.openai.completion_shapes import Completion, CompletionRequest
from inferencecenter.dialects.openai.sampling import check_stream_options, raw_params, rephrased
from inferencecenter.dialects.replies import Stream, document
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import Infer, RawParams
from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from inferencecenter.dialects.answer import Turns
    from inferencecenter.dialects.conversation import Place
    from inferencecenter.dialects.replies import Reply


async def create(call: Call) -> Reply:
    """Go on with texts."""
    _check(call.body)
    if call.body.stream:
        return Stream(_chunks(call))
    with _turns(call) as turns:
        pieces = Pieces(_head(call))
        async for batch in turns.batches():
            for index, event in batch:
                pieces.take(index, event)
    return document(pieces.document())


async def _chunks(call: Call) -> AsyncGenerator[bytes, None]:
    with _turns(call) as turns:
        pieces = Pieces(_head(call))
        async for batch in turns.batches():
            if written := b"".join([pieces.write(index, event) for index, event in batch]):
                yield written
            elif not batch:
                yield sse.KEEPALIVE
        yield pieces.last()


@contextmanager
def _turns(call: Call) -> Iterator[Turns]:
    request: CompletionRequest = call.body
    conversations = [
        Conversation(
            messages=(ChatMessage(role="user", content=prompt),),
            model=request.model,
            mode="raw",
            metadata={} if request.user is None else {"user": request.user},
        )
        for prompt in request.prompt
    ]

    def infer(place: Place, choice: int) -> Infer:
        body = {
            "op": "infer",
            "session_id": place.session_id,
            "prompt": place.unsaid[0].content,
            "params": _params(request, choice=choice),
            "regex": request.regex,
            "grammar": request.grammar,
        }
        return checked(Infer, body)

    try:
        with answered(call.context, call.visit, conversations, n=request.n, infer=infer) as turns:
            yield turns
    except InferenceCenterError as error:
        raise rephrased(error, FIELDS) from None


def _check(request: CompletionRequest) -> None:
    check_stream_options(request)
    if request.echo and request.logprobs is not None:
        raise _refused("logprobs", "logprobs of the prompt, which echo asks for, are not known")
    if request.regex is not None and request.grammar is not None:
        raise _refused("grammar", "regex excludes grammar")
    _params(request, choice=0)


def _params(request: CompletionRequest, *, choice: int) -> RawParams:
    n_probs = 0 if request.logprobs is None else max(1, request.logprobs)
    own = request.params or {}
    # The default is not what was asked for, and must not stand in the way of what was.
    max_tokens = None if "max_tokens" in own or "n_predict" in own or "stopping" in own else request.max_tokens
    return raw_params(request, max_tokens=max_tokens, n_probs=n_probs, choice=choice)


def _head(call: Call) -> Head:
    request: CompletionRequest = call.body
    return Head(
        completion_id=f"cmpl-{secrets.token_urlsafe(16)}",
        created=int(call.context.clock()),
        model=request.model or call.context.models.default,
        prompts=tuple(request.prompt),
        n=request.n,
        echo=request.echo,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        logprobs=request.logprobs,
    )


def _refused(field: str, message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=field)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Go on with texts.",
        handler=create,
        body=CompletionRequest,
        answer=Completion,
        event=Completion,
        errors=TURN_ERRORS,
    ),
)
