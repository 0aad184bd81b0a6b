"""The engine as the rest of the daemon sees it: always available, though its process may die at any moment."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.messages import (
    Detokenized,
    ImageData,
    ImageNeeded,
    LoadFailed,
    Loading,
    LogLine,
    LookupFailed,
    Ready,
    ReleaseSession,
    RetainSessions,
    StepOutput,
    Suspended,
    Tokenized,
    TokensCounted,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.supervisor.engine_status import LoadProgress, StatusListeners, log_ready, with_fewer_layers
from inferencecenter.supervisor.lifecycle import (
    EngineDemand,
    IdleTimer,
    RestartBackoff,
    RestartBudget,
    Watchdog,
    call_later,
    call_soon,
)
from inferencecenter.supervisor.poison_turns import CrashLimit
from inferencecenter.supervisor.process import (
    STOP_DEADLINE_S,
    SUSPEND_DEADLINE_S,
    EngineExit,
    EngineLockError,
    LocalLauncher,
    NodeUnreachableError,
    log_line,
)
from inferencecenter.supervisor.request_queue import QueueLengthAlarm, RequestQueue, not_loaded, queue_full, unavailable
from inferencecenter.supervisor.states import ENGINE, EngineChange
from inferencecenter.supervisor.tokenizer_client import TokenizerClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import (
        EngineLimits,
        FromEngine,
        KvRamLimit,
        ModelInfo,
        PromptSegment,
    )
    from inferencecenter.ipc.port import EngineTurn
    from inferencecenter.supervisor.lifecycle import TimerHandle
    from inferencecenter.supervisor.poison_turns import PoisonTurnStore, SuspectedTurns, Suspicion
    from inferencecenter.supervisor.process import Engine, EngineLauncher

_HOLDS_MEMORY: Final = (EngineState.STARTING, EngineState.READY, EngineState.BACKOFF, EngineState.SUSPENDING)
_NOTHING_RUNS: Final = StepOutput(events=(), running=0, waiting=0, rss_bytes=0)

_log = structlog.get_logger(__name__)


class Supervisor:
    """Starts the engine, restarts it when it is lost, and carries turns to it and their events back.

    Implements ``ipc.port.EnginePort`` and ``model_cache.ResidentModel``. ``_change`` is the only writer of the engine's
    state. A model that cannot be loaded at first is not retried: the engine stays ``failed``, with the reason in
    ``load_failure``. Once a model was loaded, every failure is treated as temporary until there are too many: then the
    engine is ``given_up``. In both cases its turns fail, or wait for the next daemon if this one ``ends_with_it``.

    An engine without turns for ``sleep_after_s`` is ended, and the next turn starts another; so is one that is evicted,
    whose turns continue on the next. An engine that slept or was lost and may not be started, because its GPU is gone,
    is ``failed`` too: it is retried with back-off until it is ready, which counts as no restart. Answers that have
    begun wait for that, and for a model that could not be loaded.

    Args:
        options: The options of the first engine, with the settings of the supervisor itself.
        live_sessions: Returns the sessions whose KV a new engine keeps; ``None`` keeps all.
        plan_again: Completes the options of every engine but the first, in a thread, or raises why none may be started
            now; ``None`` leaves them.
        ends_with_it: Returns whether the daemon ends now that the engine is given up or could not be loaded.
        admit: Waits until an engine that sleeps may be started again or is no longer ``wanted``, and returns whether it
            may; raises why a model that was never loaded cannot be.
        on_step: Called with each step of the engine before its events reach the turns.
        pixels: Returns the pixels of an image by its digest, ``None`` if its file is gone.
        crash_limit: Counts deaths of engines by client, and decides whose turns are refused; ``None`` refuses none.
        suspicion_file: Stores the suspected turns for the next daemon; ``None`` stores nothing.
        suspicions: The suspected turns, shared with other replicas of the model; ``None`` for own ones.
        launcher: Starts the engines; children without a lock if ``None``.
        node: The machine on which it does.
        jitter: Returns numbers from 0 to 1.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; most have defaults
        self,
        options: EngineOptions,
        *,
        live_sessions: Callable[[], Collection[str]] | None = None,
        plan_again: Callable[[EngineOptions], EngineOptions] | None = None,
        ends_with_it: Callable[[], bool] = lambda: False,
        admit: Callable[[], Awaitable[bool]] | None = None,
        on_step: Callable[[StepOutput], None] | None = None,
        pixels: Callable[[str], Awaitable[bytes | None]] | None = None,
        crash_limit: CrashLimit | None = None,
        suspicion_file: PoisonTurnStore | None = None,
        suspicions: dict[str, Suspicion] | None = None,
        launcher: EngineLauncher | None = None,
        node: str = LOCAL_NODE,
        jitter: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self.node = node
        self._log = _log if node == LOCAL_NODE else _log.bind(node=node)
        self._backoff = RestartBackoff(
            min_s=options.restart_backoff_min_s, max_s=options.restart_backoff_max_s, random=jitter
        )
        self._budget = RestartBudget(max_restarts=options.max_restarts, window_s=options.restart_window_s)
        self._queue_watch = QueueLengthAlarm(options.queue_warning)
        self._live_sessions = live_sessions
        self._plan_again = plan_again
        self._ends_with_it = ends_with_it
        self._on_step = on_step
        self._pixels = pixels
        self._launcher: EngineLauncher = launcher or LocalLauncher()
        self._suspicion_file = suspicion_file
        self._monotonic = monotonic
        self._tasks = TaskGroup("supervisor")
        self._listeners = StatusListeners()
        self._turns = RequestQueue(
            call_soon=call_soon,
            changed=self._watch,
            crash_limit=crash_limit or CrashLimit(max_deaths=0, window_s=0.0, monotonic=monotonic),
            remember=self._remember_suspects,
            suspicions=suspicions,
        )
        self._tokenizer = TokenizerClient(call_later=call_later)
        self._demand = EngineDemand(has_turns=lambda: len(self._turns) + len(self._tokenizer) > 0, admit=admit)
        self._hang_watch = Watchdog(
            options.hang_timeout_s,
            ticks=lambda: self._process.ticks if self._process else 0,
            on_hang=self._on_hang,
            call_later=call_later,
        )
        self._idle_timer = IdleTimer(
            options.sleep_after_s if options.sleep_after_s > 0 else None,
            on_idle=self._fall_asleep,
            call_later=call_later,
        )
        self._state = EngineState.STOPPED
        self._process: Engine | None = None
        self._model: ModelInfo | None = None
        self._progress = LoadProgress(monotonic=monotonic, log=self._log)
        self._load_failure: InferenceCenterError | None = None
        self._given_up = False
        self._refused = False
        self._revived = False
        self._retry_s = 0.0
        self._load_timer: TimerHandle | None = None
        self._detail = ""
        self._restarts = 0
        self._ready_since: float | None = None
        self._users: set[str] = set()
        self._loads = 0
        self._gauges = _NOTHING_RUNS
        self._is_planned = True
        self._changed_event = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._stop_requested = asyncio.Event()
        self.last_used_s = monotonic()
        self.unreachable = False
        """Whether its machine could not be reached when an engine was last started."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._state.value}, turns={len(self._turns)}, restarts={self._restarts})"

    @property
    def status(self) -> EngineStatus:
        """The engine's status; the model stays known while the engine restarts."""
        return EngineStatus(
            state=self._state,
            node=self.node,
            model=self._model,
            pid=self._process.pid if self._process else None,
            load_fraction=self._progress.fraction,
            detail=self._detail,
            copying=self._progress.copying,
            restarts=self._restarts,
            running=self._gauges.running,
            waiting=self._gauges.waiting + self._turns.n_waiting,
            rss_bytes=self._gauges.rss_bytes,
            parked_sessions=self._gauges.parked_sessions,
            parked_bytes=self._gauges.parked_bytes,
            parked_ram_bytes=self._gauges.parked_ram_bytes,
        )

    @property
    def model(self) -> ModelInfo | None:
        """The model as it was loaded last; see ``EnginePort``."""
        return self._model

    @property
    def name(self) -> str:
        """The model's name."""
        return self._options.model_name

    @property
    def options(self) -> EngineOptions:
        """The options of the last engine, and of the next one unless it is planned anew."""
        return self._options

    @property
    def load_failure(self) -> InferenceCenterError | None:
        """Why the model could not be loaded, when that is final."""
        return self._load_failure

    @property
    def given_up(self) -> bool:
        """Whether the engine was lost so often that it is not started again."""
        return self._given_up

    @property
    def wanted(self) -> bool:
        """Whether there is work for an engine, or a caller has requested one."""
        return bool(self._demand)

    @property
    def has_turns(self) -> bool:
        """Whether there are turns that have not ended, with the engine or waiting for one."""
        return bool(self._turns)

    @property
    def n_turns(self) -> int:
        """How many turns have not ended."""
        return len(self._turns)

    @property
    def slots(self) -> int:
        """How many turns an engine runs at once."""
        return self._model.slots if self._model else self._options.slots

    @property
    def isolates(self) -> bool:
        """Whether a suspected turn runs alone, or is about to, while all others wait."""
        return self._turns.isolates

    @property
    def clients(self) -> frozenset[str]:
        """The clients whose turns have not ended, and those that requested an engine that is not ready."""
        return (self._turns.clients | self._demand.callers) - {""}

    @property
    def users(self) -> frozenset[str]:
        """The clients whose turns the engine has had, or will have when ready; the empty name is an operator's load."""
        if self._state is EngineState.READY:
            return frozenset(self._users)
        return self.clients | ({""} if self._demand.is_urgent else frozenset())

    @property
    def loads(self) -> int:
        """How often an engine got ready."""
        return self._loads

    @property
    def loaded_at_s(self) -> float | None:
        """When the engine got ready, in monotonic seconds; now while it is starting, ``None`` otherwise."""
        if self._state is EngineState.STARTING:
            return self._monotonic()
        return self._ready_since if self._state is EngineState.READY else None

    @property
    def is_urgent(self) -> bool:
        """Whether an operator has requested the engine."""
        return self._demand.is_urgent

    @property
    def holds_memory(self) -> bool:
        """Whether there is an engine, or one is about to be started."""
        return self._state in _HOLDS_MEMORY

    @property
    def busy(self) -> bool:
        """Whether the engine has turns."""
        return self._turns.engine_is_busy

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` when the state changes, and at each tenth of the load progress."""
        self._listeners.add(listener)

    def start(self, *, asleep: bool = False, after_crash: bool = False) -> None:
        """Start the engine, or leave it ``asleep`` until it is needed; call once, from the main thread.

        ``status`` tells when it is ready. Existing turns were left by an earlier daemon, which died with them if this
        is ``after_crash``.
        """
        if self._suspicion_file is not None:
            known = self._suspicion_file.of(self._options.model_name)
            self._turns.resume(known, after_crash=after_crash)
        self._is_planned = not asleep
        if asleep:
            self._change(EngineChange.SLEEP)
        self._keeper = self._tasks.keep_running(self._keep_alive, name="keep-alive", pause=self._pause)

    def inherit(self, model: ModelInfo | None) -> None:
        """Take over a failed supervisor's knowledge of the model; call before ``start``.

        So sessions continue as with an engine that is asleep, and the KV parked for them is kept.
        """
        self._model = model

    def wake(self, caller: str = "", *, urgent: bool = False) -> None:
        """Start an engine that sleeps, for a client or an operator, before there is a turn for it."""
        if self._state is not EngineState.READY:
            self._demand.request(caller, urgent=urgent)

    def revive(self) -> None:
        """Start an engine again that failed for good: an operator has removed the cause."""
        if self._state is EngineState.FAILED and not self._refused:
            self._given_up, self._load_failure = False, None
            self._budget.clear()
            self._revived = True
            self._watch()

    def delay(self, seconds: float) -> None:
        """Notify the waiting turns how long they have to wait at least."""
        self._turns.delay(seconds)

    async def evict(self, *, interrupts: bool = True) -> None:
        """End the engine when its turns have ended, and wait until it is gone; turns that arrive meanwhile wait.

        One that is loading gets ready first, and takes the waiting turns. If it ``interrupts``, turns that are not done
        after ``swap_patience_s`` continue on the next engine; otherwise it waits for them without a limit.
        """
        timeout_s = self._options.swap_patience_s if interrupts else None
        while self.holds_memory:
            if self._state is EngineState.READY:
                await self._drain(timeout_s)
            if self._state is EngineState.READY:
                self._fall_asleep()
            await self._until(partial(self._has_left, self._state))

    async def restart(self) -> None:
        """End the engine as ``evict`` does, and have another one started, which is planned anew.

        An engine that is loading, or about to, is waited for, and not ended.
        """
        if self._state in (EngineState.STARTING, EngineState.BACKOFF):
            await self._until(partial(self._has_left, self._state))
            return
        if self._state is EngineState.READY:
            await self._drain(self._options.swap_patience_s)
        if self._state is EngineState.READY:
            self._fall_asleep()
            self._demand.request()
        if self._state is EngineState.SUSPENDING:
            await self._until(partial(self._has_left, self._state))

    def pause(self, *, paused: bool) -> None:
        """While ``paused``, start no engine for waiting turns; a running one continues."""
        self._demand.pause(paused=paused)

    def recall(self, *, begun: bool = False) -> None:
        """Have the turns that no engine has resubmitted to their models' engines; see ``RequestQueue.recall``."""
        self._turns.recall(begun=begun)
        self._watch()

    def hand_off(self, *, suspects: bool, begun: bool = True) -> tuple[str, ...]:
        """Have the turns that no engine has resubmitted to another replica; see ``RequestQueue.hand_off``."""
        leaving = self._turns.hand_off(suspects=suspects, begun=begun)
        self._watch()
        return leaving

    def is_suspect(self, turn_id: str) -> bool:
        """Return whether a turn has to stay on its replica; see ``PoisonTurnDetector.confines``."""
        return self._turns.is_suspect(turn_id)

    async def retire(self) -> None:
        """Stop permanently once there are no turns and the recalled ones are resubmitted."""
        await self._until(lambda: not self._turns.notifying)
        await self._until(lambda: not self._turns or not self._may_have_engine)
        await self.stop()

    async def finish(self) -> None:
        """Wait until all turns have ended, or there will be no engine that could end them."""
        await self._until(lambda: not self._turns or self.unreachable or not self._may_have_engine)

    @property
    def _may_have_engine(self) -> bool:
        return self._state in (*_HOLDS_MEMORY, EngineState.ASLEEP)

    async def withdraw(self, then: Callable[[], None]) -> None:
        """Stop permanently: the engine gets no more turns, and has ``swap_patience_s`` to end those that it has.

        ``then`` is called when the others were taken back from it, to hand them off.
        """
        if self._state is EngineState.READY:
            await self._drain(self._options.swap_patience_s)
        await self._until(lambda: not self._turns.notifying)
        await self.stop(then=then)

    async def stop(
        self,
        *,
        leave: bool = False,
        then: Callable[[], None] = lambda: None,
        suspend_deadline_s: float = SUSPEND_DEADLINE_S,
        deadline_s: float = STOP_DEADLINE_S,
    ) -> None:
        """End the engine for good; running turns are interrupted and get no further events.

        Args:
            leave: Whether an engine on another machine is left to the next daemon.
            then: Called when the engine's turns were taken back from it.
            suspend_deadline_s: Seconds for writing KV to disk.
            deadline_s: Seconds for the exit after that, before the engine is killed.
        """
        if self._stop_requested.is_set():
            await self._until(lambda: self._state is EngineState.STOPPED)
            return
        self._stop_requested.set()
        self._demand.end()
        was_loaded = self._state in (EngineState.READY, EngineState.SUSPENDING)
        self._change(EngineChange.STOP)
        self._turns.forget_recalled()
        self._turns.lost()
        self._tokenizer.fail(self._unavailable())
        self._watch()
        await self._until(lambda: not self._turns.notifying)
        then()
        if (process := self._process) is not None:
            end = process.leave if leave and was_loaded else process.end
            await end(suspend_deadline_s=suspend_deadline_s if was_loaded else None, deadline_s=deadline_s)
        if self._keeper is not None:
            if self._process is None:
                self._keeper.cancel()  # its launch may wait for another machine
            await asyncio.wait([self._keeper])
        await self._tasks.cancel()
        self._change(EngineChange.ENDED)

    def submit(self, turn: EngineTurn, *, accepted: bool = False) -> int:
        """Submit a turn; see ``EnginePort``. One of another replica is ``accepted`` however many wait.

        Raises:
            InferenceCenterError: ``engine_unavailable``, ``queue_full``, ``prompt_too_long``, ``rate_limited``, or what
                the turn raises.
        """
        self._on_demand()
        position = max(0, len(self._turns) + 1 - self.slots)
        if position > self._options.max_queue and not accepted:
            raise queue_full(self._options.max_queue)
        turn.on_placed(self.node)
        is_submitted = self._turns.add(turn, accepted=accepted)
        self._users.add(turn.client_id)
        self._watch()
        return position if is_submitted else max(1, position)

    def abort(self, turn_id: str) -> None:
        """Request the turn's end."""
        self._turns.abort(turn_id)

    def release(self, session_id: str) -> None:
        """Have the engine drop a session's KV."""
        self.send(ReleaseSession(session_id))

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Request the tokens of a text; see ``EnginePort``."""
        self._on_demand()
        return self._tokenizer.tokenize(pieces, first=first, client_id=client_id)

    def count_tokens(
        self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str
    ) -> asyncio.Future[TokensCounted]:
        """Request the number of tokens of a text; see ``EnginePort``."""
        self._on_demand()
        return self._tokenizer.count_tokens(pieces, first=first, client_id=client_id)

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Request the text of tokens; see ``EnginePort``."""
        self._on_demand()
        return self._tokenizer.detokenize(tokens, client_id=client_id)

    def _remember_suspects(self, suspected: SuspectedTurns) -> None:
        if self._suspicion_file is not None:
            self._suspicion_file.put(self._options.model_name, suspected)

    def _on_demand(self) -> None:
        """Wake an engine that sleeps; raise if there will be none."""
        if self._stop_requested.is_set() or self._state is EngineState.FAILED:
            raise self._unavailable()
        self.last_used_s = self._monotonic()
        self._demand.notify()

    def send(self, message: ReleaseSession | EngineLimits | KvRamLimit) -> None:
        """Send a message if the engine is ready."""
        if self._process is not None and self._state is EngineState.READY:
            self._process.channel.send(message)

    # The engine's life cycle.

    async def _keep_alive(self) -> None:
        """Run one engine after the other until the end; after a fault here the previous engine counts as lost."""
        self._clear_up()
        while not self._stop_requested.is_set():
            if not await self._may_start():
                continue
            self._progress.begin()
            self._change(EngineChange.START)
            if not await self._is_fit_to_start():
                continue
            ended = await self._run_once()
            if self._stop_requested.is_set():
                return
            if self._state is EngineState.SUSPENDING:
                self._idle(ended)
            else:
                self._on_exit(ended)

    def _clear_up(self) -> None:
        ended = EngineExit("its start or its end met an internal error; the daemon's log says which", by_itself=False)
        if self._state is EngineState.SUSPENDING:
            self._idle(ended)
        elif self._state in (EngineState.STARTING, EngineState.READY):
            self._on_exit(ended)

    async def _may_start(self) -> bool:
        """Wait until an engine may be started from the current state; ``False`` to evaluate the state again."""
        match self._state:
            case EngineState.ASLEEP:
                return await self._is_granted()
            case EngineState.FAILED if self._refused:
                await self._pause(self._retry_s)
                return await self._is_granted()
            case EngineState.FAILED:
                await self._until(lambda: self._revived or self._stop_requested.is_set())
                self._revived = False
            case EngineState.BACKOFF:
                await self._pause(self._retry_s)
                self._restarts += not self._stop_requested.is_set()
        return not self._stop_requested.is_set()

    async def _is_granted(self) -> bool:
        """Wait until an engine is wanted and admitted; return ``False`` if it was refused or the supervisor stops."""
        try:
            await self._demand.wait_admitted()
        except InferenceCenterError as refusal:
            self._refuse(refusal)
            return False
        # A border: admission depends on files, devices, and engines that are evicted.
        except Exception:  # noqa: BLE001
            self._log.exception("engine_not_admitted")
            self._refuse(InferenceCenterError(ErrorCode.INTERNAL))
            return False
        self._refused = False
        return not self._stop_requested.is_set()

    async def _is_fit_to_start(self) -> bool:
        """Plan the engine that is about to be started; return ``False`` if it may not be started now."""
        plan_again, is_planned, self._is_planned = self._plan_again, self._is_planned, False
        if plan_again is None or is_planned:
            return True
        try:
            self._options = await asyncio.to_thread(plan_again, self._options)
        except InferenceCenterError as refusal:
            self._budget.give_back()
            self._refuse(refusal)
            return False
        return True

    def _refuse(self, refusal: InferenceCenterError) -> None:
        """Fail the engine that may not be started: for good if the model was never loaded, else until a retry.

        An engine that was lost while loading the model first had been started, so its resources may come back.
        """
        if self._stop_requested.is_set():
            return
        if self._model is None and not self._restarts:
            self._detail = refusal.message
            self._log.error("model_not_loaded", code=refusal.code.value, reason=refusal.message, hint=refusal.hint)
            self._load_failure = refusal
        else:
            self._detail = f"{refusal.message} It is retried until that has changed."
            self._refused = True
            self._demand.request()
            self._back_off("engine_not_woken")
        self._give_up()

    def _back_off(self, event: str) -> None:
        """Choose when the next engine is started, and log the delay."""
        ready_s = 0.0 if self._ready_since is None else self._monotonic() - self._ready_since
        self._ready_since = None
        self._retry_s = self._backoff.after_failure(ready_s=ready_s)
        self._log.warning(event, delay_s=round(self._retry_s, 2), detail=self._detail)

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until the supervisor stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_requested.wait()

    def _idle(self, ended: EngineExit) -> None:
        self._gauges = msgspec.structs.replace(self._gauges, running=0, waiting=0, rss_bytes=0)
        self._log.info("engine_asleep", detail=ended.detail, parked_sessions=self._gauges.parked_sessions)
        self._change(EngineChange.ENDED)

    async def _drain(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                # An engine that got ready just now runs the turns that waited for it; else two models could evict each
                # other for ever without running any.
                await self._until(lambda: not self._turns.handing_over or self._state is not EngineState.READY)
                self._turns.hold()
                await self._until(lambda: not self.busy or self._state is not EngineState.READY)
        except TimeoutError:
            self._turns.hold()
            self._log.info("turns_wait_for_another_model", running=self._gauges.running)

    def _has_left(self, state: EngineState) -> bool:
        return self._state is not state

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed_event.wait()

    async def _run_once(self) -> EngineExit:
        """Run one engine until it is gone."""
        self._ready_since = None
        try:
            process = await self._launcher.launch(
                self._options,
                is_first=self._model is None,
                on_message=self._on_message,
                on_drain=self._turns.schedule_step,
            )
        except NodeUnreachableError as error:
            return EngineExit(f"the engine cannot be started: {error}", by_itself=False, unreachable=True)
        except (OSError, EngineLockError) as error:
            return EngineExit(f"the engine cannot be started: {error}")
        self._process = process
        self._log.info("engine_started", pid=process.pid, backend=self._options.backend)
        if self._stop_requested.is_set():
            process.close()
        self._limit_loading(process)
        try:
            return await process.gone()
        except BaseException:
            process.kill()
            raise
        finally:
            self._limit_loading(None)
            self._process = None

    def _limit_loading(self, process: Engine | None) -> None:
        """Begin the time that loading may take, anew while a file is copied; ``None`` ends it."""
        if self._load_timer is not None:
            self._load_timer.cancel()
        give_up = None if process is None else partial(self._give_up_loading, process)
        self._load_timer = None if give_up is None else call_later(self._options.load_timeout_s, give_up)

    def _give_up_loading(self, process: Engine) -> None:
        if self._state is EngineState.STARTING:
            process.kill(because=f"loading took longer than {self._options.load_timeout_s:g} s")

    def _on_exit(self, ended: EngineExit) -> None:
        """Handle an engine's exit: choose whether and when to start another."""
        was_loading = self._state is EngineState.STARTING
        self._detail = self._load_failure.message if self._load_failure else ended.detail
        self._gauges = _NOTHING_RUNS
        self.unreachable = was_loading and ended.unreachable
        self._tokenizer.lost()
        if self._turns.lost(ended):
            self._budget.clear()
        if self._load_failure is not None:
            self._give_up()
            return
        if was_loading and ended.by_itself and self._progress.may_lack_gpu_memory(self._options):
            self._options = with_fewer_layers(self._options, self._model, log=self._log)
        else:
            # A machine that cannot be reached is tried for ever: its engine has done nothing wrong.
            self._given_up = not ended.unreachable and not self._budget.take(now=self._monotonic())
        if self._given_up:
            self._log.error("engine_given_up", restarts=self._restarts, detail=ended.detail)
            self._give_up()
            return
        self._back_off("engine_restarts")
        self._change(EngineChange.LOST)

    def _give_up(self) -> None:
        """Accept no more turns; waiting ones fail, unless the next daemon continues them.

        A model that could not be loaded, or may not be started now, may be later: answers that have begun wait for it.
        """
        if self._state is not EngineState.FAILED:
            self._change(EngineChange.GIVE_UP)
        self._tokenizer.fail(self._unavailable())
        if not self._ends_with_it():
            self._turns.fail(self._unavailable(), begun=self._given_up)

    def _unavailable(self) -> InferenceCenterError:
        if not self._refused:
            return unavailable(self.status, given_up=self._given_up)
        return unavailable(self.status, given_up=False, retry_after_ms=round(1000 * self._retry_s))

    def _fall_asleep(self) -> None:
        assert self._process is not None, "it was idle until now"
        self._turns.lost()
        self._tokenizer.lost()
        self._change(EngineChange.SLEEP)
        self._tasks.spawn(_suspend(self._process), name="fall-asleep")

    # Messages of the engine.

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                self._step(message)
            case LogLine():
                log_line(message, log=self._log)
            case Loading():
                self._loading(message)
            case Ready(model=model) if self._state is EngineState.STARTING:
                self._ready(model)
            case LoadFailed():
                self._load_failed(message)
            case Tokenized() | TokensCounted() | Detokenized() | LookupFailed():
                self._tokenizer.on_answer(message)
            case ImageNeeded(digest=digest) if self._process is not None:
                self._tasks.spawn(self._send_pixels(self._process, digest), name="pixels")
            case Suspended() if self._process is not None:
                self._process.suspended(message)

    async def _send_pixels(self, process: Engine, digest: str) -> None:
        """Answer an engine that needs an image; the turns that wait for one that is gone fail."""
        pixels = None if self._pixels is None else await self._pixels(digest)
        process.channel.send(ImageData(digest, pixels))

    def _step(self, message: StepOutput) -> None:
        self._gauges = message
        if self._on_step is not None:
            self._on_step(message)
        if self._queue_watch.should_warn(message.waiting):
            self._log.warning("queue_long", waiting=message.waiting, running=message.running)
        for event in message.events:
            self._turns.on_engine_event(event)

    def _loading(self, message: Loading) -> None:
        if message.copying and self._process is not None:
            self._limit_loading(self._process)
        if self._progress.advance(message):
            self._listeners.notify(self.status)

    def _ready(self, model: ModelInfo) -> None:
        assert self._process is not None, "it has just spoken"
        self._model, self._progress.fraction, self._detail = model, 1.0, ""
        self._ready_since = self._monotonic()
        self.unreachable = False
        self._users = set(self.users)
        self._loads += 1
        self._demand.fulfill()
        log_ready(model, log=self._log)
        self._change(EngineChange.LOADED)
        if self._live_sessions is not None:
            self._process.channel.send(RetainSessions(tuple(self._live_sessions())))
        self._turns.connect(self._process.channel)
        self._tokenizer.connect(self._process.channel.send)
        self._watch()

    def _load_failed(self, message: LoadFailed) -> None:
        self._progress.refuse(message)
        if self._model is None and not self._progress.may_lack_gpu_memory(self._options):
            self._load_failure = not_loaded(message)

    def _watch(self) -> None:
        self._changed_event.set()
        self._changed_event.clear()
        self._hang_watch.keep(watching=self._turns.engine_is_busy)
        self._idle_timer.keep(idle=not self._turns and self._state is EngineState.READY)

    def _on_hang(self) -> None:
        if self._process is not None:
            self._log.error("engine_hangs", pid=self._process.pid, no_progress_s=self._options.hang_timeout_s)
            self._process.kill(because=f"the engine made no progress for {self._options.hang_timeout_s:g} s")

    def _change(self, change: EngineChange) -> None:
        self._state = ENGINE.next(self._state, change)
        self._log.debug("engine_state", state=self._state.value, change=change.value)
        self._watch()
        self._listeners.notify(self.status)


async def _suspend(process: Engine) -> None:
    """End an engine that keeps its KV; if that fails, kill it."""
    try:
        await process.end(park_all=True)
    except BaseException:
        process.kill()
        raise
