"""Turns that the measuring process runs itself, because it also kills engines or swaps models meanwhile."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from benchmarks.concurrency import together
from benchmarks.observed_turn import ObservedTurn
from benchmarks.peers.line import named, open_line, succeeded
from benchmarks.peers.prompts import calibrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.peers.line import Frame, Line
    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import TargetSpec

GREEDY: Final = {"temperature": 0.0, "repeat_penalty": 1.2, "ignore_eos": True}
"""Sampling that gives the same text each time; the penalty has to be restored with the sampler, and makes a repeated
passage visible.
"""


@asynccontextmanager
async def open_lines(spec: TargetSpec, count: int) -> AsyncIterator[list[Line]]:
    """Open a number of connections.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
    """
    async with AsyncExitStack() as open_now:
        yield [await open_now.enter_async_context(open_line(spec)) for _ in range(count)]


async def learn_words(spec: TargetSpec) -> Prompts:
    """Find words of one token each.

    Raises:
        InferenceCenterError: ``invalid_request`` when the vocabulary has too few; what keeps turns from running.
    """
    async with open_line(spec) as line:
        return await calibrate(line.count)


async def open_session(line: Line) -> str:
    """Open a stored session, which outlives its connection.

    Raises:
        InferenceCenterError: With the daemon's code when it refuses.
    """
    return named(await line.create_session(stored=True))


async def run_turn(
    line: Line,
    session_id: str,
    text: str,
    *,
    max_tokens: int,
    on_frame: Callable[[ObservedTurn], None] = lambda _: None,
) -> ObservedTurn:
    """Run a greedy turn to its first terminal event; ``on_frame`` is called with the turn after each frame.

    Raises:
        InferenceCenterError: ``daemon_unreachable``.
    """
    shown = ObservedTurn(time.monotonic())
    params: dict[str, Any] = {**GREEDY, "max_tokens": max_tokens}
    async for frame in line.turn(session_id, text, params):
        shown.take(frame, now_s=time.monotonic())
        on_frame(shown)
    return shown


async def run_turns(
    lines: Sequence[Line], sessions: Sequence[str], texts: Sequence[str], *, max_tokens: int
) -> list[ObservedTurn]:
    """Run a greedy turn on each connection, all at once.

    Raises:
        InferenceCenterError: ``daemon_unreachable``.
    """
    return await together(
        run_turn(line, session, text, max_tokens=max_tokens)
        for line, session, text in zip(lines, sessions, texts, strict=True)
    )


async def last_answer(line: Line, session_id: str, *, on_other: Callable[[Frame], None]) -> str:
    """Return the answer at the end of a session's transcript; ``on_other`` is called with events before the reply.

    Raises:
        InferenceCenterError: With the daemon's code when it refuses.
    """
    answered = await line.request(op="get_session", session_id=session_id, on_other=on_other)
    transcript = succeeded(answered, "session").transcript
    return transcript[-1].content if transcript and transcript[-1].role == "assistant" else ""


async def finished(line: Line, session_id: str, shown: ObservedTurn) -> str:
    """Return the session's answer of its last turn; later events of that turn are added to what was received.

    Raises:
        InferenceCenterError: With the daemon's code when it refuses.
    """

    def late(frame: Frame) -> None:
        if frame.session_id == session_id:
            shown.take(frame, now_s=time.monotonic())

    return await last_answer(line, session_id, on_other=late)
