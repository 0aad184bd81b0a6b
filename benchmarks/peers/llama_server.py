"""llama-server as a target: `/completion` with token ids.

The prompt's ids come from `/tokenize` before the clock starts, so the server does not tokenize meanwhile, and the
turn's connection is open by then. A turn is a request of its own; each contains the whole conversation, as token ids,
and `cache_prompt` lets the server reuse its KV. The server chooses the slot, unless a turn names one (`id_slot`): then
it waits while that one is busy. After a stream the server closes the connection without announcing it, so the
connection is not used again.

A turn is aborted by closing the connection, the only way there is. It has ended when `/slots`, which is polled every
few milliseconds and answered between steps, reports its slot as free; the turn's seed identifies the slot, since events
do not name it. llama-server notices a closed connection when it next writes to it, or within a second while it has
nothing to write; that time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.peers.http import Http
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.sampling import sampling
from benchmarks.target import AbortTrace, TargetFacts, TurnTrace
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import TargetSpec, Work

_SLOT_POLL_S: Final = 0.002


class _SlotSettings(msgspec.Struct):
    """Settings of a slot."""

    n_ctx: int


class _Props(msgspec.Struct):
    """Answer of `/props`."""

    total_slots: int
    default_generation_settings: _SlotSettings
    model_path: str = ""
    build_info: str = ""


class _ModelMeta(msgspec.Struct):
    """Fields of `/v1/models` beyond OpenAI's."""

    n_params: int | None = None
    size: int | None = None


class _ListedModel(msgspec.Struct):
    """An entry of `/v1/models`."""

    meta: _ModelMeta | None = None


class _ListedModels(msgspec.Struct):
    """Answer of `/v1/models`."""

    data: list[_ListedModel]


class _Tokens(msgspec.Struct):
    """Answer of `/tokenize`."""

    tokens: list[int]


class _SlotParams(msgspec.Struct):
    """Parameters of a slot's task, or of its last one."""

    seed: int


class _Slot(msgspec.Struct):
    """An entry of `/slots`; one that never had a task has no parameters."""

    is_processing: bool
    params: _SlotParams | None = None


class _Reading(msgspec.Struct):
    """How much of a prompt has been prefilled."""

    total: int
    cache: int
    processed: int

    @property
    def is_underway(self) -> bool:
        """Whether a part of the prompt was prefilled and a part is left."""
        return self.cache < self.processed < self.total


class _Timings(msgspec.Struct):
    """The figures in the last event."""

    cache_n: int | None = None


class _Error(msgspec.Struct):
    """A failure in the middle of a stream."""

    message: str = ""


class _Event(msgspec.Struct):
    """An event of a streamed `/completion`."""

    content: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    stop: bool = False
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    timings: _Timings | None = None
    prompt_progress: _Reading | None = None
    error: _Error | None = None


_EVENTS: Final = msgspec.json.Decoder(_Event)


class LlamaServer:
    """A running llama-server."""

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Query the server's model and settings; it does not report its threads.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with Http(self._spec) as http:
            props = await http.get("/props", _Props)
            models = (await http.get("/v1/models", _ListedModels)).data
        meta = (models[0].meta if models else None) or _ModelMeta()
        return TargetFacts(
            name=self._spec.name,
            kind="llama-server",
            url=self._spec.url,
            model=PurePath(props.model_path).name,
            model_bytes=meta.size,
            n_params=meta.n_params,
            library=props.build_info,
            threads=None,
            slots=props.total_slots,
            n_ctx=props.default_generation_settings.n_ctx,
        )

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[LlamaServerSession]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with Http(self._spec) as http:
            async with self._calibrating:
                if self._prompts is None:

                    async def count(text: str) -> int:
                        return len(await _tokenize(http, text, first=True))

                    self._prompts = await calibrate(count)
            yield LlamaServerSession(http, self._prompts)


class LlamaServerSession:
    """A client's connection, and its conversations, which are sent in full with each turn."""

    def __init__(self, http: Http, prompts: Prompts) -> None:
        self._http = http
        self._prompts = prompts
        self._conversations: dict[str, list[int]] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        started_s = time.monotonic()
        times_s: list[float] = []
        last, error = _Event(), None
        try:
            prompt = await self._prompt(work)
            answer: list[int] = []
            started_s = time.monotonic()
            async for now, event in self._stream(_body(work, prompt)):
                if event.content:
                    times_s.append(now)
                    if on_text is not None:
                        on_text()
                answer += event.tokens
                last = event
            ended_s = time.monotonic()
            error = _why_not_whole(last)
            if work.history_id is not None and error is None:
                self._conversations[work.history_id] = prompt + answer
                if work.ends_history:
                    del self._conversations[work.history_id]
        except InferenceCenterError as failure:
            ended_s, error = time.monotonic(), str(failure)
        return TurnTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            ended_s=ended_s,
            prompt_tokens=last.tokens_evaluated,
            tokens=last.tokens_predicted,
            cached_tokens=last.timings.cache_n if last.timings else None,
            error=error,
        )

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Close the connection after a number of pieces of text, or when part of the prompt has been prefilled."""
        started_s = time.monotonic()
        times_s: list[float] = []
        aborted_s, error = None, None
        try:
            body = _body(work, await self._prompt(work)) | {"return_progress": after_tokens is None}
            started_s = time.monotonic()
            async with contextlib.aclosing(self._stream(body)) as events:
                async for now, event in events:
                    if event.content:
                        times_s.append(now)
                    if event.stop or event.error:
                        error = _why_not_whole(event) or "the turn ended by itself"
                    elif _is_due(event, after_tokens, n_pieces=len(times_s)):
                        aborted_s = time.monotonic()
                        break
            if aborted_s is not None:
                await self._until_free(body["seed"])
        except InferenceCenterError as failure:
            error = str(failure)
        ended_s = time.monotonic()
        return AbortTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            aborted_s=ended_s if aborted_s is None else aborted_s,
            ended_s=ended_s,
            error=error,
        )

    def _stream(self, body: dict[str, Any]) -> AsyncGenerator[tuple[float, _Event], None]:
        return self._http.stream("/completion", body, _EVENTS, keep_connection=False)

    async def _prompt(self, work: Work) -> list[int]:
        history = self._conversations.get(work.history_id, []) if work.history_id is not None else []
        return history + await _tokenize(self._http, self._prompts.text(work, first=not history), first=not history)

    async def _until_free(self, seed: int) -> None:
        """Wait until no slot works on the task with this seed."""
        while True:
            slots = await self._http.get("/slots", list[_Slot])
            if not any(slot.is_processing and slot.params is not None and slot.params.seed == seed for slot in slots):
                return
            await asyncio.sleep(_SLOT_POLL_S)


async def _tokenize(http: Http, text: str, *, first: bool) -> list[int]:
    body = {"content": text, "add_special": first, "parse_special": False}
    return (await http.post("/tokenize", body, _Tokens)).tokens


def _body(work: Work, prompt: list[int]) -> dict[str, Any]:
    body = {
        **sampling(work),
        "prompt": prompt,
        "n_predict": work.max_tokens,
        "stream": True,
        "cache_prompt": True,
        "return_tokens": True,
    }
    return body if work.slot is None else body | {"id_slot": work.slot}


def _is_due(event: _Event, after_tokens: int | None, *, n_pieces: int) -> bool:
    if after_tokens is not None:
        return n_pieces >= after_tokens
    return event.prompt_progress is not None and event.prompt_progress.is_underway


def _why_not_whole(last: _Event) -> str | None:
    """Return the error of a turn with this last event."""
    if last.error is not None:
        return last.error.message or "the server reports an error without a message"
    return None if last.stop else "the stream broke off"
