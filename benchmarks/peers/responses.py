"""This project's daemon as agents use it: `/v1/responses` over one WebSocket for each client.

A turn of a conversation names the response before it (`previous_response_id`), so that only what is new is sent. Other
turns are not stored.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import websockets
from websockets.asyncio.client import connect

from benchmarks.peers.openai import COUNTING, Problem, unmeasured_abort
from benchmarks.peers.response_trace import Counted, ResponseTrace
from benchmarks.peers.sampling import sampling
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.client import ClientConnection

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import AbortTrace, TargetSpec, TurnTrace, Work

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
    """The parts of a response that are read."""

    id: str
    usage: _Usage | None = None
    error: Problem | None = None


class _Event(msgspec.Struct):
    """The parts of an event that are read."""

    type: str
    delta: str = ""
    response: _Response | None = None
    error: Problem | None = None


_read_event: Final = msgspec.json.Decoder(_Event).decode


class ResponsesSession:
    """One client's socket, and the last response of each of its conversations."""

    prompts: Prompts

    def __init__(self, socket: ClientConnection, spec: TargetSpec) -> None:
        self._socket = socket
        self._spec = spec
        self._conversations: dict[str, str] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, spec: TargetSpec) -> AsyncIterator[ResponsesSession]:
        """Open a socket."""
        url = "ws" + spec.url.removeprefix("http") + "/v1/responses"
        headers = {"authorization": f"Bearer {spec.token}"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                socket = await stack.enter_async_context(
                    connect(url, additional_headers=headers, compression=None, max_size=_MAX_FRAME_BYTES)
                )
            except (OSError, websockets.WebSocketException) as error:
                raise InferenceCenterError(
                    ErrorCode.DAEMON_UNREACHABLE, f"no daemon answers at {url}: {error}"
                ) from error
            yield cls(socket, spec)

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        response = ResponseTrace(on_text)
        try:
            before = self._conversations.get(work.history_id) if work.history_id is not None else None
            request = _request(work, self.prompts.text(work, first=before is None), self._spec, before=before)
            response.begin()
            async for event in _events(self._socket, request):
                if event.type == "response.output_text.delta":
                    response.piece(event.delta, now_s=time.monotonic())
                elif event.type in _LAST:
                    self._end(work, event, response)
        except InferenceCenterError as failure:
            response.error = str(failure)
        return response.trace()

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Return an error: a cancelled response is over before its slot is known to be free."""
        return unmeasured_abort()

    async def count(self, text: str) -> int:
        """Return the tokens of a text as the first of a conversation."""
        last = [event async for event in _events(self._socket, _request(COUNTING, text, self._spec, before=None))][-1]
        counted = _counted(last)
        if counted is None:
            raise InferenceCenterError(
                ErrorCode.ENGINE_UNAVAILABLE, _problem(last) or "the number of prompt tokens is not reported"
            )
        return counted.prompt_tokens

    def _end(self, work: Work, event: _Event, response: ResponseTrace) -> None:
        response.counted, response.error = _counted(event), _problem(event)
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
