"""``/v1/completions``: continues plain text, as a document or a stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from inferencecenter.api.body import checked, invalid_field
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, stream_turns
from inferencecenter.api.foreign_fields import FieldRule, FieldTable
from inferencecenter.api.openai.answers import (
    ChunkWriter,
    ResponseHead,
    finish_of,
    finite,
    head_fields,
    more_fields,
    raise_failure,
    usage_of,
)
from inferencecenter.api.openai.chat import OPENAI_FIELD_NAMES
from inferencecenter.api.openai.chat_schemas import AnswerModel, Timings, TokenUsage
from inferencecenter.api.openai.sampling import (
    MOST_PROBS,
    SAMPLING_RULES,
    MaxTokens,
    Sampling,
    form_of,
    infer_fields,
    raw_params,
    request_fields,
)
from inferencecenter.api.openai.token_fields import with_text_prompts, with_token_biases
from inferencecenter.api.plain.tokens import MAX_TOKENS, TokenId
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Infer, RawParams
from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead(ResponseHead):
    """Fields common to all pieces of a response. ``logprobs`` is the number requested, ``None`` without."""

    prompts: tuple[str, ...]
    echo: bool = False
    logprobs: int | None = None


_KIND: Final = "text_completion"


class CompletionWriter(ChunkWriter):
    """Encodes events one by one for a stream, or all at the end."""

    def __init__(self, head: CompletionHead) -> None:
        n_choices = len(head.prompts) * head.n
        super().__init__(head, _KIND, n_choices=n_choices)
        self._head = head
        self._texts: list[list[str]] = [[] for _ in range(n_choices)]
        self._n_chars = [0] * n_choices
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(n_choices)]
        self._begun = [False] * n_choices

    def write(self, index: int, event: Event) -> bytes:
        """Return the chunks of an event, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                choice = self._increment(index, self._begin(index) + event.content, event.logprobs)
                self._n_chars[index] += len(event.content)
                return self.chunk(choice)
            case events.End():
                choice = self._increment(index, self._begin(index), None, finish=finish_of(event))
                return self.end_choice(index, event, choice)
            case _:
                raise_failure(event)
                return b""

    def take(self, index: int, event: Event) -> None:
        """Store an event for ``document``.

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
        """Return the whole response."""
        ends = [end for end in self._ends if end is not None]
        return {
            **self._head.common(_KIND),
            "choices": [self._choice(index, end) for index, end in enumerate(self._ends) if end is not None],
            "usage": usage_of(ends, n=self._head.n),
            **more_fields(self._head.warnings, ends),
        }

    def _begin(self, index: int) -> str:
        """Return the beginning of a choice: the prompt with ``echo``."""
        begun, self._begun[index] = self._begun[index], True
        return self._head.prompts[index // self._head.n] if self._head.echo and not begun else ""

    def _choice(self, index: int, end: events.End) -> dict[str, Any]:
        return {
            "text": self._begin(index) + "".join(self._texts[index]),
            "index": index,
            "logprobs": self._logprobs_of(self._logprobs[index], offset=0),
            "finish_reason": finish_of(end),
        }

    def _increment(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None, *, finish: str | None = None
    ) -> dict[str, Any]:
        reported = None if logprobs is None else self._logprobs_of(logprobs, offset=self._n_chars[index])
        return {"text": text, "index": index, "logprobs": reported, "finish_reason": finish}

    def _logprobs_of(self, entries: Sequence[TokenLogprobs], *, offset: int) -> dict[str, Any] | None:
        """Return the probabilities of tokens, the first of which begins at ``offset``."""
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
"""Without a limit plain text would continue until the context is full; OpenAI's default."""


def _as_prompts(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(each, int) for each in value)):
        return [value]
    return value


PromptInput: TypeAlias = str | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class CompletionRequest(Sampling):
    """Request for completions of texts."""

    prompt: Annotated[
        list[PromptInput],
        Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True),
        BeforeValidator(_as_prompts, json_schema_input_type=str | list[int] | list[PromptInput]),
    ] = Field(description="A text or a list of tokens, or several, each of which is continued.")
    suffix: str | None = Field(
        default=None,
        description="Text after the completion, which fills the gap; only with models that have tokens for this.",
    )
    max_tokens: MaxTokens = Field(
        default=DEFAULT_MAX_TOKENS,
        description="Maximum number of generated tokens; -1 for as many as the context holds.",
    )
    echo: bool = Field(default=False, description="Whether the completion begins with the prompt; not with `logprobs`.")
    logprobs: int | None = Field(
        default=None, ge=0, le=MOST_PROBS, description="Number of most likely tokens to return at each position."
    )
    best_of: Literal[1] = Field(default=1, description="All completions are returned.")

    @property
    def texts(self) -> list[str]:
        """The prompts, all of which ``with_text_prompts`` has made texts."""
        return [prompt for prompt in self.prompt if isinstance(prompt, str)]


COMPLETION_FIELDS: Final = FieldTable(
    "completions",
    CompletionRequest,
    rules=(
        FieldRule(field="store", why="completions are not stored, see /v1/responses"),
        *SAMPLING_RULES,
    ),
)
"""The fields of completions."""


class CompletionLogprobs(AnswerModel):
    """Probabilities of generated tokens; each list has one entry per token."""

    tokens: list[str] = Field(description="The tokens as text.")
    token_logprobs: list[float] = Field(description="Natural logarithms of their probabilities.")
    top_logprobs: list[dict[str, float]] = Field(description="Log probabilities of the most likely tokens, by text.")
    text_offset: list[int] = Field(description="Offset of each token in the completion, in characters.")


class CompletionChoice(AnswerModel):
    """One choice, or the new part of it."""

    text: str = Field(description="The text.")
    index: int = Field(description="Index; choices of the same prompt are consecutive.")
    logprobs: CompletionLogprobs | None = Field(description="Token probabilities, if requested.")
    finish_reason: Literal["stop", "length", "content_filter"] | None = Field(
        description="Reason of the end; null before it."
    )


class Completion(AnswerModel):
    """The choices, or a part of them in a stream; the data of the stream's last event is `[DONE]`."""

    id: str = Field(description="`cmpl-…`.")
    object: Literal["text_completion"] = Field(description="Object type.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model.")
    choices: list[CompletionChoice] = Field(
        description="The choices; empty in the last piece of a stream with `usage`."
    )
    usage: TokenUsage | None = Field(default=None, description="Token usage; in a stream only with `include_usage`.")
    system_fingerprint: None = Field(description="Always null.")
    warnings: list[str] | None = Field(
        default=None, description="Fields and valid parameters that had no effect; absent if there are none."
    )
    timings: Timings | None = Field(default=None, description="Speed of the first choice; in a stream with its end.")


TEXT_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType({**OPENAI_FIELD_NAMES, "infill": "suffix"})
"""Fields of ``infer`` by their names in requests that continue text."""


async def create(call: Call) -> Reply:
    """Handle a request: continue texts."""
    call = await with_text_prompts(await with_token_biases(call))
    _check(call.body)
    request: CompletionRequest = call.body
    turns = raw_turns(
        call,
        request.texts,
        n=request.n,
        infill=None if request.suffix is None else {"suffix": request.suffix},
        params=partial(_params, request),
        names=TEXT_FIELD_NAMES,
    )
    head = CompletionHead(
        **head_fields(call, "cmpl"),
        prompts=tuple(request.texts),
        n=request.n,
        echo=request.echo,
        logprobs=request.logprobs,
    )
    pieces = CompletionWriter(head)
    return stream_turns(turns, pieces.write, last=pieces.last) if request.stream else await collect_turns(turns, pieces)


def raw_turns(  # noqa: PLR0913 - all by name
    call: Call,
    texts: Sequence[str],
    *,
    n: int = 1,
    infill: Mapping[str, Any] | None,
    params: Callable[[int], RawParams],
    names: Mapping[str, str],
) -> AbstractContextManager[RequestTurns]:
    """Return the turns of a request that continue each of ``texts`` ``n`` times, or fill the gap after it.

    ``params`` returns the parameters of a choice. ``names`` are fields of ``infer`` by their names in the request.

    Raises:
        InferenceCenterError: ``invalid_request``, see ``form_of``.
    """
    request: Sampling = call.body
    form = form_of(request)
    conversations = [
        ConversationRequest(
            messages=(ChatMessage(role="user", content=text),),
            model=request.model,
            mode="raw",
            metadata={} if request.user is None else {"user": request.user},
        )
        for text in texts
    ]

    def infer(place: SessionMatch, choice: int) -> Infer:
        body = {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.remaining),
            "params": params(choice),
            "infill": infill,
            **infer_fields(form),
        }
        return checked(Infer, body)

    fields = request_fields(names, form)
    return run_choices(call.context, call.request_context, conversations, n=n, infer=infer, names=fields)


def _check(request: CompletionRequest) -> None:
    if request.suffix is None and not all(request.prompt):
        raise invalid_field("prompt", "a prompt is empty, which requires a suffix")
    if request.echo and request.logprobs is not None:
        raise invalid_field("logprobs", "logprobs of the prompt are not supported with echo")
    form_of(request)
    _params(request, 0)


def _params(request: CompletionRequest, choice: int) -> RawParams:
    n_probs = 0 if request.logprobs is None else max(1, request.logprobs)
    own = request.params or {}
    # The default was not requested, and must not conflict with requested fields.
    given = request.n_predict if "max_tokens" not in request.model_fields_set else None
    max_tokens = given or request.max_tokens
    if request.model_fields_set.isdisjoint(("max_tokens", "n_predict")) and not own.keys().isdisjoint(_LIMITS):
        max_tokens = None
    return raw_params(request, max_tokens=max_tokens, n_probs=n_probs, choice=choice)


_LIMITS: Final = ("max_tokens", "n_predict", "stopping")


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Create a completion of texts.",
        handler=create,
        body=CompletionRequest,
        answer=Completion,
        event=Completion,
        errors=TURN_ERRORS,
        fields=COMPLETION_FIELDS,
    ),
)
