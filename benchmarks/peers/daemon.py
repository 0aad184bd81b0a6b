"""This project's daemon as a target: sessions, in raw mode or for chat, over one WebSocket for each client.

A conversation's session is opened before the turn's clock starts, as a connection is; the clock runs from ``infer`` to
``end``. Each ``token`` frame is one piece of text. The daemon joins pieces only for clients that fall behind, and says
in ``end`` how many tokens there were. An abort is measured from ``abort`` to ``end``: the turn holds no slot any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.peers.line import LAST_OPS, Frame, Line, named, open_line
from benchmarks.peers.prompts import calibrate
from benchmarks.peers.sampling import sampling
from benchmarks.target import AbortTrace, TargetFacts, TurnTrace, Work
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.peers.prompts import Prompts
    from benchmarks.target import TargetSpec


class Daemon:
    """A running daemon.

    Args:
        spec: ``token`` is an account's token.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Query the daemon's model and settings; sizes and slots need the operator scope.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with open_line(self._spec) as line:
            model = (await line.request(op="status", type="model")).values
            memory = (await line.request(op="status", type="memory")).values
        return TargetFacts(
            name=self._spec.name,
            kind="inferencecenter",
            url=self._spec.url,
            model=str(model.get("name") or ""),
            model_bytes=_whole(memory.get("model_bytes")),
            n_params=_whole(model.get("parameters")),
            library=str(model.get("library") or ""),
            threads=_whole(model.get("threads")),
            slots=_whole(memory.get("slots")),
            n_ctx=_whole(model.get("n_ctx")),
        )

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[DaemonSession]:
        """Open a connection for one client; the first one also finds words of one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with open_line(self._spec) as line:
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(partial(line.count, chat=self._spec.chat))
            yield DaemonSession(line, self._prompts, self._spec)


class DaemonSession:
    """One client's socket and its conversations, of the kind that ``spec`` selects."""

    def __init__(self, line: Line, prompts: Prompts, spec: TargetSpec) -> None:
        self._line = line
        self._prompts = prompts
        self._spec = spec
        self._json_schema = msgspec.Raw(spec.json_schema.encode()) if spec.json_schema else None
        self._conversations: dict[str, str] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        started_s = time.monotonic()
        times_s: list[float] = []
        usage, error = None, None
        try:
            session_id, text = await self._prepare(work)
            started_s = time.monotonic()
            async for frame in self._line.turn(session_id, text, self._params(work), json_schema=self._json_schema):
                if frame.op == "token":
                    times_s.append(time.monotonic())
                    if on_text is not None:
                        on_text()
                elif frame.op in LAST_OPS:
                    usage, error = frame.usage, frame.message or None
            ended_s = time.monotonic()
            await self._leave(work, session_id)
        except InferenceCenterError as failure:
            ended_s, error = time.monotonic(), str(failure)
        return TurnTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            ended_s=ended_s,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            tokens=usage.completion_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else None,
            error=error,
        )

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Abort a turn after this many pieces of text, or at the first progress event of its prompt."""
        started_s = time.monotonic()
        times_s: list[float] = []
        aborted_s, error = None, None
        try:
            session_id, text = await self._prepare(work)
            started_s = time.monotonic()
            async for frame in self._line.turn(session_id, text, self._params(work), json_schema=self._json_schema):
                if frame.op == "token":
                    times_s.append(time.monotonic())
                elif frame.op in LAST_OPS:
                    error = _why_not_aborted(frame, too_late=after_tokens is None and bool(times_s))
                is_due = frame.op == "progress" if after_tokens is None else len(times_s) >= after_tokens
                if aborted_s is None and is_due:
                    aborted_s = time.monotonic()
                    await self._line.send(op="abort", session_id=session_id)
            ended_s = time.monotonic()
            await self._leave(work, session_id)
        except InferenceCenterError as failure:
            ended_s, error = time.monotonic(), str(failure)
        return AbortTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            aborted_s=ended_s if aborted_s is None else aborted_s,
            ended_s=ended_s,
            error=error,
        )

    async def _prepare(self, work: Work) -> tuple[str, str]:
        """Return the session and the text of a turn."""
        known = self._conversations.get(work.history_id) if work.history_id is not None else None
        text = self._prompts.text(work, first=known is None)
        session_id = known or named(await self._line.create_session(stored=self._spec.stored, chat=self._spec.chat))
        if work.history_id is not None:
            self._conversations[work.history_id] = session_id
        return session_id, text

    async def _leave(self, work: Work, session_id: str) -> None:
        """Close the session of a conversation that is over."""
        if work.history_id is None or work.ends_history:
            if work.history_id is not None:
                del self._conversations[work.history_id]
            await self._line.send(op="close_session", session_id=session_id)

    def _params(self, work: Work) -> dict[str, Any]:
        return {**sampling(work, has_form=self._json_schema is not None), "max_tokens": work.max_tokens}


def _why_not_aborted(last: Frame, *, too_late: bool) -> str | None:
    """Return why a turn with this end does not measure the duration of an abort."""
    if last.op == "error":
        return last.message
    if last.finish_reason != "aborted":
        return "the turn ended by itself"
    return "the whole prompt was read before the turn could be aborted" if too_late else None


def _whole(value: float | str | None) -> int | None:
    return int(value) if isinstance(value, int | float) else None
