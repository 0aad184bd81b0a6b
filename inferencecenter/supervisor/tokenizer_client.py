"""Requests to an engine's tokenizer, kept until an engine answers or the caller gives up."""

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
    pack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.ipc.messages import PromptSegment, ToEngine
    from inferencecenter.supervisor.watchdog import TimerHandle

MAX_LOOKUPS: Final = 64
"""How many questions may wait for their answers, shared by the clients; an engine answers one in milliseconds."""

MAX_LOOKUP_BYTES: Final = 64 * 1024 * 1024
"""How much memory they may take together, shared by the clients."""

TIMEOUT_S: Final = 30.0

_Answer = TypeVar("_Answer", Tokenized, Detokenized)


@dataclass(slots=True)
class _Asked:
    """A question that is not answered; ``given`` says that an engine has it."""

    question: TokenizeRequest | DetokenizeRequest
    size_bytes: int
    answer: asyncio.Future[Any]
    timer: TimerHandle
    given: bool = False


class TokenizerClient:
    """Keeps questions until an engine is there, and gives each to one engine only.

    A question ends with its answer, or when what asked cancels the future or sets its outcome itself; then an engine
    that has the question is told that nothing waits for the answer.

    Args:
        call_later: Arranges for a call after some seconds.
        timeout_s: How long a question waits for an engine and its answer.
    """

    def __init__(
        self, *, call_later: Callable[[float, Callable[[], None]], TimerHandle], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}
        self._places = FairShare(MAX_LOOKUPS)
        self._room = FairShare(MAX_LOOKUP_BYTES)
        self._send: Callable[[ToEngine], None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._asked)})"

    def __len__(self) -> int:
        return len(self._asked)

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Ask for the tokens of a text; see ``EnginePort.tokenize``."""
        return self._ask(TokenizeRequest(next(self._numbers), tuple(pieces), first, client_id), Tokenized)

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Ask for the text of tokens; see ``EnginePort.detokenize``."""
        return self._ask(DetokenizeRequest(next(self._numbers), pack_tokens(tokens), client_id), Detokenized)

    def connect(self, send: Callable[[ToEngine], None]) -> None:
        """Ask a new engine, which hears by ``send``, all that waits."""
        self._send = send
        for asked in list(self._asked.values()):
            self._give(asked)

    def on_answer(self, answer: Tokenized | Detokenized | LookupFailed) -> None:
        """Pass an answer on; one that comes too late is dropped."""
        if isinstance(answer, LookupFailed):
            code = ErrorCode(answer.code) if answer.code in ERRORS else ErrorCode.INTERNAL
            self._fail(answer.ask_id, InferenceCenterError(code, answer.message))
        elif (asked := self._forget(answer.ask_id)) is not None:
            asked.answer.set_result(answer)

    def lost(self) -> None:
        """Take note that the engine is gone: what it was asked has no answer, what waits goes on waiting."""
        self._send = None
        error = InferenceCenterError(
            ErrorCode.ENGINE_UNAVAILABLE, "the engine was lost before it answered", retry_after_ms=1000
        )
        for ask_id in [ask_id for ask_id, asked in self._asked.items() if asked.given]:
            self._fail(ask_id, error)

    def fail(self, error: InferenceCenterError) -> None:
        """Answer all questions with an error."""
        self._send = None
        for ask_id in list(self._asked):
            self._fail(ask_id, error)

    def _ask(self, question: TokenizeRequest | DetokenizeRequest, kind: type[_Answer]) -> asyncio.Future[_Answer]:
        ask_id, client_id, size_bytes = question.ask_id, question.client_id, question.size_bytes
        if not (self._places.fits(client_id, 1) and self._room.fits(client_id, size_bytes)):
            raise InferenceCenterError(
                ErrorCode.OVERLOADED,
                f"{len(self._asked)} texts of {self._room.total} bytes are being looked up already; all clients share "
                f"{MAX_LOOKUPS} places and {MAX_LOOKUP_BYTES} bytes",
                hint="Wait for answers before asking for more.",
                retry_after_ms=1000,
            )
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        timer = self._call_later(self._timeout_s, lambda: self._expire(ask_id))
        asked = self._asked[ask_id] = _Asked(question, size_bytes, answer, timer)
        self._places.add(client_id, 1)
        self._room.add(client_id, size_bytes)
        answer.add_done_callback(lambda _: self._withdraw(ask_id))  # what asked may not want to know any more
        self._give(asked)
        return answer

    def _give(self, asked: _Asked) -> None:
        if self._send is None:
            return
        try:
            self._send(asked.question)
        except FramingError as error:
            self._fail(asked.question.ask_id, InferenceCenterError(ErrorCode.MESSAGE_TOO_LARGE, str(error)))
        asked.given = True

    def _forget(self, ask_id: int) -> _Asked | None:
        """Keep a question no more, and return it if something still waits for its answer."""
        if (asked := self._asked.pop(ask_id, None)) is None:
            return None
        asked.timer.cancel()
        self._places.remove(asked.question.client_id, 1)
        self._room.remove(asked.question.client_id, asked.size_bytes)
        return None if asked.answer.done() else asked

    def _withdraw(self, ask_id: int) -> None:
        """Keep a question no more for which nothing waits, and have an engine that was given it forget it."""
        asked = self._asked.get(ask_id)
        self._forget(ask_id)
        if asked is not None and asked.given and self._send is not None:
            self._send(CancelLookup(ask_id))

    def _expire(self, ask_id: int) -> None:
        asked = self._asked[ask_id]
        if asked.given and self._send is not None:
            self._send(CancelLookup(ask_id))
            error = InferenceCenterError(
                ErrorCode.ENGINE_UNAVAILABLE, "the engine does not answer", retry_after_ms=1000
            )
        else:
            error = InferenceCenterError(
                ErrorCode.MODEL_LOADING, f"the model was not ready within {self._timeout_s:g} s", retry_after_ms=1000
            )
        self._fail(ask_id, error)

    def _fail(self, ask_id: int, error: InferenceCenterError) -> None:
        if (asked := self._forget(ask_id)) is not None:
            asked.answer.set_exception(error)
