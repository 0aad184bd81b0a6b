"""The engine as the rest of the daemon sees it: always there to be asked, though its process may die at any moment."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FrameError
from inferencecenter.ipc.messages import (
    Abort,
    Failed,
    Finished,
    LoadFailed,
    Loading,
    Log,
    Overflowed,
    Ready,
    Release,
    Step,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor.backoff import Backoff, RestartPolicy
from inferencecenter.supervisor.orphan import OrphanError, engine_lock, record_holder
from inferencecenter.supervisor.process import EngineProcess
from inferencecenter.supervisor.queue_watch import QueueWatch
from inferencecenter.supervisor.states import ENGINE, EngineChange
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.ipc.messages import EngineOptions, FromEngine, ModelInfo, Submit, TurnEvent

STOP_DEADLINE_S: Final = 3.0
_SHOWN_LOADING_STEPS: Final = 10
_LOADING_LOGGED_EVERY_S: Final = 1.0

_log = structlog.get_logger(__name__)


class Supervisor:
    """Starts the engine, starts it again when it is lost, and carries turns to it and their events back.

    Implements ``ipc.port.EnginePort``. ``_change`` is the only writer of the engine's state. A model that cannot be
    loaded at first is not tried again: the engine stays ``failed`` and ``load_failure`` says why. Once a model was
    loaded, every failure is taken to pass.

    Args:
        options: What each engine is told at its start.
        policy: Bounds of the wait before a restart.
        max_queue: Turns that may wait for a slot.
        queue_warning: Turns that wait when a warning is logged; 0 logs none.
        load_timeout_s: An engine that is not ready by then is killed and started again.
        lock_path: File by which the engine of a daemon that died is noticed; none to do without.
        jitter: Numbers from 0 to 1.
        monotonic: Seconds that only rise.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; the last five have defaults
        self,
        options: EngineOptions,
        *,
        policy: RestartPolicy,
        max_queue: int,
        queue_warning: int = 0,
        load_timeout_s: float = 1800.0,
        lock_path: Path | None = None,
        jitter: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._backoff = Backoff(policy, random=jitter)
        self._max_queue = max_queue
        self._queue_watch = QueueWatch(queue_warning)
        self._load_timeout_s = load_timeout_s
        self._lock_path = lock_path
        self._monotonic = monotonic
        self._tasks = TaskGroup("supervisor")
        self._listeners: list[Callable[[EngineStatus], None]] = []
        self._turns: dict[str, Callable[[TurnEvent], None]] = {}
        self._state = EngineState.STOPPED
        self._process: EngineProcess | None = None
        self._model: ModelInfo | None = None
        self._load_fraction = 0.0
        self._load_logged_at = 0.0
        self._loads_too_long = False
        self._load_failure: InferenceCenterError | None = None
        self._detail = ""
        self._starts = 0
        self._ready_since: float | None = None
        self._gauges = Step(events=(), running=0, waiting=0, rss_bytes=0)
        self._keeper: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._state.value}, turns={len(self._turns)}, starts={self._starts})"

    @property
    def status(self) -> EngineStatus:
        """The engine's state now; the model stays known while the engine restarts."""
        return EngineStatus(
            state=self._state,
            model=self._model,
            pid=self._process.pid if self._process else None,
            load_fraction=self._load_fraction,
            detail=self._detail,
            restarts=max(0, self._starts - 1),
            running=self._gauges.running,
            waiting=self._gauges.waiting,
            rss_bytes=self._gauges.rss_bytes,
            parked_sessions=self._gauges.parked_sessions,
            parked_bytes=self._gauges.parked_bytes,
        )

    @property
    def load_failure(self) -> InferenceCenterError | None:
        """Why the model could not be loaded, when that is final."""
        return self._load_failure

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` when the state changes, and at each tenth of the loading."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Start the engine; to be called once, from the main thread. It is ready when ``status`` says so."""
        self._keeper = self._tasks.spawn(self._keep_alive(), name="keep-alive")

    async def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the engine for good: ask it, and kill it after ``deadline_s``. Turns that still run end as failed."""
        if self._stop_asked.is_set():
            return
        self._stop_asked.set()
        self._change(EngineChange.STOP)
        self._fail_turns(ErrorCode.ENGINE_UNAVAILABLE, "the daemon is stopping")
        if self._process is not None:
            await self._process.end(deadline_s=deadline_s)
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        self._change(EngineChange.ENDED)

    def submit(self, turn: Submit, listener: Callable[[TurnEvent], None]) -> int:
        """Hand over a turn; see ``EnginePort``.

        Raises:
            InferenceCenterError: ``model_loading``, ``engine_unavailable``, ``queue_full`` or ``prompt_too_long``.
        """
        if self._state is not EngineState.READY or self._process is None or self._model is None:
            raise self._unavailable()
        position = max(0, len(self._turns) + 1 - self._model.slots)
        if position > self._max_queue:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL, f"{self._max_queue} turns are waiting already", retry_after_ms=1000
            )
        try:
            self._process.send(turn)
        except FrameError as error:
            raise InferenceCenterError(ErrorCode.PROMPT_TOO_LONG, str(error)) from error
        self._turns[turn.turn_id] = listener
        return position

    def abort(self, turn_id: str) -> None:
        """Ask for the turn's end."""
        if self._process is not None and turn_id in self._turns:
            self._process.send(Abort(turn_id))

    def release(self, session_id: str) -> None:
        """Let the engine forget a session's KV."""
        if self._process is not None and self._state is EngineState.READY:
            self._process.send(Release(session_id))

    # One engine after the other.

    async def _keep_alive(self) -> None:
        while not self._stop_asked.is_set():
            self._starts += 1
            self._load_fraction = 0.0
            self._change(EngineChange.START)
            detail = await self._live()
            if self._stop_asked.is_set() or not self._lose(detail):
                return
            delay_s = self._backoff.after_failure(ready_s=self._ready_s())
            self._change(EngineChange.WAIT)
            _log.warning("engine_restarts", delay_s=round(delay_s, 2), detail=detail)
            try:
                async with asyncio.timeout(delay_s):
                    await self._stop_asked.wait()
            except TimeoutError:
                continue

    async def _live(self) -> str:
        """Run one engine until it is gone; return how it ended."""
        self._ready_since = None
        self._loads_too_long = False
        try:
            process = self._process = await self._spawn()
        except (OSError, OrphanError) as error:
            return f"the engine cannot be started: {error}"
        _log.info("engine_started", pid=process.pid, backend=self._options.backend)
        if self._stop_asked.is_set():
            process.close()
        patience = asyncio.get_running_loop().call_later(self._load_timeout_s, self._give_up_loading, process)
        try:
            ended = await process.gone()
        finally:
            patience.cancel()
            self._process = None
        return f"loading took longer than {self._load_timeout_s:g} s" if self._loads_too_long else ended

    def _give_up_loading(self, process: EngineProcess) -> None:
        if self._state is EngineState.STARTING:
            self._loads_too_long = True
            process.kill()

    async def _spawn(self) -> EngineProcess:
        # What another daemon's engine parked belongs to sessions that nobody knows any more; one that got ready here
        # has deleted it, so that what is there now was parked for sessions that are still open.
        options = msgspec.structs.replace(self._options, kv_adopt=self._model is not None)
        if self._lock_path is None:
            return await EngineProcess.spawn(options, on_message=self._on_message)
        async with engine_lock(self._lock_path) as fd:
            process = await EngineProcess.spawn(options, on_message=self._on_message, keep_open=(fd,))
            record_holder(fd, process.pid)
            return process

    def _lose(self, detail: str) -> bool:
        """Take note that the engine is gone; tell whether to start another."""
        if self._load_failure is not None:
            detail = self._load_failure.message
        self._detail = detail
        self._gauges = Step(events=(), running=0, waiting=0, rss_bytes=0)
        self._change(EngineChange.LOST)
        self._fail_turns(ErrorCode.ENGINE_CRASHED, detail)
        return self._load_failure is None

    def _ready_s(self) -> float:
        return 0.0 if self._ready_since is None else self._monotonic() - self._ready_since

    # What it says.

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Step():
                self._gauges = message
                if self._queue_watch.warns(message.waiting):
                    _log.warning("queue_long", waiting=message.waiting, running=message.running)
                for event in message.events:
                    self._dispatch(event)
            case Log():
                _engine_log(message)
            case Loading():
                self._loading(message.fraction)
            case Ready(model=model) if self._state is EngineState.STARTING:
                self._model, self._load_fraction, self._detail = model, 1.0, ""
                self._ready_since = self._monotonic()
                _log.info(
                    "engine_ready",
                    model=model.name,
                    slots=model.slots,
                    n_ctx=model.n_ctx,
                    gpu_layers=model.n_gpu_layers,
                    threads=model.n_threads,
                )
                self._change(EngineChange.LOADED)
            case LoadFailed():
                self._load_failed(message)

    def _dispatch(self, event: TurnEvent) -> None:
        terminal = isinstance(event, Finished | Failed | Overflowed)
        listener = self._turns.pop(event.turn_id, None) if terminal else self._turns.get(event.turn_id)
        if listener is None:
            return
        try:
            listener(event)
        # The border between the turns: a fault in what one of them does with an event must not reach the others.
        except Exception:  # noqa: BLE001
            _log.exception("turn_listener_failed", turn=event.turn_id)

    def _loading(self, fraction: float) -> None:
        before, self._load_fraction = self._load_fraction, fraction
        if int(before * _SHOWN_LOADING_STEPS) != int(fraction * _SHOWN_LOADING_STEPS):
            now = self._monotonic()
            if now - self._load_logged_at >= _LOADING_LOGGED_EVERY_S:
                self._load_logged_at = now
                _log.info("model_loading", percent=round(fraction * 100))
            self._tell()

    def _load_failed(self, message: LoadFailed) -> None:
        _log.error("model_not_loaded", code=message.code, reason=message.message, hint=message.hint)
        if self._model is None:
            code = ErrorCode(message.code) if message.code in ERRORS else ErrorCode.INTERNAL
            self._load_failure = InferenceCenterError(code, message.message, hint=message.hint or None)

    # What is told.

    def _fail_turns(self, code: ErrorCode, detail: str) -> None:
        for turn_id in list(self._turns):
            self._dispatch(
                Failed(
                    turn_id=turn_id,
                    code=code.value,
                    message=f"{ERRORS[code].message} ({detail})",
                    hint="Send it again: the session's history is as it was before.",
                )
            )

    def _change(self, change: EngineChange) -> None:
        self._state = ENGINE.after(self._state, change)
        _log.debug("engine_state", state=self._state.value, change=change.value)
        self._tell()

    def _tell(self) -> None:
        status = self.status
        for listener in self._listeners:
            listener(status)

    def _unavailable(self) -> InferenceCenterError:
        if self._state is EngineState.STARTING:
            return InferenceCenterError(
                ErrorCode.MODEL_LOADING, f"the model is loading: {self._load_fraction:.0%}", retry_after_ms=1000
            )
        return InferenceCenterError(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"the engine is {self._state.value}{': ' if self._detail else ''}{self._detail}",
            retry_after_ms=1000,
        )


_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _engine_log(message: Log) -> None:
    """Write a line of the engine's log, with the name of what wrote it."""
    _log.log(_LEVELS.get(message.level, logging.INFO), message.event, logger=message.source)
