"""One client of a soak: a connection that is lost and replaced, and a session that outlives it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from benchmarks.observed_turn import ObservedTurn
from benchmarks.peers.line import Frame, Line, named, open_line, succeeded
from benchmarks.soak.actions import TURNS, Action, Kind
from benchmarks.soak.tally import ENDINGS
from benchmarks.target import Work
from benchmarks.turns import last_answer
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import START

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.prompts import Prompts
    from benchmarks.soak.tally import Tally
    from benchmarks.target import TargetSpec

ACT_LIMIT_S: Final = 120.0
"""An action that takes longer counts as an error."""
_FULL: Final = 0.5
"""The share of its context at which a session is replaced by a new one."""


class SoakClient:
    """Performs its actions and counts the results; an error costs it its session, and it continues."""

    def __init__(self, spec: TargetSpec, prompts: Prompts, tally: Tally, *, n_ctx: int, first_seed: int) -> None:
        self._spec = spec
        self._prompts = prompts
        self._tally = tally
        self._n_ctx = n_ctx
        self._seed = first_seed
        self._open = AsyncExitStack()
        self._line: Line | None = None
        self._session_id = ""
        self._epoch = ""
        self._seq = 0
        self._turns: list[str] = []
        self._n_tokens = 0
        self._aborts: set[str] = set()

    async def run(self, actions: Iterator[Action], *, until_s: float) -> None:
        """Run one action after the other until ``until_s`` of ``time.monotonic``, then close the session.

        Raises:
            InferenceCenterError: The daemon cannot be reached any more.
        """
        async with self._open:
            await self._renew()
            while time.monotonic() < until_s:
                await self._one(next(actions))
            await self._open_line.request(op="close_session", session_id=self._session_id)

    async def _one(self, action: Action) -> None:
        self._tally.actions[action.kind] += 1
        try:
            async with asyncio.timeout(ACT_LIMIT_S):
                await self._do(action)
        except TimeoutError:
            self._tally.error(action.kind, "timeout")
        except InferenceCenterError as error:
            self._tally.error(action.kind, error.code.value)
        else:
            return
        await self._renew()

    async def _do(self, action: Action) -> None:
        if action.kind in TURNS:
            await self._turn(action)
            if self._n_tokens > self._n_ctx * _FULL:
                await self._leave()
        elif action.kind is Kind.FORK:
            await self._fork(action)
        elif action.kind is Kind.REWIND:
            await self._rewind(action)
        else:
            await self._leave()

    # Turns.

    async def _turn(self, action: Action) -> None:
        self._seed += 1
        text = self._prompts.text(Work(action.prompt_tokens, action.max_tokens, self._seed), first=not self._turns)
        shown = ObservedTurn(time.monotonic())
        shown.begin_at(self._seq)
        params = {"max_tokens": action.max_tokens, "seed": self._seed, "ignore_eos": True}
        request_id = await self._open_line.send(op="infer", session_id=self._session_id, prompt=text, params=params)
        turn_id, is_due = "", action.kind is not Kind.TALK
        while not shown.finishes:
            frame = await self._open_line.receive()
            if not self._is_of(frame, request_id):
                continue
            turn_id = frame.turn_id or turn_id
            shown.take(frame, now_s=time.monotonic())
            if is_due and len(shown.times_s) >= action.after_pieces:
                is_due = False
                await self._disturb(action, shown)

        def late(frame: Frame) -> None:
            if self._is_of(frame, request_id):
                shown.take(frame, now_s=time.monotonic())

        transcript = await last_answer(self._open_line, self._session_id, on_other=late)
        self._tally.turn(action.kind, shown, transcript=transcript)
        if shown.finishes[0] not in ENDINGS | {"aborted"}:
            return await self._renew()
        self._seq = shown.seq
        self._turns.append(turn_id)
        self._n_tokens = shown.usage.prompt_tokens + shown.usage.completion_tokens if shown.usage else self._n_ctx

    def _is_of(self, frame: Frame, request_id: str) -> bool:
        """Return whether a frame is an event of the turn of ``request_id``; an error of another request may be raised.

        Raises:
            InferenceCenterError: With the daemon's code when it refused the turn.
        """
        if frame.op == "error" and frame.id in self._aborts:
            self._tally.error(Kind.ABORT, frame.code)
            return False
        if frame.op == "error" and frame.turn_id is None:
            succeeded(frame, "queued")
        return frame.id == request_id or (frame.session_id == self._session_id and frame.turn_id is not None)

    async def _disturb(self, action: Action, shown: ObservedTurn) -> None:
        if action.kind is Kind.ABORT:
            self._aborts.add(await self._open_line.send(op="abort", session_id=self._session_id))
            return
        if action.kind is Kind.DROP:
            self._open_line.drop()
        await asyncio.sleep(action.pause_s)
        if action.kind is Kind.DROP:
            await self._connect()
            await self._resume(shown)

    async def _resume(self, shown: ObservedTurn) -> None:
        """Resume the session in the middle of a turn.

        Raises:
            InferenceCenterError: With the daemon's code when it refuses, ``internal`` when events were lost.
        """
        answer = await self._open_line.request(
            op="resume_session", session_id=self._session_id, epoch=self._epoch, last_seq=shown.seq
        )
        back = succeeded(answer, "session_resumed")
        if not back.resumed:
            raise InferenceCenterError(ErrorCode.INTERNAL, f"not resumed: {back.reason}")
        self._tally.resumed += 1

    # Sessions.

    async def _fork(self, action: Action) -> None:
        """Continue in a fork of the session, and close the session itself."""
        turn = self._chosen(action)
        forked = succeeded(
            await self._open_line.request(op="fork_session", session_id=self._session_id, turn=turn), "session_created"
        )
        await self._open_line.request(op="close_session", session_id=self._session_id)
        self._adopt(forked)
        self._cut(turn)

    async def _rewind(self, action: Action) -> None:
        turn = self._chosen(action)
        rewound = succeeded(
            await self._open_line.request(op="rewind_session", session_id=self._session_id, turn=turn),
            "session_rewound",
        )
        self._seq = rewound.seq or self._seq
        self._cut(turn)

    def _chosen(self, action: Action) -> str:
        places = [START, *self._turns]
        return places[min(int(action.choice * len(places)), len(places) - 1)]

    def _cut(self, turn: str) -> None:
        self._turns = [] if turn == START else self._turns[: self._turns.index(turn) + 1]

    async def _leave(self) -> None:
        succeeded(await self._open_line.request(op="close_session", session_id=self._session_id), "session_closed")
        await self._begin()

    async def _renew(self) -> None:
        """Begin again with a new connection and a new session."""
        await self._connect()
        await self._begin()

    async def _begin(self) -> None:
        self._adopt(await self._open_line.create_session(stored=True))
        self._turns, self._n_tokens = [], 0

    def _adopt(self, created: Frame) -> None:
        self._session_id, self._epoch, self._seq = named(created), created.epoch or "", 0

    async def _connect(self) -> None:
        await self._open.aclose()
        self._aborts.clear()
        self._line = await self._open.enter_async_context(open_line(self._spec))

    @property
    def _open_line(self) -> Line:
        assert self._line is not None, "connected first"
        return self._line
