"""Tokenize and detokenize requests to an engine, pending until answered, cancelled or timed out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    CancelLookup,
    Detokenized,
    DetokenizeRequest,
    LookupFailed,
    Tokenized,
    TokenizeRequest,
    TokensCounted,
    pack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.ipc.messages import LookupAnswer, PromptSegment, ToEngine
    from inferencecenter.supervisor.lifecycle import TimerHandle

MAX_LOOKUPS: Final = 64
"""How many requests may be pending, shared by the clients; an engine answers one in milliseconds."""

MAX_LOOKUP_BYTES: Final = 64 * 1024 * 1024
"""How much memory they may take together, shared by the clients."""

TIMEOUT_S: Final = 30.0

_Answer = TypeVar("_Answer", Tokenized, TokensCounted, Detokenized)


@dataclass(slots=True)
class _PendingLookup:
    """A pending request; ``sent`` means that an engine has it."""

    request: TokenizeRequest | DetokenizeRequest
    size_bytes: int
    answer: asyncio.Future[Any]
    timer: TimerHandle
    sent: bool = False


class TokenizerClient:
    """Holds requests until an engine is connected, and sends each to one engine only.

    A request ends with its answer, or when the caller cancels the future or sets its result itself; an engine that has
    the request is then told to cancel it.

    Args:
        call_later: Schedules a call after some seconds.
        timeout_s: How long a request waits for an engine and its answer.
    """

    def __init__(
        self, *, call_later: Callable[[float, Callable[[], None]], TimerHandle], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._numbers = count(1)
        self._pending: dict[int, _PendingLookup] = {}
        self._count_share = FairShare(MAX_LOOKUPS)
        self._size_share = FairShare(MAX_LOOKUP_BYTES)
        self._send: Callable[[ToEngine], None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._pending)})"

    def __len__(self) -> int:
        return len(self._pending)

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Request the tokens of a text; see ``EnginePort.tokenize``."""
        return self._submit(TokenizeRequest(next(self._numbers), tuple(pieces), first, client_id), Tokenized)

    def count_tokens(
        self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str
    ) -> asyncio.Future[TokensCounted]:
        """Request the number of tokens of a text; see ``EnginePort.count_tokens``."""
        request = TokenizeRequest(next(self._numbers), tuple(pieces), first, client_id, count_only=True)
        return self._submit(request, TokensCounted)

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Request the text of tokens; see ``EnginePort.detokenize``."""
        return self._submit(DetokenizeRequest(next(self._numbers), pack_tokens(tokens), client_id), Detokenized)

    def connect(self, send: Callable[[ToEngine], None]) -> None:
        """Send a new engine all pending requests by ``send``."""
        self._send = send
        for pending in list(self._pending.values()):
            self._forward(pending)

    def on_answer(self, answer: LookupAnswer) -> None:
        """Resolve a request; a late answer is dropped."""
        if isinstance(answer, LookupFailed):
            code = ErrorCode(answer.code) if answer.code in ERRORS else ErrorCode.INTERNAL
            self._fail(answer.lookup_id, InferenceCenterError(code, answer.message))
        elif (pending := self._forget(answer.lookup_id)) is not None:
            pending.answer.set_result(answer)

    def lost(self) -> None:
        """Fail the requests that the lost engine had; the others stay pending."""
        self._send = None
        error = InferenceCenterError(
            ErrorCode.ENGINE_UNAVAILABLE, "the engine was lost before it answered", retry_after_ms=1000
        )
        for lookup_id in [lookup_id for lookup_id, pending in self._pending.items() if pending.sent]:
            self._fail(lookup_id, error)

    def fail(self, error: InferenceCenterError) -> None:
        self._send = None
        for lookup_id in list(self._pending):
            self._fail(lookup_id, error)

    def _submit(self, request: TokenizeRequest | DetokenizeRequest, kind: type[_Answer]) -> asyncio.Future[_Answer]:
        lookup_id, client_id, size_bytes = request.lookup_id, request.client_id, request.size_bytes
        if not (self._count_share.fits(client_id, 1) and self._size_share.fits(client_id, size_bytes)):
            raise InferenceCenterError(
                ErrorCode.OVERLOADED,
                f"{len(self._pending)} tokenizer requests of {self._size_share.total} bytes are pending; all clients "
                f"share {MAX_LOOKUPS} requests and {MAX_LOOKUP_BYTES} bytes",
                hint="Wait for answers before sending more.",
                retry_after_ms=1000,
            )
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        timer = self._call_later(self._timeout_s, lambda: self._expire(lookup_id))
        pending = self._pending[lookup_id] = _PendingLookup(request, size_bytes, answer, timer)
        self._count_share.add(client_id, 1)
        self._size_share.add(client_id, size_bytes)
        answer.add_done_callback(lambda _: self._withdraw(lookup_id))  # the caller may cancel it
        self._forward(pending)
        return answer

    def _forward(self, pending: _PendingLookup) -> None:
        if self._send is None:
            return
        try:
            self._send(pending.request)
        except FramingError as error:
            self._fail(pending.request.lookup_id, InferenceCenterError(ErrorCode.MESSAGE_TOO_LARGE, str(error)))
        pending.sent = True

    def _forget(self, lookup_id: int) -> _PendingLookup | None:
        """Remove a request; return it if its answer is still awaited."""
        if (pending := self._pending.pop(lookup_id, None)) is None:
            return None
        pending.timer.cancel()
        self._count_share.remove(pending.request.client_id, 1)
        self._size_share.remove(pending.request.client_id, pending.size_bytes)
        return None if pending.answer.done() else pending

    def _withdraw(self, lookup_id: int) -> None:
        """Remove a request that is no longer awaited, and cancel it in the engine that has it."""
        pending = self._pending.get(lookup_id)
        self._forget(lookup_id)
        if pending is not None and pending.sent and self._send is not None:
            self._send(CancelLookup(lookup_id))

    def _expire(self, lookup_id: int) -> None:
        pending = self._pending[lookup_id]
        if pending.sent and self._send is not None:
            self._send(CancelLookup(lookup_id))
            error = InferenceCenterError(
                ErrorCode.ENGINE_UNAVAILABLE, "the engine does not answer", retry_after_ms=1000
            )
        else:
            error = InferenceCenterError(
                ErrorCode.MODEL_LOADING, f"the model was not ready within {self._timeout_s:g} s", retry_after_ms=1000
            )
        self._fail(lookup_id, error)

    def _fail(self, lookup_id: int, error: InferenceCenterError) -> None:
        if (pending := self._forget(lookup_id)) is not None:
            pending.answer.set_exception(error)
