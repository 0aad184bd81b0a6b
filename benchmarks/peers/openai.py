"""Any server with OpenAI's `/v1/completions` as a target: text prompts, over one kept connection for each client.

It counts the tokens itself, in the usage that ends a stream. `ignore_eos`, `top_k` and `min_p` are not OpenAI's; the
servers that people run themselves know them. Such a server cannot be asked whether it has stopped, so aborts are not
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.peers.heard import Counted, Heard
from benchmarks.peers.http import Http
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.sampling import sampling
from benchmarks.target import AbortTrace, TargetFacts, Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import TargetSpec, TurnTrace

_COUNTING: Final = Work(prompt_tokens=0, max_tokens=1, seed=0)


class _Choice(msgspec.Struct):
    """A piece of the answer."""

    text: str = ""


class PromptDetails(msgspec.Struct):
    """More about the prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None

    def counted(self) -> Counted:
        """Return them as every server's are kept."""
        details = self.prompt_tokens_details
        return Counted(self.prompt_tokens, self.completion_tokens, details.cached_tokens if details else None)


class Problem(msgspec.Struct):
    """A failure in the middle of a stream."""

    message: str = ""


class _Event(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Problem | None = None


_EVENTS: Final = msgspec.json.Decoder(_Event)


class OpenAIServer:
    """A running server with OpenAI's API.

    Args:
        spec: ``model`` is sent with each request.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Return only the model's name: the API reports nothing else.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        return await nameless_facts(self._spec)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[OpenAISession]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, or what the server refused.
        """
        async with Http(self._spec) as http:
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(lambda text: _count(http, text, model=self._spec.model))
            yield OpenAISession(http, self._prompts, model=self._spec.model)


class OpenAISession:
    """A client's connection, and its conversations, which are sent in full with each turn."""

    def __init__(self, http: Http, prompts: Prompts, *, model: str) -> None:
        self._http = http
        self._prompts = prompts
        self._model = model
        self._conversations: dict[str, str] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        heard = Heard(on_text)
        try:
            told = self._conversations.get(work.history_id, "") if work.history_id is not None else ""
            prompt = told + self._prompts.text(work, first=not told)
            stream = {"stream": True, "stream_options": {"include_usage": True}}
            body = _body(work, prompt, model=self._model) | stream
            heard.begin()
            async for now_s, event in self._http.stream("/v1/completions", body, _EVENTS):
                heard.piece("".join(choice.text for choice in event.choices), now_s=now_s)
                heard.counted = event.usage.counted() if event.usage else heard.counted
                heard.error = event.error.message if event.error else heard.error
            if work.history_id is not None and heard.error is None:
                self._conversations[work.history_id] = prompt + heard.text
                if work.ends_history:
                    del self._conversations[work.history_id]
        except InferenceCenterError as failure:
            heard.error = str(failure)
        return heard.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: when such a server has stopped cannot be seen from outside."""
        return unmeasured_abort()


async def nameless_facts(spec: TargetSpec) -> TargetFacts:
    """Return the facts of a server with OpenAI's API, which reports only its existence.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
    """
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


def unmeasured_abort() -> AbortTrace:
    """Return the trace of an abort whose end is not observable."""
    now = time.monotonic()
    return AbortTrace(now, (), now, now, error="when this server has stopped cannot be seen from outside")


async def _count(http: Http, text: str, *, model: str) -> int:
    answer = await http.post("/v1/completions", _body(_COUNTING, text, model=model), _Event)
    if answer.usage is None:
        raise InferenceCenterError(ErrorCode.INTERNAL, "the server does not report the number of prompt tokens")
    return answer.usage.prompt_tokens


def _body(work: Work, prompt: str, *, model: str) -> dict[str, Any]:
    return {**sampling(work), "model": model, "prompt": prompt, "max_tokens": work.max_tokens}
