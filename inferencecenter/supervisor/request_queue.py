"""The turns that have not ended, and which of them the engine has.

A new engine may be met by a thousand turns that wait. Each is rendered before it is handed over, which does not hold up
those behind it, and may be megabytes long. So they are handed over one in a turn of the event loop, which serves
all other work in between, and only while what the engine has not read yet is within the channel's window: it goes on
when that has drained. A turn that cannot be submitted ends by itself in its own turn of the loop, so that any number of
them in a row is no recursion.

So are the turns of an engine that is lost, or given up, told of it: one in a turn of the loop, in their order, and all
of them before the next engine is given any. What is to become of them is settled at once. A turn that is to end is not
here any more, so that nothing else can end it; one that is only interrupted may be aborted or recalled before it hears
of that.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from msgspec import structs

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import AbortTurn, Cancelled, ContextFull, Failed, Finished, TokenDelta
from inferencecenter.supervisor.poison_turn_store import SuspectedTurns
from inferencecenter.supervisor.poison_turns import PoisonTurnDetector
from inferencecenter.supervisor.process import EngineExit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferencecenter.ipc.messages import LoadFailed, ToEngine, TurnEvent
    from inferencecenter.ipc.port import EngineStatus, EngineTurn
    from inferencecenter.supervisor.crash_limit import CrashLimit

_RETRY_MS: Final = 1000
_GIVEN_UP: Final = (
    "It was lost too often and is not started again; the daemon's log says why. Once that is mended, SIGHUP to the "
    "daemon, inferencecenter model load or a restart of the daemon starts it again."
)
_BY_ITSELF: Final = ("stop", "length")
_LAST: Final = (Finished, Failed, ContextFull, Cancelled)
_log = structlog.get_logger(__name__)


def unavailable(engine: EngineStatus, *, given_up: bool, retry_after_ms: int = _RETRY_MS) -> InferenceCenterError:
    """Return why an engine in this state takes no turns; one that is ``given_up`` will not before it is revived."""
    return InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the engine is {engine.state.value}{': ' if engine.detail else ''}{engine.detail}",
        hint=_GIVEN_UP if given_up else None,
        retry_after_ms=None if given_up else retry_after_ms,
    )


def queue_full(max_queue: int) -> InferenceCenterError:
    """Return why a turn is not taken when ``max_queue`` turns wait already."""
    return InferenceCenterError(ErrorCode.QUEUE_FULL, f"{max_queue} turns are waiting already", retry_after_ms=1000)


def not_loaded(message: LoadFailed) -> InferenceCenterError:
    """Return why a model cannot be loaded, as the engine said it."""
    code = ErrorCode(message.code) if message.code in ERRORS else ErrorCode.INTERNAL
    return InferenceCenterError(code, message.message, hint=message.hint or None)


class QueueLengthAlarm:
    """Says once that the queue has become long, and again only after it has been half as long.

    Args:
        threshold: Waiting turns that make a queue long; 0 for never.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._warned = False

    def should_warn(self, waiting: int) -> bool:
        """Take note of how many turns wait, and tell whether to warn now."""
        if not self._threshold:
            return False
        if waiting * 2 < self._threshold:
            self._warned = False
        if self._warned or waiting < self._threshold:
            return False
        self._warned = True
        return True


class EngineLink(Protocol):
    """An engine, as far as turns are given to it."""

    @property
    def has_room(self) -> bool:
        """Whether it may be sent another turn now."""

    def send(self, message: ToEngine) -> None:
        """Send a message; raises ``FramingError`` where it is too large."""


class RequestQueue:
    """Keeps turns in the order of their submission and gives them to one engine after the other.

    A turn is kept until its last event, not what it generated: that is its session's, which says what is left to do
    each time an engine takes the turn. While a suspect is tried alone, all others wait here. One that was cleared and
    has to make room for the next suspect *leaves*: it is aborted in the engine without hearing of it, and what the
    engine still says of it is dropped, to be generated again.

    Args:
        call_soon: Arranges for a call in the next turn of the event loop.
        changed: Called when the engine was given a turn that waited, or when there is none to give any more.
        crash_limit: Where deaths of engines are counted by client.
        remember: Called when others are suspected than before, or another is tried.
    """

    def __init__(
        self,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        changed: Callable[[], None],
        crash_limit: CrashLimit,
        remember: Callable[[SuspectedTurns], None],
    ) -> None:
        self._call_soon = call_soon
        self._changed = changed
        self._crash_limit = crash_limit
        self._remember = remember
        self._remembered = SuspectedTurns()
        self._tried: str | None = None
        self._turns: dict[str, EngineTurn] = {}
        # Those that no engine has, in the order of their submission.
        self._waiting: dict[str, None] = {}
        # Those that were here before the engine: it may not refuse them for lack of room.
        self._accepted: set[str] = set()
        # Those of them whose prompts are being rendered.
        self._preparing: set[str] = set()
        self._given: set[str] = set()
        self._aborted: set[str] = set()
        self._leaving: set[str] = set()
        self._detector = PoisonTurnDetector()
        self._held = False
        self._engine: EngineLink | None = None
        self._going_on = False
        # Those that are to hear of their end, or that their engine is gone, where there is no event.
        self._untold: OrderedDict[str, tuple[EngineTurn, TurnEvent | None]] = OrderedDict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._turns)}, given={len(self._given)}, {self._detector!r})"

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def n_waiting(self) -> int:
        """Turns that no engine has."""
        return len(self._waiting)

    @property
    def handing_over(self) -> bool:
        """Whether the engine is about to be given turns that wait, some of which may have to be rendered first."""
        return self._going_on or bool(self._preparing and self._engine is not None and not self._held)

    @property
    def telling(self) -> bool:
        """Whether turns have yet to hear what has become of them."""
        return bool(self._untold)

    @property
    def clients(self) -> frozenset[str]:
        """Whose turns have not ended."""
        return frozenset(turn.client_id for turn in self._turns.values())

    @property
    def engine_is_busy(self) -> bool:
        """Whether the engine has something to do."""
        return bool(self._given or self._leaving)

    def add(self, turn: EngineTurn) -> bool:
        """Keep a turn, and give it to the engine if that may have it now; tell whether it waits for no engine.

        Raises:
            InferenceCenterError: ``prompt_too_long``, ``rate_limited`` for one that has not begun of a client that has
                ended too many engines, or what the turn says; it is not kept.
        """
        if not turn.n_tokens:
            self._crash_limit.check(turn.client_id)
        may_run = self._engine is not None and self._engine.has_room and self._may_run(turn.turn_id)
        if may_run and self._is_prepared(turn):
            assert self._engine is not None
            self._give(turn, self._engine)
            return True
        self._turns[turn.turn_id] = turn
        self._waiting[turn.turn_id] = None
        return may_run

    def resume(self, known: SuspectedTurns, *, after_crash: bool) -> None:
        """Go on with what an earlier daemon suspected of the turns that it left; ``after_crash`` it died with them."""
        n_tokens = {turn_id: turn.n_tokens for turn_id, turn in self._turns.items()}
        for turn_id, times in known.times.items():
            named_at = known.n_tokens.get(turn_id, 0)
            if turn_id in n_tokens and not (after_crash and n_tokens[turn_id] > named_at):
                self._detector.restore(turn_id, times=times, n_tokens=named_at)
        if after_crash:
            named = {known.alone: n_tokens[known.alone]} if known.alone in self._detector.times else n_tokens
            if (culprit := self._detector.lost(named, from_outside=True)) is not None:
                self._end(_quarantined(culprit, EngineExit("the daemon died with it")))
            elif self._detector.isolated is not None:
                _log.warning("turns_suspected", turns=list(named), on_trial=self._detector.isolated)
        self._note_suspects()

    def connect(self, engine: EngineLink) -> None:
        """Give the turns to a new engine, one after the other."""
        self._engine, self._held = engine, False
        self._accepted = set(self._turns)
        self.go_on()

    def hold(self) -> None:
        """Give the engine no more turns; those that it has go on."""
        self._held = True

    def recall(self, *, begun: bool) -> list[EngineTurn]:
        """Give back the turns that no engine has, those with tokens only if ``begun``; they are not kept any more."""
        waiting = [self._turns[turn_id] for turn_id in self._waiting]
        recalled = [turn for turn in waiting if begun or not turn.n_tokens]
        for turn in recalled:
            del self._turns[turn.turn_id]
            del self._waiting[turn.turn_id]
            self._accepted.discard(turn.turn_id)
            self._preparing.discard(turn.turn_id)
            self._detector.forget(turn.turn_id)
            if self._untold.pop(turn.turn_id, None) is not None:
                _interrupt(turn)
        self._note_suspects()
        return recalled

    def delay(self, seconds: float) -> None:
        """Tell the turns that wait how long that is at least."""
        for turn_id in list(self._waiting):
            turn = self._turns[turn_id]
            try:
                turn.delayed(seconds)
            # The same border as in ``_tell``.
            except Exception:  # noqa: BLE001
                _log.exception("turn_listener_failed", turn=turn_id)

    def on_engine_event(self, event: TurnEvent) -> None:
        """Pass on what the engine says of a turn."""
        turn_id, is_last = event.turn_id, isinstance(event, _LAST)
        if turn_id in self._leaving:
            if is_last:
                self._leaving.discard(turn_id)
                self.go_on()
            return
        if turn_id not in self._given:
            return
        if is_last:
            if isinstance(event, Finished) and event.reason in _BY_ITSELF:
                self._crash_limit.cleared(turn_id)
            self._end(event)
            return
        turn = self._turns[turn_id]
        _tell(turn, event)
        if isinstance(event, TokenDelta) and self._detector and self._detector.clears(turn_id, turn.n_tokens):
            _log.info("turn_cleared", turn=turn_id)
            self._crash_limit.cleared(turn_id)
            self._note_suspects()
            self.go_on()

    def abort(self, turn_id: str) -> None:
        """Have a turn end: by the engine if that has it, else at once."""
        if turn_id in self._given and self._engine is not None:
            self._aborted.add(turn_id)
            self._engine.send(AbortTurn(turn_id))
        else:
            self._end(Cancelled(turn_id))

    def lost(self, ended: EngineExit | None = None) -> bool:
        """Take all turns back from an engine that has ended, or that is not to be heard any more.

        They are told while ``telling``.

        Returns:
            Whether what ended it is known and does not come again: a turn, or a client that is refused from now on.
        """
        was_given, was_aborted = self._given, self._aborted
        suspects = {
            turn_id: self._turns[turn_id].n_tokens
            for turn_id in (ended.suspects if ended else ())
            if turn_id in self._turns and (turn_id in was_given or turn_id in self._leaving)
        }
        self._engine, self._held, self._given, self._aborted = None, False, set(), set()
        self._leaving.clear()
        self._waiting = dict.fromkeys(self._turns)
        clients = {turn_id: self._turns[turn_id].client_id for turn_id in suspects}
        from_outside = ended is not None and ended.from_outside
        culprit = self._detector.lost(suspects, from_outside=from_outside)
        refused = frozenset() if from_outside else self._crash_limit.engine_died(clients)
        for turn_id in [turn_id for turn_id in self._turns if turn_id in was_given]:
            if turn_id == culprit:
                self._end(_quarantined(turn_id, ended))
            elif turn_id in was_aborted:
                self._end_soon(Cancelled(turn_id))
            else:
                self._untold[turn_id] = self._turns[turn_id], None
        if suspects and culprit is None:
            _log.warning("turns_suspected", turns=list(suspects), on_trial=self._detector.isolated)
        self._refuse(refused)
        self._note_suspects()
        self.go_on()
        return culprit is not None or bool(refused)

    def fail(self, error: InferenceCenterError, *, begun: bool) -> None:
        """End all turns, which no engine has, in the same way; those with tokens only if ``begun``.

        They are told while ``telling``.
        """
        for turn in list(self._turns.values()):
            if begun or not turn.n_tokens:
                self._end_soon(_failed(turn.turn_id, error))
        self._note_suspects()
        self.go_on()

    def _refuse(self, clients: Collection[str]) -> None:
        """End the turns of clients that may begin none; answers that have begun go on."""
        for turn in [turn for turn in self._turns.values() if turn.client_id in clients and not turn.n_tokens]:
            if (error := self._crash_limit.refusal(turn.client_id)) is not None:
                self._end_soon(_failed(turn.turn_id, error))

    def go_on(self) -> None:
        """Have turns told what they have not heard; make room for the suspect that is to run alone; feed the engine."""
        if self._engine is not None and (on_trial := self._detector.isolated) is not None:
            for turn_id in [each for each in self._turns if each in self._given - self._aborted - {on_trial}]:
                self._given.discard(turn_id)
                self._leaving.add(turn_id)
                self._engine.send(AbortTurn(turn_id))
                self._untold[turn_id] = self._turns[turn_id], None
            self._waiting = {turn_id: None for turn_id in self._turns if turn_id not in self._given}
        if (self._untold or (self._waiting and self._engine is not None)) and not self._going_on:
            self._going_on = True
            self._call_soon(self._take_step)

    def _take_step(self) -> None:
        """Tell one turn what it has not heard, or else hand one over, and arrange for the next."""
        self._going_on = False
        if not self._untold:
            self._hand_over()
            return
        _, (turn, event) = self._untold.popitem(last=False)
        if event is None:
            _interrupt(turn)
        else:
            _tell(turn, event)
        self.go_on()
        self._changed()

    def _hand_over(self) -> None:
        """Give the engine one of the turns that wait, if it may have one, and arrange for the next."""
        if self._engine is None or (turn := self._next()) is None:
            self._changed()
            return
        try:
            if self._is_prepared(turn):
                self._give(turn, self._engine)
        except InferenceCenterError as error:
            self._end(_failed(turn.turn_id, error))
        # The border between the turns: a fault in what one of them has left to do must not reach the others.
        except Exception:  # noqa: BLE001
            _log.exception("turn_not_submitted", turn=turn.turn_id)
            self._end(_failed(turn.turn_id, InferenceCenterError(ErrorCode.INTERNAL)))
        self.go_on()
        self._changed()

    def _next(self) -> EngineTurn | None:
        """Return the turn that waits longest of those that may run now and have, or ask for, their prompts."""
        if self._engine is None or not self._engine.has_room or self._held:
            return None
        on_trial = self._detector.isolated
        names = self._waiting if on_trial is None else self._waiting.keys() & {on_trial}
        return next(
            (self._turns[turn_id] for turn_id in names if turn_id not in self._preparing and self._may_run(turn_id)),
            None,
        )

    def _is_prepared(self, turn: EngineTurn) -> bool:
        """Tell whether a turn's prompt is there; if not, the turns go on once it is."""
        if turn.turn_id == self._detector.isolated:
            self._tried = turn.turn_id
            self._note_suspects()
        if turn.prepare(partial(self._prepared, turn.turn_id)):
            return True
        self._preparing.add(turn.turn_id)
        return False

    def _prepared(self, turn_id: str) -> None:
        self._preparing.discard(turn_id)
        self.go_on()

    def _may_run(self, turn_id: str) -> bool:
        if self._held or turn_id in self._leaving:
            return False
        on_trial = self._detector.isolated
        return on_trial is None or (on_trial == turn_id and not self.engine_is_busy)

    def _give(self, turn: EngineTurn, engine: EngineLink) -> None:
        submission = structs.replace(turn.submission(), accepted=turn.turn_id in self._accepted)
        try:
            engine.send(submission)
        except FramingError as error:
            raise InferenceCenterError(ErrorCode.PROMPT_TOO_LONG, str(error)) from error
        self._turns[turn.turn_id] = turn
        self._waiting.pop(turn.turn_id, None)
        self._given.add(turn.turn_id)

    def _end(self, event: TurnEvent) -> None:
        """Tell a turn its last event; one that overflowed may have been submitted again when this returns."""
        turn_id = event.turn_id
        if turn_id not in self._turns:
            return
        _tell(self._remove(turn_id), event)
        if turn_id not in self._turns:
            self._detector.forget(turn_id)
            self._note_suspects()
        self.go_on()

    def _end_soon(self, event: TurnEvent) -> None:
        """Have a turn told its last event with those that have to hear something."""
        self._untold[event.turn_id] = self._remove(event.turn_id), event
        self._detector.forget(event.turn_id)

    def _remove(self, turn_id: str) -> EngineTurn:
        self._waiting.pop(turn_id, None)
        self._accepted.discard(turn_id)
        self._preparing.discard(turn_id)
        self._given.discard(turn_id)
        self._aborted.discard(turn_id)
        self._untold.pop(turn_id, None)
        return self._turns.pop(turn_id)

    def _note_suspects(self) -> None:
        """Have it remembered who is suspected, and who is tried, if that has changed."""
        alone = self._tried if self._tried == self._detector.isolated else None
        suspected = SuspectedTurns(self._detector.times, self._detector.n_tokens, alone)
        if suspected != self._remembered:
            self._remembered = suspected
            self._remember(suspected)


def _tell(turn: EngineTurn, event: TurnEvent) -> None:
    try:
        turn.on_engine_event(event)
    # The border between the turns: a fault in what one of them does with an event must not reach the others.
    except Exception:  # noqa: BLE001
        _log.exception("turn_listener_failed", turn=turn.turn_id)


def _interrupt(turn: EngineTurn) -> None:
    try:
        turn.interrupted()
    # The same border as in ``_tell``.
    except Exception:  # noqa: BLE001
        _log.exception("turn_listener_failed", turn=turn.turn_id)


def _failed(turn_id: str, error: InferenceCenterError) -> Failed:
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def _quarantined(turn_id: str, ended: EngineExit | None) -> Failed:
    detail = ended.detail if ended else ""
    _log.error("turn_quarantined", turn=turn_id, detail=detail)
    return Failed(
        turn_id=turn_id,
        code=ErrorCode.ENGINE_CRASHED.value,
        message=f"The engine died each time it ran this turn, the last time with no other ({detail}).",
        hint="Change the question or its parameters; the session's history is as it was before.",
    )
