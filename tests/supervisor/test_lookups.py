"""Questions about tokens: who asks them gets an answer or hears why not, whatever becomes of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FrameError
from inferencecenter.ipc.messages import (
    Detokenize,
    Detokenized,
    LookupFailed,
    Piece,
    Tokenize,
    Tokenized,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.lookups import MAX_LOOKUPS, Lookups
from tests.supervisor.harness import TIMEOUT_S, Watched
from tests.supervisor.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from inferencecenter.ipc.messages import ToEngine

pytestmark = pytest.mark.usefixtures("stopped")
TEXT = (Piece("hi"),)


@dataclass
class Desk(Timers):
    """Lookups whose timers fire when the test says so, and what an engine was sent."""

    sent: list[ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lookups = Lookups(call_later=self.call_later)

    def tokenize(self) -> asyncio.Future[Tokenized]:
        """Ask for the tokens of a short text."""
        return self.lookups.tokenize(TEXT, first=True)

    def connect(self) -> None:
        """Let an engine be there."""
        self.lookups.connect(self.sent.append)


async def code_of(answer: Awaitable[object]) -> ErrorCode:
    """Return why there is no answer."""
    with pytest.raises(InferenceCenterError) as failure:
        await answer
    return failure.value.code


async def test_a_question_waits_for_an_engine_and_is_asked_once() -> None:
    """The answer finds who asked by its number; afterwards nothing is kept and no timer runs."""
    desk = Desk()
    first, second = desk.tokenize(), desk.lookups.detokenize([7])
    assert desk.sent == []
    desk.connect()
    assert desk.sent == [Tokenize(1, TEXT, True), Detokenize(2, pack_tokens([7]))]
    desk.lookups.hear(Detokenized(2, "x"))
    desk.lookups.hear(Tokenized(1, pack_tokens([1, 2]), (b"h", b"i")))
    assert (await first).spelled == (b"h", b"i")
    assert (await second).text == "x"
    await asyncio.sleep(0)
    assert (len(desk.lookups), desk.pending) == (0, [])


async def test_a_lost_engine_answers_no_more() -> None:
    """What it was asked fails, since nobody knows whether it ended it; what comes later waits for the next engine."""
    desk = Desk()
    desk.connect()
    asked = desk.tokenize()
    desk.lookups.lost()
    later = desk.tokenize()
    assert await code_of(asked) is ErrorCode.ENGINE_UNAVAILABLE
    desk.connect()
    desk.lookups.hear(Tokenized(1, b"", ()))
    desk.lookups.hear(Tokenized(2, b"", ()))
    assert (await later).ask_id == 2
    assert len(desk.sent) == 2


@pytest.mark.parametrize(("ready", "code"), [(False, ErrorCode.MODEL_LOADING), (True, ErrorCode.ENGINE_UNAVAILABLE)])
async def test_nobody_waits_for_ever(ready: bool, code: ErrorCode) -> None:
    """After a while it is said what was waited for: an engine, or one that does not answer."""
    desk = Desk()
    if ready:
        desk.connect()
    answer = desk.tokenize()
    desk.fire()
    assert await code_of(answer) is code


async def test_so_many_may_ask_at_once() -> None:
    """One more is refused, until somebody has an answer or does not want one any more."""
    desk = Desk()
    answers = [desk.tokenize() for _ in range(MAX_LOOKUPS)]
    with pytest.raises(InferenceCenterError, match="64"):
        desk.tokenize()
    answers[3].cancel()
    await asyncio.sleep(0)
    desk.tokenize()
    desk.lookups.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))
    assert {await code_of(each) for each in answers if not each.cancelled()} == {ErrorCode.ENGINE_UNAVAILABLE}


async def test_what_the_engine_refuses_is_refused() -> None:
    """Its code and its words are passed on; a code that is none is a defect; a frame too large never leaves."""

    def refuse(message: ToEngine) -> None:
        raise FrameError("too large")

    desk = Desk()
    desk.connect()
    first, second = desk.tokenize(), desk.tokenize()
    desk.lookups.hear(LookupFailed(1, "invalid_request", "no text"))
    desk.lookups.hear(LookupFailed(2, "nonsense", "?"))
    assert await code_of(first) is ErrorCode.INVALID_REQUEST
    assert await code_of(second) is ErrorCode.INTERNAL
    desk.lookups.connect(refuse)
    assert await code_of(desk.tokenize()) is ErrorCode.MESSAGE_TOO_LARGE


async def test_a_question_wakes_an_engine_that_sleeps() -> None:
    """It is answered when the engine is ready, and when the supervisor has stopped nobody may ask."""
    watched = Watched()
    watched.supervisor.start(asleep=True)
    try:
        asked = watched.supervisor.tokenize((Piece("<|im_start|>", True), Piece("hé")), first=True)
        answer = await asyncio.wait_for(asked, TIMEOUT_S)
        assert answer.spelled == (b"<|im_start|>", b"h", b"\xc3", b"\xa9")
        tokens = unpack_tokens(answer.tokens)
        assert (await watched.supervisor.detokenize(tokens)).text == "<|im_start|>hé"
        assert (await watched.supervisor.detokenize([104, 258])).unknown == 258
        assert watched.supervisor.status.state is EngineState.READY
    finally:
        await watched.supervisor.stop()
    with pytest.raises(InferenceCenterError, match="stopped"):
        watched.supervisor.detokenize([1])
