"""``/v1/completions``: plain text is continued, at once or as a stream."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from inferencecenter.api import sse
from inferencecenter.api.body import checked
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, Stream, document
from inferencecenter.api.openai.chat import OPENAI_FIELD_NAMES
from inferencecenter.api.openai.chat_schemas import AnswerModel, TokenUsage
from inferencecenter.api.openai.finish_reason import finish_of, finite, raise_failure, usage_of, warnings_of
from inferencecenter.api.openai.sampling import MOST_PROBS, Sampling, check_stream_options, raw_params, rephrased
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.requests import Infer, RawParams
from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """What all pieces of an answer say. ``logprobs`` are the likeliest tokens to tell, ``None`` for none at all."""

    completion_id: str
    created: int
    model: str
    prompts: tuple[str, ...]
    n: int = 1
    echo: bool = False
    include_usage: bool = False
    logprobs: int | None = None


class CompletionWriter:
    """Takes events, and writes each at once, or all of them at the end."""

    def __init__(self, head: CompletionHead) -> None:
        self._head = head
        n_choices = len(head.prompts) * head.n
        self._texts: list[list[str]] = [[] for _ in range(n_choices)]
        self._n_chars = [0] * n_choices
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(n_choices)]
        self._ends: list[events.End | None] = [None] * n_choices
        self._begun = [False] * n_choices
        common = orjson.dumps(self._common())[:-1]
        self._prefix = b"data: " + common + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def write(self, index: int, event: Event) -> bytes:
        """Return what a stream says of an event, which may be nothing.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                piece = self._piece(index, self._begin(index) + event.content, event.logprobs)
                self._n_chars[index] += len(event.content)
                return piece
            case events.End():
                self._ends[index] = event
                return self._piece(index, self._begin(index), None, finish=finish_of(event), warnings=event.warnings)
            case _:
                raise_failure(event)
                return b""

    def last(self) -> bytes:
        """Return the end of a stream whose turns have all ended."""
        if not self._head.include_usage:
            return sse.DONE
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, orjson.dumps(self._usage()), sse.DONE)

    def take(self, index: int, event: Event) -> None:
        """Keep an event for ``document``.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self._texts[index].append(event.content)
                self._logprobs[index] += event.logprobs or ()
            case events.End():
                finish_of(event)
                self._ends[index] = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole answer."""
        said = {
            **self._common(),
            "choices": [self._choice(index, end) for index, end in enumerate(self._ends) if end is not None],
            "usage": self._usage(),
        }
        warnings = warnings_of(end for end in self._ends if end is not None)
        return {**said, "warnings": warnings} if warnings else said

    def _common(self) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.completion_id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
        }

    def _usage(self) -> dict[str, Any]:
        return usage_of([end for end in self._ends if end is not None], n=self._head.n)

    def _begin(self, index: int) -> str:
        """Return what an answer begins with: the prompt where it is echoed."""
        begun, self._begun[index] = self._begun[index], True
        return self._head.prompts[index // self._head.n] if self._head.echo and not begun else ""

    def _choice(self, index: int, end: events.End) -> dict[str, Any]:
        return {
            "text": self._begin(index) + "".join(self._texts[index]),
            "index": index,
            "logprobs": self._told(self._logprobs[index], offset=0),
            "finish_reason": finish_of(end),
        }

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        *,
        finish: str | None = None,
        warnings: tuple[str, ...] = (),
    ) -> bytes:
        told = None if logprobs is None else self._told(logprobs, offset=self._n_chars[index])
        choice = orjson.dumps({"text": text, "index": index, "logprobs": told, "finish_reason": finish})
        suffix = self._suffix
        if warnings:
            suffix = b'%b,"warnings":%b}\n\n' % (suffix[: -len(b"}\n\n")], orjson.dumps(warnings))
        return self._prefix + choice + suffix

    def _told(self, entries: Sequence[TokenLogprobs], *, offset: int) -> dict[str, Any] | None:
        """Return probabilities of tokens, the first of which begins at ``offset``."""
        n_top = self._head.logprobs
        if n_top is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{each.token: finite(each.logprob) for each in entry.top[:n_top]} for entry in entries],
            "text_offset": offsets,
        }


MOST_PROMPTS: Final = 16
DEFAULT_MAX_TOKENS: Final = 16
"""As OpenAI has it: without a limit, plain text goes on until the context is full."""


def _texts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and any(isinstance(each, int | list) for each in value):
        raise PydanticCustomError("tokens", "prompts of tokens are not supported: send text")
    return value


class CompletionRequest(Sampling):
    """Texts that are to be gone on with."""

    prompt: Annotated[
        list[Annotated[str, StringConstraints(min_length=1)]],
        Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True),
        BeforeValidator(_texts, json_schema_input_type=str | list[str]),
    ] = Field(description="A text, or several, each of which is gone on with.")
    max_tokens: int | None = Field(
        default=DEFAULT_MAX_TOKENS, ge=1, le=MAX_TOKENS, description="Tokens to generate at most."
    )
    echo: bool = Field(default=False, description="Whether the answer begins with the prompt; not with `logprobs`.")
    logprobs: int | None = Field(
        default=None, ge=0, le=MOST_PROBS, description="Likeliest tokens to tell at each place."
    )
    best_of: Literal[1] = Field(default=1, description="Every answer is told.")


class CompletionLogprobs(AnswerModel):
    """Probabilities of an answer's tokens, one entry of each list for each token."""

    tokens: list[str] = Field(description="Their texts.")
    token_logprobs: list[float] = Field(description="Natural logarithms of their probabilities.")
    top_logprobs: list[dict[str, float]] = Field(description="Those of the likeliest tokens, by text.")
    text_offset: list[int] = Field(description="Where each begins in the answer, in characters.")


class CompletionChoice(AnswerModel):
    """One of the answers, or what is new of it."""

    text: str = Field(description="The text.")
    index: int = Field(description="Which: answers to the same prompt follow each other.")
    logprobs: CompletionLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Literal["stop", "length", "content_filter"] | None = Field(
        description="Why it ends; null while it goes on."
    )


class Completion(AnswerModel):
    """The answers, or a piece of them in a stream; the data of a stream's last event is `[DONE]`."""

    id: str = Field(description="`cmpl-…`.")
    object: Literal["text_completion"] = Field(description="What it is.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answers.")
    choices: list[CompletionChoice] = Field(description="The answers; none in a stream's last piece with `usage`.")
    usage: TokenUsage | None = Field(default=None, description="Tokens; in a stream where `include_usage` asks for it.")
    system_fingerprint: None = Field(description="There is none.")
    warnings: list[str] | None = Field(
        default=None, description="Legal parameters of which one had no effect; absent for none."
    )


async def create(call: Call) -> Reply:
    """Go on with texts."""
    _check(call.body)
    if call.body.stream:
        return Stream(_chunks(call))
    with _turns(call) as turns:
        pieces = CompletionWriter(_head(call))
        async for batch in turns.batches():
            for index, event in batch:
                pieces.take(index, event)
    return document(pieces.document())


async def _chunks(call: Call) -> AsyncGenerator[bytes, None]:
    with _turns(call) as turns:
        pieces = CompletionWriter(_head(call))
        async for batch in turns.batches():
            if written := b"".join([pieces.write(index, event) for index, event in batch]):
                yield written
            elif not batch:
                yield sse.KEEPALIVE
        yield pieces.last()


@contextmanager
def _turns(call: Call) -> Iterator[RequestTurns]:
    request: CompletionRequest = call.body
    conversations = [
        ConversationRequest(
            messages=(ChatMessage(role="user", content=prompt),),
            model=request.model,
            mode="raw",
            metadata={} if request.user is None else {"user": request.user},
        )
        for prompt in request.prompt
    ]

    def infer(place: SessionMatch, choice: int) -> Infer:
        body = {
            "op": "infer",
            "session_id": place.session_id,
            "prompt": place.remaining[0].content,
            "params": _params(request, choice=choice),
            "regex": request.regex,
            "grammar": request.grammar,
        }
        return checked(Infer, body)

    try:
        with run_choices(call.context, call.request_context, conversations, n=request.n, infer=infer) as turns:
            yield turns
    except InferenceCenterError as error:
        raise rephrased(error, OPENAI_FIELD_NAMES) from None


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


def _head(call: Call) -> CompletionHead:
    request: CompletionRequest = call.body
    return CompletionHead(
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
