"""This project's daemon as agents use it: `/v1/responses` over one WebSocket for each client.

A turn of a conversation names the response before it (`previous_response_id`), so that only what is new is sent. Other
turns are not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import websockets
from websockets.asyncio.client import connect

from benchmarks.peers.heard import Counted, Heard
from benchmarks.peers.openai import Problem, nameless_facts, unmeasured_abort
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.sampling import sampling
from benchmarks.target import Work
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.client import ClientConnection

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import AbortTrace, TargetFacts, TargetSpec, TurnTrace

_COUNTING: Final = Work(prompt_tokens=0, max_tokens=1, seed=0)
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
_MAX_FRAME_BYTES: Final = 2**26


class _InputDetails(msgspec.Struct):
    """More about the input."""

    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    input_tokens_details: _InputDetails | None = None


class _Response(msgspec.Struct):
    """What is read of a response."""

    id: str
    usage: _Usage | None = None
    error: Problem | None = None


class _Event(msgspec.Struct):
    """What is read of an event."""

    type: str
    delta: str = ""
    response: _Response | None = None
    error: Problem | None = None


_read_event: Final = msgspec.json.Decoder(_Event).decode


class ResponsesServer:
    """A running daemon by its Responses.

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
    async def session(self) -> AsyncIterator[ResponsesSession]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, or what the server refused.
        """
        url = "ws" + self._spec.url.removeprefix("http") + "/v1/responses"
        headers = {"authorization": f"Bearer {self._spec.token}"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                socket = await stack.enter_async_context(
                    connect(url, additional_headers=headers, compression=None, max_size=_MAX_FRAME_BYTES)
                )
            except (OSError, websockets.WebSocketException) as error:
                raise InferenceCenterError(
                    ErrorCode.DAEMON_UNREACHABLE, f"no daemon answers at {url}: {error}"
                ) from error
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(lambda text: _count(socket, text, self._spec))
            yield ResponsesSession(socket, self._prompts, self._spec)


class ResponsesSession:
    """One client's socket, and the last response of each of its conversations."""

    def __init__(self, socket: ClientConnection, prompts: Prompts, spec: TargetSpec) -> None:
        self._socket = socket
        self._prompts = prompts
        self._spec = spec
        self._conversations: dict[str, str] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        heard = Heard(on_text)
        try:
            before = self._conversations.get(work.history_id) if work.history_id is not None else None
            request = _request(work, self._prompts.text(work, first=before is None), self._spec, before=before)
            heard.begin()
            async for event in _events(self._socket, request):
                if event.type == "response.output_text.delta":
                    heard.piece(event.delta, now_s=time.monotonic())
                elif event.type in _LAST:
                    self._end(work, event, heard)
        except InferenceCenterError as failure:
            heard.error = str(failure)
        return heard.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: a cancelled response is over before its slot is known to be free."""
        return unmeasured_abort()

    def _end(self, work: Work, event: _Event, heard: Heard) -> None:
        heard.counted, heard.error = _counted(event), _problem(event)
        if work.history_id is not None and event.response is not None:
            self._conversations[work.history_id] = event.response.id
            if work.ends_history:
                del self._conversations[work.history_id]


async def _events(socket: ClientConnection, request: dict[str, Any]) -> AsyncIterator[_Event]:
    """Request a response and yield its events, including the last.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` when the connection is lost.
    """
    try:
        await socket.send(msgspec.json.encode(request), text=True)
        while True:
            event = _read_event(await socket.recv(decode=False))
            yield event
            if event.type in _LAST:
                return
    except websockets.ConnectionClosed as error:
        raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"the connection is lost: {error}") from error


async def _count(socket: ClientConnection, text: str, spec: TargetSpec) -> int:
    last = [event async for event in _events(socket, _request(_COUNTING, text, spec, before=None))][-1]
    counted = _counted(last)
    if counted is None:
        raise InferenceCenterError(
            ErrorCode.ENGINE_UNAVAILABLE, _problem(last) or "the number of prompt tokens is not reported"
        )
    return counted.prompt_tokens


def _request(work: Work, text: str, spec: TargetSpec, *, before: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {
        "type": "response.create",
        "input": text,
        "max_output_tokens": work.max_tokens,
        "params": sampling(work, has_form=bool(spec.json_schema)),
        "store": work.history_id is not None,
    }
    if before is not None:
        request["previous_response_id"] = before
    if spec.model:
        request["model"] = spec.model
    if spec.json_schema:
        schema = msgspec.json.decode(spec.json_schema)
        request["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    return request


def _counted(event: _Event) -> Counted | None:
    usage = event.response.usage if event.response else None
    if usage is None:
        return None
    details = usage.input_tokens_details
    return Counted(usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None)


def _problem(event: _Event) -> str | None:
    problem = event.error or (event.response.error if event.response else None)
    return problem.message if problem else None
