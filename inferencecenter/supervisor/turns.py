"""The turns that have not ended, and which of them the engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FrameError
from inferencecenter.ipc.messages import Abort, Delta, Failed, Finished, Overflowed, Withdrawn
from inferencecenter.supervisor.suspects import Suspects

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ToEngine, TurnEvent
    from inferencecenter.ipc.port import EngineTurn
    from inferencecenter.supervisor.process import Ended

_LAST: Final = (Finished, Failed, Overflowed, Withdrawn)

_log = structlog.get_logger(__name__)


class Turns:
    """Keeps turns in the order of their submission and gives them to one engine after the other.

    A turn is kept until its last event, not what it generated: that is its session's, which says what is left to do
    each time an engine takes the turn. While a suspect is tried alone, all others wait here. One that was cleared and
    has to make room for the next suspect *leaves*: it is aborted in the engine without hearing of it, and what the
    engine still says of it is dropped, to be generated again.
    """

    def __init__(self) -> None:
        self._turns: dict[str, EngineTurn] = {}
        self._given: set[str] = set()
        self._aborted: set[str] = set()
        self._leaving: set[str] = set()
        self._suspects = Suspects()
        self._held = False
        self._send: Callable[[ToEngine], None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._turns)}, given={len(self._given)}, {self._suspects!r})"

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def n_waiting(self) -> int:
        """Turns that no engine has."""
        return len(self._turns) - len(self._given)

    @property
    def engine_is_busy(self) -> bool:
        """Whether the engine has something to do."""
        return bool(self._given or self._leaving)

    def add(self, turn: EngineTurn) -> bool:
        """Keep a turn, and give it to the engine if that may have it now; tell whether it did.

        Raises:
            InferenceCenterError: ``prompt_too_long``, or what the turn says; it is not kept.
        """
        if self._may_run(turn.turn_id):
            self._give(turn)
            return True
        self._turns[turn.turn_id] = turn
        return False

    def connect(self, send: Callable[[ToEngine], None]) -> None:
        """Give the turns to a new engine, which hears by ``send``."""
        self._send, self._held = send, False
        self._go_on()

    def hold(self) -> None:
        """Give the engine no more turns; those that it has go on."""
        self._held = True

    def recall(self, *, begun: bool) -> list[EngineTurn]:
        """Give back the turns that no engine has, those with tokens only if ``begun``; they are not kept any more."""
        waiting = [turn for turn_id, turn in self._turns.items() if turn_id not in self._given]
        recalled = [turn for turn in waiting if begun or not turn.n_tokens]
        for turn in recalled:
            del self._turns[turn.turn_id]
            self._suspects.forget(turn.turn_id)
        return recalled

    def hear(self, event: TurnEvent) -> None:
        """Pass on what the engine says of a turn."""
        turn_id, is_last = event.turn_id, isinstance(event, _LAST)
        if turn_id in self._leaving:
            if is_last:
                self._leaving.discard(turn_id)
                self._go_on()
            return
        if turn_id not in self._given:
            return
        if is_last:
            self._end(event)
            return
        turn = self._turns[turn_id]
        _tell(turn, event)
        if isinstance(event, Delta) and self._suspects and self._suspects.clears(turn_id, turn.n_tokens):
            _log.info("turn_cleared", turn=turn_id)
            self._go_on()

    def abort(self, turn_id: str) -> None:
        """Have a turn end: by the engine if that has it, else at once."""
        if turn_id in self._given and self._send is not None:
            self._aborted.add(turn_id)
            self._send(Abort(turn_id))
        else:
            self._end(Withdrawn(turn_id))

    def lost(self, ended: Ended | None = None) -> bool:
        """Take all turns back from an engine that has ended, or that is not to be heard any more.

        Returns:
            Whether one of them is known to have ended it.
        """
        was_given, was_aborted = self._given, self._aborted
        suspects = {
            turn_id: self._turns[turn_id].n_tokens
            for turn_id in (ended.suspects if ended else ())
            if turn_id in self._turns and (turn_id in was_given or turn_id in self._leaving)
        }
        self._send, self._held, self._given, self._aborted = None, False, set(), set()
        self._leaving.clear()
        culprit = self._suspects.lost(suspects, from_outside=ended is not None and ended.from_outside)
        for turn_id in [turn_id for turn_id in self._turns if turn_id in was_given]:
            if turn_id == culprit:
                self._end(_convicted(turn_id, ended))
            elif turn_id in was_aborted:
                self._end(Withdrawn(turn_id))
            else:
                self._interrupt(turn_id)
        if suspects and culprit is None:
            _log.warning("turns_suspected", turns=list(suspects), on_trial=self._suspects.on_trial)
        return culprit is not None

    def fail(self, error: InferenceCenterError) -> None:
        """End all turns, which no engine has, in the same way."""
        for turn_id in list(self._turns):
            self._end(_failed(turn_id, error))

    def _may_run(self, turn_id: str) -> bool:
        if self._send is None or self._held or turn_id in self._leaving:
            return False
        on_trial = self._suspects.on_trial
        return on_trial is None or (on_trial == turn_id and not self.engine_is_busy)

    def _give(self, turn: EngineTurn) -> None:
        assert self._send is not None, "there is an engine"
        submission = turn.submission()
        try:
            self._send(submission)
        except FrameError as error:
            raise InferenceCenterError(ErrorCode.PROMPT_TOO_LONG, str(error)) from error
        self._turns[turn.turn_id] = turn
        self._given.add(turn.turn_id)

    def _go_on(self) -> None:
        """Make room for the suspect that is to run alone, and give the engine all that it may have."""
        if self._send is None:
            return
        if (on_trial := self._suspects.on_trial) is not None:
            for turn_id in self._given - self._aborted - {on_trial}:
                self._given.discard(turn_id)
                self._leaving.add(turn_id)
                self._send(Abort(turn_id))
                self._interrupt(turn_id)
        if not self.n_waiting:
            return
        for turn in [turn for turn_id, turn in self._turns.items() if turn_id not in self._given]:
            # What ends in this loop may give or end others.
            turn_id = turn.turn_id
            if turn_id in self._turns and turn_id not in self._given and self._may_run(turn_id):
                self._give_again(turn)

    def _give_again(self, turn: EngineTurn) -> None:
        """Give a turn that waited; what keeps it from running is its end."""
        try:
            self._give(turn)
        except InferenceCenterError as error:
            self._end(_failed(turn.turn_id, error))
        # The border between the turns: a fault in what one of them has left to do must not reach the others.
        except Exception:  # noqa: BLE001
            _log.exception("turn_not_submitted", turn=turn.turn_id)
            self._end(_failed(turn.turn_id, InferenceCenterError(ErrorCode.INTERNAL)))

    def _end(self, event: TurnEvent) -> None:
        """Tell a turn its last event; one that overflowed may have been submitted again when this returns."""
        turn_id = event.turn_id
        if (turn := self._turns.pop(turn_id, None)) is None:
            return
        self._given.discard(turn_id)
        self._aborted.discard(turn_id)
        _tell(turn, event)
        if turn_id not in self._turns:
            self._suspects.forget(turn_id)
        self._go_on()

    def _interrupt(self, turn_id: str) -> None:
        if (turn := self._turns.get(turn_id)) is None:
            return
        try:
            turn.interrupted()
        # The same border as in ``_tell``.
        except Exception:  # noqa: BLE001
            _log.exception("turn_listener_failed", turn=turn_id)


def _tell(turn: EngineTurn, event: TurnEvent) -> None:
    try:
        turn.hear(event)
    # The border between the turns: a fault in what one of them does with an event must not reach the others.
    except Exception:  # noqa: BLE001
        _log.exception("turn_listener_failed", turn=turn.turn_id)


def _failed(turn_id: str, error: InferenceCenterError) -> Failed:
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def _convicted(turn_id: str, ended: Ended | None) -> Failed:
    detail = ended.detail if ended else ""
    _log.error("turn_quarantined", turn=turn_id, detail=detail)
    return Failed(
        turn_id=turn_id,
        code=ErrorCode.ENGINE_CRASHED.value,
        message=f"The engine died each time it ran this turn, the last time with no other ({detail}).",
        hint="Change the question or its parameters; the session's history is as it was before.",
    )
