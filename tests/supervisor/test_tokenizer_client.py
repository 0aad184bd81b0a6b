"""Token lookups: each gets a result or an error, whatever happens to the engine."""

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
class TokenizerHarness(Timers):
    """A client whose timers fire on request, and the messages sent to the engine."""

    sent: list[ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lookups = TokenizerClient(call_later=self.call_later)

    def tokenize(self, client_id: str = "c", pieces: tuple[PromptSegment, ...] = TEXT) -> asyncio.Future[Tokenized]:
        """Request the tokens of a text, a short one by default."""
        return self.lookups.tokenize(pieces, first=True, client_id=client_id)

    def connect(self) -> None:
        """Connect an engine."""
        self.lookups.connect(self.sent.append)


async def code_of(answer: Awaitable[object]) -> ErrorCode:
    """Return the error code of a request."""
    with pytest.raises(InferenceCenterError) as failure:
        await answer
    return failure.value.code


async def test_request_waits_for_an_engine_and_is_sent_once() -> None:
    """The answer is matched by number; afterwards no entry is kept and no timer runs."""
    harness = TokenizerHarness()
    first, second = harness.tokenize(), harness.lookups.detokenize([7], client_id="d")
    assert harness.sent == []
    harness.connect()
    assert harness.sent == [TokenizeRequest(1, TEXT, True, "c"), DetokenizeRequest(2, pack_tokens([7]), "d")]
    harness.lookups.on_answer(Detokenized(2, "x"))
    harness.lookups.on_answer(Tokenized(1, pack_tokens([1, 2]), (b"h", b"i")))
    assert (await first).spelled == (b"h", b"i")
    assert (await second).text == "x"
    await asyncio.sleep(0)
    assert (len(harness.lookups), harness.pending) == (0, [])


async def test_requests_of_a_lost_engine_fail() -> None:
    """One of them may have crashed it; later ones wait for the next engine."""
    harness = TokenizerHarness()
    harness.connect()
    asked = harness.tokenize()
    harness.lookups.lost()
    later = harness.tokenize()
    assert await code_of(asked) is ErrorCode.ENGINE_UNAVAILABLE
    harness.connect()
    harness.lookups.on_answer(Tokenized(1, b"", ()))
    harness.lookups.on_answer(Tokenized(2, b"", ()))
    assert (await later).lookup_id == 2
    assert len(harness.sent) == 2


@pytest.mark.parametrize(("ready", "code"), [(False, ErrorCode.MODEL_LOADING), (True, ErrorCode.ENGINE_UNAVAILABLE)])
async def test_requests_time_out(ready: bool, code: ErrorCode) -> None:
    """The error says what it waited for: an engine, or one that does not answer."""
    harness = TokenizerHarness()
    if ready:
        harness.connect()
    answer = harness.tokenize()
    harness.fire()
    assert await code_of(answer) is code


async def test_number_of_requests_is_limited() -> None:
    """Another is refused until one is answered or cancelled."""
    harness = TokenizerHarness()
    answers = [harness.tokenize() for _ in range(MAX_LOOKUPS)]
    with pytest.raises(InferenceCenterError, match="64"):
        harness.tokenize()
    answers[3].cancel()
    await asyncio.sleep(0)
    harness.tokenize()
    harness.lookups.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))
    assert {await code_of(each) for each in answers if not each.cancelled()} == {ErrorCode.ENGINE_UNAVAILABLE}


@pytest.mark.parametrize("large", [False, True])
async def test_client_with_many_requests_does_not_block_others(large: bool) -> None:
    """One client may fill all places, or the budget for texts; the next one still has its share."""
    harness = TokenizerHarness()
    pieces = (PromptSegment("x" * (MAX_LOOKUP_BYTES // 4)),) if large else TEXT
    n_places = 3 if large else MAX_LOOKUPS
    answers = [harness.tokenize("greedy", pieces) for _ in range(n_places)]
    with pytest.raises(InferenceCenterError) as refused:
        harness.tokenize("greedy", pieces)
    assert refused.value.code is ErrorCode.OVERLOADED
    answers.append(harness.tokenize("modest", pieces))
    answers[0].cancel()
    answers[1].cancel()
    await asyncio.sleep(0)
    answers.append(harness.tokenize("greedy", pieces))
    harness.lookups.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))
    for each in answers:
        each.exception() if not each.cancelled() else None


async def test_abandoned_request_is_withdrawn_from_the_engine() -> None:
    """A request that is cancelled, ended by its caller or timed out is withdrawn; an answered one is not."""
    harness = TokenizerHarness()
    harness.connect()
    cancelled, ended, answered = harness.tokenize(), harness.tokenize(), harness.tokenize()
    cancelled.cancel()
    ended.set_exception(ConnectionError("the client is gone"))
    harness.lookups.on_answer(Tokenized(3, b"", ()))
    await asyncio.sleep(0)
    assert harness.sent[3:] == [CancelLookup(1), CancelLookup(2)]
    late = harness.tokenize()
    harness.fire()
    assert await code_of(late) is ErrorCode.ENGINE_UNAVAILABLE
    assert harness.sent[6:] == [CancelLookup(4)]
    assert (await answered).lookup_id == 3
    assert isinstance(ended.exception(), ConnectionError)
    assert (len(harness.lookups), harness.pending) == (0, [])


async def test_errors_of_the_engine_are_passed_on() -> None:
    """They keep code and message; an unknown code is internal; an oversized frame is never sent."""

    def refuse(message: ToEngine) -> None:
        raise FramingError("too large")

    harness = TokenizerHarness()
    harness.connect()
    first, second = harness.tokenize(), harness.tokenize()
    harness.lookups.on_answer(LookupFailed(1, "invalid_request", "no text"))
    harness.lookups.on_answer(LookupFailed(2, "nonsense", "?"))
    assert await code_of(first) is ErrorCode.INVALID_REQUEST
    assert await code_of(second) is ErrorCode.INTERNAL
    harness.lookups.connect(refuse)
    assert await code_of(harness.tokenize()) is ErrorCode.MESSAGE_TOO_LARGE


async def test_request_wakes_a_sleeping_engine() -> None:
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
