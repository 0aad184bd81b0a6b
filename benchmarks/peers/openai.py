"""Servers with OpenAI's `/v1/completions` or `/v1/chat/completions`, over one kept connection for each client.

The client keeps a conversation and sends all of it with each turn. The server counts the tokens, in the usage that ends
a stream. `ignore_eos`, `top_k` and `min_p` are not OpenAI's: text completions carry them as self-hosted servers know
them, chat completions in this project's extension `params`. Whether such a server has stopped is not observable, so
aborts are not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from benchmarks.peers.http import Http
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.response_trace import Counted, ResponseTrace
from benchmarks.peers.sampling import sampling
from benchmarks.target import AbortTrace, TargetFacts, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import TargetSpec, TurnTrace

COUNTING: Final = Work(prompt_tokens=0, max_tokens=1, seed=0)
"""A turn that is run only to count its prompt tokens."""
_STREAMED: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
_ROLES: Final = ("user", "assistant")


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """A piece of the answer: ``text`` of a text completion, ``delta`` of a chat."""

    text: str = ""
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None

    def counted(self) -> Counted:
        details = self.prompt_tokens_details
        return Counted(self.prompt_tokens, self.completion_tokens, details.cached_tokens if details else None)


class Problem(msgspec.Struct):
    """A failure in the middle of a stream."""

    message: str = ""


class _Event(msgspec.Struct):
    """An event of a stream, or a whole answer, of which only the usage is read."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Problem | None = None


_EVENTS: Final = msgspec.json.Decoder(_Event)


class _Session(Protocol):
    """A client's connection; ``prompts`` are set once they are known."""

    prompts: Prompts

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace: ...
    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace: ...

    async def count(self, text: str) -> int:
        """Return the tokens of a text as the first of a conversation."""


class OpenAITarget:
    """A running server with one of OpenAI's APIs.

    Args:
        spec: ``url`` is its HTTP address; ``model`` and ``json_schema`` are sent with each request if they are set.
        connect: Opens a client's connection.
    """

    def __init__(
        self, spec: TargetSpec, connect: Callable[[TargetSpec], AbstractAsyncContextManager[_Session]]
    ) -> None:
        self._spec = spec
        self._connect = connect
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Return only the model's name: the API reports nothing else.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        spec = self._spec
        async with Http(spec) as http:
            await http.get("/v1/models", msgspec.Raw)
        return TargetFacts(
            name=spec.name,
            kind=spec.kind,
            url=spec.url,
            model=spec.model,
            model_bytes=None,
            n_params=None,
            library="",
            threads=None,
            slots=None,
            n_ctx=None,
        )

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, or what the server refused.
        """
        async with self._connect(self._spec) as session:
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(session.count)
            session.prompts = self._prompts
            yield session


class CompletionsSession:
    """A client of `/v1/completions`: a conversation is one text."""

    prompts: Prompts
    _path: ClassVar[str] = "/v1/completions"
    _keeps_connection: ClassVar[bool] = True

    def __init__(self, http: Http, spec: TargetSpec) -> None:
        self._http = http
        self._spec = spec
        self._conversations: dict[str, tuple[str, ...]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, spec: TargetSpec) -> AsyncIterator[CompletionsSession]:
        """Open a connection."""
        async with Http(spec) as http:
            yield cls(http, spec)

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        response = ResponseTrace(on_text)
        try:
            history = self._conversations.get(work.history_id, ()) if work.history_id is not None else ()
            texts = (*history, self.prompts.text(work, first=not history))
            body = self._body(work, texts) | _STREAMED
            response.begin()
            events = self._http.stream(self._path, body, _EVENTS, keep_connection=self._keeps_connection)
            async for now_s, event in events:
                pieces = (choice.text or choice.delta.content or "" for choice in event.choices)
                response.piece("".join(pieces), now_s=now_s)
                response.counted = event.usage.counted() if event.usage else response.counted
                response.error = event.error.message if event.error else response.error
            if work.history_id is not None and response.error is None:
                self._conversations[work.history_id] = (*texts, response.text)
                if work.ends_history:
                    del self._conversations[work.history_id]
        except InferenceCenterError as failure:
            response.error = str(failure)
        return response.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: the end of the abort is not observable."""
        return unmeasured_abort()

    async def count(self, text: str) -> int:
        """Return the tokens of a text as the first of a conversation."""
        answer = await self._http.post(self._path, self._body(COUNTING, (text,)), _Event)
        if answer.usage is None:
            raise InferenceCenterError(ErrorCode.INTERNAL, "the server does not report the number of prompt tokens")
        return answer.usage.prompt_tokens

    def _body(self, work: Work, texts: tuple[str, ...]) -> dict[str, Any]:
        body = {**sampling(work), "prompt": "".join(texts), "max_tokens": work.max_tokens}
        return {**body, "model": self._spec.model}


class ChatSession(CompletionsSession):
    """A client of `/v1/chat/completions`, as chat apps are."""

    _path = "/v1/chat/completions"

    def _body(self, work: Work, texts: tuple[str, ...]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": _ROLES[place % 2], "content": text} for place, text in enumerate(texts)],
            "max_completion_tokens": work.max_tokens,
            "params": sampling(work, has_form=bool(self._spec.json_schema)),
        }
        if self._spec.model:
            body["model"] = self._spec.model
        if self._spec.json_schema:
            schema = msgspec.json.decode(self._spec.json_schema)
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return body


def unmeasured_abort() -> AbortTrace:
    """Return the trace of an abort whose end is not observable."""
    now = time.monotonic()
    return AbortTrace(now, (), now, now, error="when this server has stopped cannot be seen from outside")
