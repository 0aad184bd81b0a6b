"""The unfinished turns, and which of them the engine has.

A new engine may find a thousand waiting turns. Each is rendered before it is sent, which does not delay those behind
it, and may be megabytes long. So one turn is sent per iteration of the event loop, which leaves time for all other
work, and only while the unread bytes are within the channel's window; sending continues when the channel has drained. A
turn that cannot be submitted fails in an iteration of its own, so that any number of failures is no recursion.

The turns of an engine that is lost or given up are notified the same way: one per iteration, in their order, all before
the next engine gets any; so are turns that are recalled or delayed. What becomes of each is decided at once. A turn
that is to end or is recalled is removed at once, so that nothing else can end it; one that is only interrupted may be
aborted or recalled before it is notified.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import structs

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    AbortTurn,
    Cancelled,
    ContextFull,
    EmbeddingDone,
    Failed,
    Finished,
    TokenDelta,
)
from inferencecenter.supervisor.poison_turns import PoisonTurnDetector, SuspectedTurns
from inferencecenter.supervisor.process import EngineExit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferencecenter.ipc.messages import LoadFailed, TurnEvent
    from inferencecenter.ipc.port import EngineStatus, EngineTurn
    from inferencecenter.supervisor.poison_turns import CrashLimit, Suspicion
    from inferencecenter.supervisor.process import EngineLink

_RETRY_MS: Final = 1000
_GIVEN_UP: Final = (
    "It was lost too often and is not started again; the daemon's log says why. Once the cause is fixed, SIGHUP to the "
    "daemon, inferencecenter model load or a restart of the daemon starts it again."
)
_BY_ITSELF: Final = ("stop", "length")
_LAST: Final = (Finished, EmbeddingDone, Failed, ContextFull, Cancelled)
_log = structlog.get_logger(__name__)


def unavailable(engine: EngineStatus, *, given_up: bool, retry_after_ms: int = _RETRY_MS) -> InferenceCenterError:
    """Return why an engine in this state accepts no turns; one that is ``given_up`` will not until it is revived."""
    return InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the engine is {engine.state.value}{': ' if engine.detail else ''}{engine.detail}",
        hint=_GIVEN_UP if given_up else None,
        retry_after_ms=None if given_up else retry_after_ms,
    )


def queue_full(max_queue: int) -> InferenceCenterError:
    """Return why a turn is refused when ``max_queue`` turns wait already."""
    return InferenceCenterError(ErrorCode.QUEUE_FULL, f"{max_queue} turns are waiting already", retry_after_ms=1000)


def not_loaded(message: LoadFailed) -> InferenceCenterError:
    """Return why a model cannot be loaded, as the engine reported it."""
    code = ErrorCode(message.code) if message.code in ERRORS else ErrorCode.INTERNAL
    return InferenceCenterError(code, message.message, hint=message.hint or None)


class QueueLengthAlarm:
    """Warns once that the queue is long, and again only after it has been half as long.

    Args:
        threshold: Waiting turns that make a queue long; 0 disables the warning.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._warned = False

    def should_warn(self, waiting: int) -> bool:
        """Return whether to warn, now that ``waiting`` turns wait."""
        if not self._threshold:
            return False
        if waiting * 2 < self._threshold:
            self._warned = False
        if self._warned or waiting < self._threshold:
            return False
        self._warned = True
        return True


class RequestQueue:
    """Keeps turns in the order of their submission and gives them to one engine after the other.

    A turn is kept until its last event, without its output: the session keeps that, and computes what is left to
    generate each time the turn is submitted. While a suspect is isolated, all others wait here. A turn that the engine
    runs when another is isolated *drains*: it is aborted in the engine without an event to its session, and further
    events of it are dropped, to be generated again.

    Args:
        call_soon: Schedules a call in the next iteration of the event loop.
        changed: Called when the engine was given a waiting turn, when none is left to give, and when a turn has ended.
        crash_limit: Counts deaths of engines by client.
        remember: Called when the suspicions change, or another turn is isolated.
        suspicions: Shared with the queues of other replicas; ``None`` for own ones.
    """

    def __init__(
        self,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        changed: Callable[[], None],
        crash_limit: CrashLimit,
        remember: Callable[[SuspectedTurns], None],
        suspicions: dict[str, Suspicion] | None = None,
    ) -> None:
        self._call_soon = call_soon
        self._changed = changed
        self._crash_limit = crash_limit
        self._remember = remember
        self._remembered = SuspectedTurns()
        self._isolated_run: str | None = None
        self._turns: dict[str, EngineTurn] = {}
        # Turns that no engine has, in the order of their submission.
        self._waiting: dict[str, None] = {}
        # Turns that are older than the engine: it may not refuse them for lack of room.
        self._accepted: set[str] = set()
        # Waiting turns whose prompts are being rendered.
        self._preparing: set[str] = set()
        self._in_flight: set[str] = set()
        self._aborted: set[str] = set()
        self._draining: set[str] = set()
        self._detector = PoisonTurnDetector(suspicions)
        self._held = False
        self._engine: EngineLink | None = None
        self._step_scheduled = False
        # The calls by which turns are notified of their last event or of the loss of their engine.
        self._to_notify: OrderedDict[str, Callable[[], None]] = OrderedDict()
        # Turns that were recalled and are not resubmitted yet.
        self._recalled: OrderedDict[str, EngineTurn] = OrderedDict()
        # Waiting turns to be notified of a delay in seconds.
        self._delays: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._turns)}, in_flight={len(self._in_flight)}, {self._detector!r})"

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def n_waiting(self) -> int:
        """How many turns no engine has."""
        return len(self._waiting)

    @property
    def handing_over(self) -> bool:
        """Whether waiting turns are about to be sent to the engine, some perhaps after being rendered."""
        return self._step_scheduled or bool(self._preparing and self._engine is not None and not self._held)

    @property
    def notifying(self) -> bool:
        """Whether turns have yet to be notified of their end or interruption, or to be resubmitted."""
        return bool(self._to_notify or self._recalled)

    @property
    def clients(self) -> frozenset[str]:
        """The clients whose turns have not ended."""
        return frozenset(turn.client_id for turn in self._turns.values())

    @property
    def engine_is_busy(self) -> bool:
        return bool(self._in_flight or self._draining)

    @property
    def isolates(self) -> bool:
        """Whether a suspect runs alone, or is about to, while all others wait."""
        return self._detector.isolated is not None

    def is_suspect(self, turn_id: str) -> bool:
        """Return whether a turn has to stay on its replica."""
        return self._detector.confines(turn_id)

    def add(self, turn: EngineTurn, *, accepted: bool = False) -> bool:
        """Keep a turn and give it to the engine if possible; return whether it waits for no engine.

        One that is ``accepted`` comes from another replica: the engine may not refuse it for lack of room.

        Raises:
            InferenceCenterError: ``prompt_too_long``; ``rate_limited`` for a turn that has not begun, of a client whose
                turns have crashed too many engines; or what the turn raises. The turn is not kept then.
        """
        if not turn.n_tokens:
            self._crash_limit.check(turn.client_id)
        if accepted:
            self._accepted.add(turn.turn_id)
        if self._detector.suspicions and self._detector.join(turn.turn_id):
            self._note_suspects()
            self.schedule_step()
        may_run = self._engine is not None and self._engine.has_room and self._may_run(turn.turn_id)
        try:
            if may_run and self._give(turn):
                return True
        except BaseException:
            self._accepted.discard(turn.turn_id)
            raise
        self._turns[turn.turn_id] = turn
        self._waiting[turn.turn_id] = None
        return may_run

    def resume(self, known: SuspectedTurns, *, after_crash: bool) -> None:
        """Restore suspicions of turns that an earlier daemon left; ``after_crash`` it died with them."""
        n_tokens = {turn_id: turn.n_tokens for turn_id, turn in self._turns.items()}
        for turn_id, times in known.times.items():
            named_at = known.n_tokens.get(turn_id, 0)
            if turn_id in n_tokens and not (after_crash and n_tokens[turn_id] > named_at):
                self._detector.restore(turn_id, times=times, n_tokens=named_at)
        if after_crash:
            named = {known.alone: n_tokens[known.alone]} if known.alone in self._detector.times else n_tokens
            if (quarantined := self._detector.lost(named, from_outside=True)) is not None:
                self._end(_quarantined(quarantined, EngineExit("the daemon died with it")))
            elif self._detector.isolated is not None:
                _log.warning("turns_suspected", turns=list(named), on_trial=self._detector.isolated)
        self._note_suspects()

    def connect(self, engine: EngineLink) -> None:
        """Give the turns to a new engine, one after the other."""
        self._engine, self._held = engine, False
        self._delays.clear()
        self._accepted = set(self._turns)
        self.schedule_step()

    def hold(self) -> None:
        """Give the engine no more turns; it keeps those that it has."""
        self._held = True

    def recall(self, *, begun: bool) -> None:
        """Remove the turns that no engine has, those with tokens only if ``begun``; they are resubmitted elsewhere.

        An abort until then ends a turn as any other that waits.
        """
        for turn in [self._turns[turn_id] for turn_id in self._waiting]:
            if begun or not turn.n_tokens:
                self._recall(turn)
                self._detector.forget(turn.turn_id)
        self._note_suspects()
        self.schedule_step()

    def hand_off(self, *, suspects: bool, begun: bool = True) -> tuple[str, ...]:
        """Recall the turns that no engine has, with the suspicions against them, for another replica of the model.

        Those that may have crashed an engine stay unless all ``suspects`` have to leave, and those with tokens unless
        the ones that have ``begun`` leave too.

        Returns:
            The turns that leave.
        """
        leaving = [
            turn_id
            for turn_id in self._waiting
            if (suspects or not self._detector.confines(turn_id)) and (begun or not self._turns[turn_id].n_tokens)
        ]
        for turn_id in leaving:
            self._recall(self._turns[turn_id])
            self._detector.leave(turn_id)
        self._note_suspects()
        self.schedule_step()
        return tuple(leaving)

    def _recall(self, turn: EngineTurn) -> None:
        is_interrupted = self._to_notify.pop(turn.turn_id, None) is not None
        self._recalled[turn.turn_id] = self._remove(turn.turn_id)
        if is_interrupted:
            self._to_notify[turn.turn_id] = turn.on_engine_lost

    def forget_recalled(self) -> None:
        """Leave the turns that are not resubmitted yet to the next daemon."""
        self._recalled.clear()

    def delay(self, seconds: float) -> None:
        """Notify the waiting turns how long they have to wait at least."""
        self._delays.update(dict.fromkeys(self._waiting, seconds))
        self.schedule_step()

    def on_engine_event(self, event: TurnEvent) -> None:
        """Pass an event of the engine to its turn."""
        turn_id, is_last = event.turn_id, isinstance(event, _LAST)
        if turn_id in self._draining:
            if is_last:
                self._draining.discard(turn_id)
                self.schedule_step()
                self._changed()
            return
        if turn_id not in self._in_flight:
            return
        if is_last:
            if isinstance(event, EmbeddingDone) or (isinstance(event, Finished) and event.reason in _BY_ITSELF):
                self._crash_limit.cleared(turn_id)
            self._end(event)
            return
        turn = self._turns[turn_id]
        try:
            turn.on_engine_event(event)
        # The same border as in ``_notify``.
        except Exception:  # noqa: BLE001
            _log.exception("turn_listener_failed", turn=turn_id)
        if (
            isinstance(event, TokenDelta)
            and self._detector.suspicions
            and self._detector.clears(turn_id, turn.n_tokens)
        ):
            _log.info("turn_cleared", turn=turn_id)
            self._crash_limit.cleared(turn_id)
            self._note_suspects()
            self.schedule_step()

    def abort(self, turn_id: str) -> None:
        """End a turn: by the engine if that has it, else at once."""
        if turn_id in self._in_flight and self._engine is not None:
            self._aborted.add(turn_id)
            self._engine.send(AbortTurn(turn_id))
        elif (turn := self._recalled.pop(turn_id, None)) is not None:
            self._to_notify.pop(turn_id, None)
            _notify(turn_id, partial(turn.on_engine_event, Cancelled(turn_id)))
        else:
            self._end(Cancelled(turn_id))

    def lost(self, ended: EngineExit | None = None) -> bool:
        """Take all turns back from an engine that has ended or is being ended; they are notified while ``notifying``.

        Returns:
            Whether the cause is known and does not recur: a quarantined turn, or a client that is refused from now on.
        """
        was_in_flight, was_aborted = self._in_flight, self._aborted
        suspects = {
            turn_id: self._turns[turn_id].n_tokens
            for turn_id in (ended.suspects if ended else ())
            if turn_id in self._turns and (turn_id in was_in_flight or turn_id in self._draining)
        }
        self._engine, self._held, self._in_flight, self._aborted = None, False, set(), set()
        self._draining.clear()
        self._waiting = dict.fromkeys(self._turns)
        clients = {turn_id: self._turns[turn_id].client_id for turn_id in suspects}
        from_outside = ended is not None and ended.from_outside
        quarantined = self._detector.lost(suspects, from_outside=from_outside)
        refused = frozenset() if from_outside else self._crash_limit.engine_died(clients)
        for turn_id in [turn_id for turn_id in self._turns if turn_id in was_in_flight]:
            if turn_id == quarantined:
                self._end(_quarantined(turn_id, ended))
            elif turn_id in was_aborted:
                self._end_soon(Cancelled(turn_id))
            else:
                self._to_notify[turn_id] = self._turns[turn_id].on_engine_lost
        if suspects and quarantined is None:
            _log.warning("turns_suspected", turns=list(suspects), on_trial=self._detector.isolated)
        self._refuse(refused)
        self._note_suspects()
        self.schedule_step()
        return quarantined is not None or bool(refused)

    def fail(self, error: InferenceCenterError, *, begun: bool) -> None:
        """End all turns, which no engine has, with ``error``; those with tokens only if ``begun``.

        They are notified while ``notifying``.
        """
        for turn in list(self._turns.values()):
            if begun or not turn.n_tokens:
                self._end_soon(_failed(turn.turn_id, error))
        self._note_suspects()
        self.schedule_step()

    def _refuse(self, clients: Collection[str]) -> None:
        """End the turns of refused clients that have not begun; the others continue."""
        for turn in [turn for turn in self._turns.values() if turn.client_id in clients and not turn.n_tokens]:
            if (error := self._crash_limit.refusal(turn.client_id)) is not None:
                self._end_soon(_failed(turn.turn_id, error))

    def schedule_step(self) -> None:
        """Schedule the next step: notify turns, drain the engine for an isolated suspect, or send a waiting turn."""
        if self._engine is not None and (isolated := self._detector.isolated) is not None:
            for turn_id in [each for each in self._turns if each in self._in_flight - self._aborted - {isolated}]:
                self._in_flight.discard(turn_id)
                self._draining.add(turn_id)
                self._engine.send(AbortTurn(turn_id))
                self._to_notify[turn_id] = self._turns[turn_id].on_engine_lost
            self._waiting = {turn_id: None for turn_id in self._turns if turn_id not in self._in_flight}
        is_due = self.notifying or self._delays or (self._waiting and self._engine is not None)
        if is_due and not self._step_scheduled:
            self._step_scheduled = True
            self._call_soon(self._take_step)

    def _take_step(self) -> None:
        """Notify one turn, or else send one to the engine, and schedule the next step."""
        self._step_scheduled = False
        if self._to_notify:
            _notify(*self._to_notify.popitem(last=False))
        elif self._recalled:
            turn_id, turn = self._recalled.popitem(last=False)
            _notify(turn_id, turn.resubmit)
        elif self._delays:
            turn_id, seconds = self._delays.popitem(last=False)
            _notify(turn_id, partial(self._turns[turn_id].on_delay, seconds))
        else:
            self._hand_over()
            return
        self.schedule_step()
        self._changed()

    def _hand_over(self) -> None:
        if self._engine is None or (turn := self._next()) is None:
            self._changed()
            return
        try:
            self._give(turn)
        except InferenceCenterError as error:
            self._end(_failed(turn.turn_id, error))
        # The border between the turns: a fault in preparing one of them must not affect the others.
        except Exception:  # noqa: BLE001
            _log.exception("turn_not_submitted", turn=turn.turn_id)
            self._end(_failed(turn.turn_id, InferenceCenterError(ErrorCode.INTERNAL)))
        self.schedule_step()
        self._changed()

    def _next(self) -> EngineTurn | None:
        """Return the turn that has waited longest of those that may run now and are not being rendered."""
        if self._engine is None or not self._engine.has_room or self._held:
            return None
        isolated = self._detector.isolated
        names = self._waiting if isolated is None else self._waiting.keys() & {isolated}
        return next(
            (self._turns[turn_id] for turn_id in names if turn_id not in self._preparing and self._may_run(turn_id)),
            None,
        )

    def _give(self, turn: EngineTurn) -> bool:
        """Give a turn to the engine; return ``False`` while its prompt is rendered: the queue continues then."""
        turn_id = turn.turn_id
        if turn_id == self._detector.isolated:
            self._isolated_run = turn_id
            self._note_suspects()
        submission = turn.submission(partial(self._prepared, turn_id))
        if submission is None:
            self._preparing.add(turn_id)
            return False
        if turn_id in self._accepted:
            submission = structs.replace(submission, accepted=True)
        assert self._engine is not None, "there is one with room"
        try:
            self._engine.send(submission)
        except FramingError as error:
            raise InferenceCenterError(ErrorCode.PROMPT_TOO_LONG, str(error)) from error
        self._turns[turn_id] = turn
        self._waiting.pop(turn_id, None)
        self._delays.pop(turn_id, None)
        self._in_flight.add(turn_id)
        return True

    def _prepared(self, turn_id: str) -> None:
        self._preparing.discard(turn_id)
        self.schedule_step()

    def _may_run(self, turn_id: str) -> bool:
        if self._held or turn_id in self._draining:
            return False
        isolated = self._detector.isolated
        return isolated is None or (isolated == turn_id and not self.engine_is_busy)

    def _end(self, event: TurnEvent) -> None:
        """Send a turn its last event; a turn whose context overflowed may have been submitted again on return."""
        turn_id = event.turn_id
        if turn_id not in self._turns:
            return
        _notify(turn_id, partial(self._remove(turn_id).on_engine_event, event))
        if turn_id not in self._turns:
            self._detector.forget(turn_id)
            self._note_suspects()
        self.schedule_step()
        self._changed()

    def _end_soon(self, event: TurnEvent) -> None:
        """Schedule a turn's last event."""
        self._to_notify[event.turn_id] = partial(self._remove(event.turn_id).on_engine_event, event)
        self._detector.forget(event.turn_id)

    def _remove(self, turn_id: str) -> EngineTurn:
        self._waiting.pop(turn_id, None)
        self._accepted.discard(turn_id)
        self._preparing.discard(turn_id)
        self._in_flight.discard(turn_id)
        self._aborted.discard(turn_id)
        self._delays.pop(turn_id, None)
        self._to_notify.pop(turn_id, None)
        return self._turns.pop(turn_id)

    def _note_suspects(self) -> None:
        alone = self._isolated_run if self._isolated_run == self._detector.isolated else None
        suspected = SuspectedTurns(self._detector.times, self._detector.n_tokens, alone)
        if suspected != self._remembered:
            self._remembered = suspected
            self._remember(suspected)


def _notify(turn_id: str, call: Callable[[], None]) -> None:
    try:
        call()
    # The border between the turns: a fault in one turn's handling of an event must not affect the others.
    except Exception:  # noqa: BLE001
        _log.exception("turn_listener_failed", turn=turn_id)


def _failed(turn_id: str, error: InferenceCenterError) -> Failed:
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def _quarantined(turn_id: str, ended: EngineExit | None) -> Failed:
    detail = ended.detail if ended else ""
    _log.error("turn_quarantined", turn=turn_id, detail=detail)
    return Failed(
        turn_id=turn_id,
        code=ErrorCode.ENGINE_CRASHED.value,
        message=f"The engine died each time it ran this turn, the last time with no other ({detail}).",
        hint="Change the prompt or its parameters; the session's history is unchanged.",
    )
