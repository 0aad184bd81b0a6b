"""Questions about tokens: who asks them gets an answer or hears why not, whatever becomes of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    CancelLookup,
    Detokenized,
    DetokenizeRequest,
    LookupFailed,
    PromptSegment,
    Tokenized,
    TokenizeRequest,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.tokenizer_client import MAX_LOOKUP_BYTES, MAX_LOOKUPS, TokenizerClient
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor
from tests.supervisor.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from inferencecenter.ipc.messages import ToEngine

pytestmark = pytest.mark.usefixtures("stopped")
TEXT = (PromptSegment("hi"),)


@dataclass
class Desk(Timers):
    """Lookups whose timers fire when the test says so, and what an engine was sent."""

    sent: list[ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lookups = TokenizerClient(call_later=self.call_later)

    def tokenize(self, client_id: str = "c", pieces: tuple[PromptSegment, ...] = TEXT) -> asyncio.Future[Tokenized]:
        """Ask for the tokens of a text, a short one by default."""
        return self.lookups.tokenize(pieces, first=True, client_id=client_id)

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
    first, second = desk.tokenize(), desk.lookups.detokenize([7], client_id="d")
    assert desk.sent == []
    desk.connect()
    assert desk.sent == [TokenizeRequest(1, TEXT, True, "c"), DetokenizeRequest(2, pack_tokens([7]), "d")]
    desk.lookups.on_answer(Detokenized(2, "x"))
    desk.lookups.on_answer(Tokenized(1, pack_tokens([1, 2]), (b"h", b"i")))
    assert (await first).spelled == (b"h", b"i")
    assert (await second).text == "x"
    await asyncio.sleep(0)
    assert (len(desk.lookups), desk.pending) == (0, [])


async def test_a_lost_engine_answers_no_more() -> None:
    """Its requests fail, since one may have killed it; later ones wait for the next engine."""
    desk = Desk()
    desk.connect()
    asked = desk.tokenize()
    desk.lookups.lost()
    later = desk.tokenize()
    assert await code_of(asked) is ErrorCode.ENGINE_UNAVAILABLE
    desk.connect()
    desk.lookups.on_answer(Tokenized(1, b"", ()))
    desk.lookups.on_answer(Tokenized(2, b"", ()))
    assert (await later).lookup_id == 2
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
    """One more is refused until another is answered or cancelled."""
    desk = Desk()
    answers = [desk.tokenize() for _ in range(MAX_LOOKUPS)]
    with pytest.raises(InferenceCenterError, match="64"):
        desk.tokenize()
    answers[3].cancel()
    await asyncio.sleep(0)
    desk.tokenize()
    desk.lookups.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))
    assert {await code_of(each) for each in answers if not each.cancelled()} == {ErrorCode.ENGINE_UNAVAILABLE}


@pytest.mark.parametrize("large", [False, True])
async def test_a_client_with_many_questions_keeps_no_other_from_asking(large: bool) -> None:
    """All places, or all the room for texts, may be one client's; the next one has its share all the same."""
    desk = Desk()
    pieces = (PromptSegment("x" * (MAX_LOOKUP_BYTES // 4)),) if large else TEXT
    n_places = 3 if large else MAX_LOOKUPS
    answers = [desk.tokenize("greedy", pieces) for _ in range(n_places)]
    with pytest.raises(InferenceCenterError) as refused:
        desk.tokenize("greedy", pieces)
    assert refused.value.code is ErrorCode.OVERLOADED
    answers.append(desk.tokenize("modest", pieces))
    answers[0].cancel()
    answers[1].cancel()
    await asyncio.sleep(0)
    answers.append(desk.tokenize("greedy", pieces))
    desk.lookups.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))
    for each in answers:
        each.exception() if not each.cancelled() else None


async def test_a_question_that_nothing_waits_for_is_withdrawn_from_the_engine() -> None:
    """Whether it was cancelled, ended by what asked, or took too long; an answered one is not."""
    desk = Desk()
    desk.connect()
    cancelled, ended, answered = desk.tokenize(), desk.tokenize(), desk.tokenize()
    cancelled.cancel()
    ended.set_exception(ConnectionError("the client is gone"))
    desk.lookups.on_answer(Tokenized(3, b"", ()))
    await asyncio.sleep(0)
    assert desk.sent[3:] == [CancelLookup(1), CancelLookup(2)]
    late = desk.tokenize()
    desk.fire()
    assert await code_of(late) is ErrorCode.ENGINE_UNAVAILABLE
    assert desk.sent[6:] == [CancelLookup(4)]
    assert (await answered).lookup_id == 3
    assert isinstance(ended.exception(), ConnectionError)
    assert (len(desk.lookups), desk.pending) == (0, [])


async def test_what_the_engine_refuses_is_refused() -> None:
    """Its code and its words are passed on; a code that is none is a defect; a frame too large never leaves."""

    def refuse(message: ToEngine) -> None:
        raise FramingError("too large")

    desk = Desk()
    desk.connect()
    first, second = desk.tokenize(), desk.tokenize()
    desk.lookups.on_answer(LookupFailed(1, "invalid_request", "no text"))
    desk.lookups.on_answer(LookupFailed(2, "nonsense", "?"))
    assert await code_of(first) is ErrorCode.INVALID_REQUEST
    assert await code_of(second) is ErrorCode.INTERNAL
    desk.lookups.connect(refuse)
    assert await code_of(desk.tokenize()) is ErrorCode.MESSAGE_TOO_LARGE


async def test_a_question_wakes_an_engine_that_sleeps() -> None:
    """It is answered when the engine is ready; after the supervisor has stopped requests are refused."""
    watched = ObservedSupervisor()
    watched.supervisor.start(asleep=True)
    try:
        asked = watched.supervisor.tokenize(
            (PromptSegment("<|im_start|>", True), PromptSegment("hé")), first=True, client_id="c"
        )
        answer = await asyncio.wait_for(asked, TIMEOUT_S)
        assert answer.spelled == (b"<|im_start|>", b"h", b"\xc3", b"\xa9")
        tokens = unpack_tokens(answer.tokens)
        assert (await watched.supervisor.detokenize(tokens, client_id="c")).text == "<|im_start|>hé"
        assert (await watched.supervisor.detokenize([104, 258], client_id="c")).unknown == 258
        assert watched.supervisor.status.state is EngineState.READY
    finally:
        await watched.supervisor.stop()
    with pytest.raises(InferenceCenterError, match="stopped"):
        watched.supervisor.detokenize([1], client_id="c")
