"""This project's daemon as chat apps use it: `/v1/chat/completions`, over one kept connection for each client.

Such an app keeps the conversation and sends all of it with each turn. Parameters that are not OpenAI's, as `top_k`, go
into the extension `params`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from benchmarks.peers.heard import Heard
from benchmarks.peers.http import Http
from benchmarks.peers.openai import Problem, Usage, nameless_facts, unmeasured_abort
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.sampling import sampling
from benchmarks.target import Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import AbortTrace, TargetFacts, TargetSpec, TurnTrace

Messages: TypeAlias = list[dict[str, str]]

_PATH: Final = "/v1/chat/completions"
_COUNTING: Final = Work(prompt_tokens=0, max_tokens=1, seed=0)
_STREAMED: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}


class _Delta(msgspec.Struct):
    """What an event adds to the answer."""

    content: str | None = None


class _Choice(msgspec.Struct):
    """The one answer that was asked for."""

    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    """An event of a stream, or a whole answer, of which only the usage is read."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Problem | None = None


_EVENTS: Final = msgspec.json.Decoder(_Event)


class ChatServer:
    """A running daemon by its chat completions.

    Args:
        spec: ``url`` is its HTTP address; ``model`` and ``json_schema`` are sent with each request if they are set.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Return only the server's name: the API reports nothing else.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        return await nameless_facts(self._spec)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[ChatSession]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, or what the server refused.
        """
        async with Http(self._spec) as http:
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(lambda text: _count(http, text, self._spec))
            yield ChatSession(http, self._prompts, self._spec)


class ChatSession:
    """One client's connection, and the conversations it sends again each time."""

    def __init__(self, http: Http, prompts: Prompts, spec: TargetSpec) -> None:
        self._http = http
        self._prompts = prompts
        self._spec = spec
        self._conversations: dict[str, Messages] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        heard = Heard(on_text)
        try:
            told = self._conversations.get(work.history_id, []) if work.history_id is not None else []
            messages = [*told, _said("user", self._prompts.text(work, first=not told))]
            body = _body(work, messages, self._spec) | _STREAMED
            heard.begin()
            async for now_s, event in self._http.stream(_PATH, body, _EVENTS):
                heard.piece("".join(choice.delta.content or "" for choice in event.choices), now_s=now_s)
                heard.counted = event.usage.counted() if event.usage else heard.counted
                heard.error = event.error.message if event.error else heard.error
            self._keep(work, [*messages, _said("assistant", heard.text)])
        except InferenceCenterError as failure:
            heard.error = str(failure)
        return heard.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: when an HTTP server has stopped cannot be seen from outside."""
        return unmeasured_abort()

    def _keep(self, work: Work, messages: Messages) -> None:
        if work.history_id is None:
            return
        self._conversations[work.history_id] = messages
        if work.ends_history:
            del self._conversations[work.history_id]


async def _count(http: Http, text: str, spec: TargetSpec) -> int:
    answer = await http.post(_PATH, _body(_COUNTING, [_said("user", text)], spec), _Event)
    if answer.usage is None:
        raise InferenceCenterError(ErrorCode.INTERNAL, "the server does not report the number of prompt tokens")
    return answer.usage.prompt_tokens


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _body(work: Work, messages: Messages, spec: TargetSpec) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": work.max_tokens,
        "params": sampling(work, has_form=bool(spec.json_schema)),
    }
    if spec.model:
        body["model"] = spec.model
    if spec.json_schema:
        schema = msgspec.json.decode(spec.json_schema)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body
