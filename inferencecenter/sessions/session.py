"""One conversation: what was said, who listens, and what clients ask of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.sessions.answering import Answering
from inferencecenter.sessions.audience import Audience
from inferencecenter.sessions.description import Standing, TurnFacts
from inferencecenter.sessions.history import Extent
from inferencecenter.sessions.journal import Unwritten, check_writable
from inferencecenter.sessions.ledger import Failure, Ledger
from inferencecenter.sessions.prompt import messages_of
from inferencecenter.sessions.records import Changed, Described, Dropped, Ended, Gone, Opened, Spent
from inferencecenter.sessions.replay import Replay
from inferencecenter.sessions.states import SESSION, SessionChange, SessionState
from inferencecenter.sessions.stream import EventStream
from inferencecenter.sessions.submission import new_order
from inferencecenter.sessions.turn import Turn

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import Failed
    from inferencecenter.protocol.base import SessionEvent
    from inferencecenter.protocol.requests import Abort, Append, Infer, ResumeSession, RewindSession
    from inferencecenter.sessions.client import EventSink, ReplaySink
    from inferencecenter.sessions.facts import SessionFacts, Surroundings
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.records import Kept
    from inferencecenter.sessions.submission import Terms
    from inferencecenter.sessions.turn import Outcome

COUNTED_TOKENS: Final = 256
"""Tokens of an answer after which those of a session that is not stored are written down as spent."""
_INCOMPLETE: Final = "Something of this session could not be stored: after a restart it may lack that."


class Session:
    """A conversation of one client.

    Its history changes only when a turn ends: a turn that fails leaves it as it was. ``_change`` is the only writer of
    its state.

    Args:
        facts: What holds for it.
        around: The rest of the daemon.
        history: What was said before.
        ledger: The turns that it was said in.
        sink: Who listens at first.
        seq: Number of the last event that an earlier daemon told.
        last_used_at: When it was used before this daemon began, in Unix seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        facts: SessionFacts,
        *,
        around: Surroundings,
        history: History,
        ledger: Ledger,
        sink: EventSink | None = None,
        seq: int = 0,
        last_used_at: float | None = None,
    ) -> None:
        self.facts = facts
        own = around.journal.of_client(facts.client_id)
        self.journal: Journal = own if facts.store else Unwritten()
        self._own_journal = own
        self._around = around
        replay = Replay(around.replay_bytes, seq=seq)
        self._audience = Audience(facts.session_id, journal=self.journal, replay=replay, sink=sink, moved=around.moved)
        self._stream = EventStream(facts.session_id, journal=self.journal, audience=self._audience, seq=seq)
        self._state = SessionState.IDLE
        self._history = history
        self._ledger = ledger
        self._answering: Answering | None = None
        self._counted_chars = 0
        self._last_used_at = facts.created_at if last_used_at is None else last_used_at
        # The wall clock is believed once: where it jumps while the daemon runs, nothing expires.
        unused_s = 0.0 if last_used_at is None else max(0.0, around.clock() - last_used_at)
        self._last_used = around.monotonic() - unused_s

    @classmethod
    def restored(cls, kept: Kept, facts: SessionFacts, *, around: Surroundings) -> Session:
        """Return a session as an earlier daemon left it; ``go_on`` has its unfinished turn run."""
        session = cls(
            facts,
            around=around,
            history=kept.history,
            ledger=Ledger(kept.turns, kept.ends, kept.notes, kept.failures),
            seq=kept.seq,
            last_used_at=kept.last_used_at,
        )
        session._measure()
        if (unfinished := kept.unfinished) is not None:
            now = around.monotonic()
            since = now - max(0.0, around.clock() - unfinished.order.submitted_at)
            session._answer(Turn(unfinished.order, since=since, now=now, said=unfinished))
            session._change(SessionChange.TURN_QUEUED)
        return session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.facts.session_id}, {self._state.value}, turn={self._answering!r})"

    @property
    def state(self) -> SessionState:
        """Where the session is in its life."""
        return self._state

    @property
    def sink(self) -> EventSink | None:
        """Where its events go; none while the session is detached."""
        return self._audience.sink

    @property
    def idle_s(self) -> float:
        """Seconds since the session was last used; 0 while it answers."""
        return 0.0 if self._answering else self._around.monotonic() - self._last_used

    @property
    def standing(self) -> Standing:
        """The session as it stands; a running turn is not yet part of it."""
        engines = self._around.engines
        return Standing(
            facts=self.facts,
            model=engines.name(self.facts.chosen_model),
            n_ctx=engines.n_ctx(self.facts),
            state=self._state,
            seq=self._stream.seq,
            last_used_at=self._last_used_at,
            history=self._history,
            ledger=self._ledger,
        )

    def turn_facts(self, turn_id: str) -> TurnFacts:
        """Return what is known of a turn.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        turn = self._answering.turn if self._answering else None
        if turn is None or turn.turn_id != turn_id:
            return self.standing.turn(turn_id)
        asked = messages_of(turn.order.request)
        return TurnFacts(
            turn_id,
            turn.order.note,
            before=self._history.messages,
            asked=asked,
            finish_reason=turn.cut,
            running=True,
        )

    @property
    def history(self) -> History:
        """What was said; a running turn is not yet part of it."""
        return self._history

    @property
    def n_chars(self) -> int:
        """Characters that it holds: what was said, and notes of turns."""
        return self._history.extent.n_chars + self._ledger.n_note_chars

    # What clients ask for.

    def open(self, *, parent: str | None = None) -> None:
        """Write down that the session begins, as a fork of ``parent``."""
        self._measure()
        record = Opened(
            facts=self.facts,
            history=self._history,
            turns=self._ledger.all_turns,
            last_used_at=self._last_used_at,
            notes=self._ledger.notes,
            parent=parent,
        )
        self._stream.write(record)

    def infer(self, request: Infer, terms: Terms, sink: EventSink) -> None:
        """Start a turn, or attach to the turn that has the request's ``turn_key`` already.

        A turn of that key which runs is acknowledged again; of one that has ended, ``end`` is sent again with its own
        number. A turn that failed left nothing behind, so its key starts a new one.

        Args:
            request: What to say.
            terms: What holds for the turn besides.
            sink: Who asks; the session's events go there from now on.

        Raises:
            InferenceCenterError: ``session_busy``, ``context_full``, ``storage_unavailable``, ``overloaded``,
                ``model_loading``, what the template says against the conversation, or what the engine says.
        """
        answering = self._answering
        if answering is not None:
            if request.turn_key is None or request.turn_key != answering.turn.turn_key:
                raise InferenceCenterError(
                    ErrorCode.SESSION_BUSY, hint="Wait for the end of its turn, abort it, or use another session."
                )
            self._audience.attach(sink)
            answering.acknowledge(request_id=request.id)
        elif (ended := self._ledger.find(request.turn_key)) is not None:
            self._audience.attach(sink)
            self._stream.again(ended, request_id=request.id)
        else:
            self._begin(request, terms, sink)

    def resume(self, request: ResumeSession, sink: ReplaySink) -> None:
        """Send the session's events to ``sink`` from now on, those first that it has missed.

        Where some of them are lost it is told how the session stands instead.
        """
        missed = self._audience.missed(request, epoch=self.facts.epoch, seq=self._stream.seq)
        turn = self._answering.turn if self._answering else None
        answer = self.standing.resumed(missed.reason, turn=turn, request_id=request.id)
        self._audience.resume(sink, answer, missed.events)

    def abort(self, request: Abort) -> None:
        """Ask for the end of the running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` or ``turn_not_found``.
        """
        if (answering := self._answering) is None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT)
        answering.abort(request)

    def append(self, request: Append, sink: EventSink) -> None:
        """Add messages to the history without answering; a template that minds them says so at the next turn.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``context_full``.
        """
        self._check_idle("Append")
        check_writable(self.journal)
        history = self._history.appended(tuple(request.messages), room=self._around.room())
        self._check_held(history.extent.n_chars - self._history.extent.n_chars)
        self._history = history
        self._measure()
        self._tell_changed(self._stream.appended(len(self._history.messages), request_id=request.id), sink)

    def fork(self, facts: SessionFacts, *, turn: str | None, sink: EventSink) -> Session:
        """Return another session that begins as this one does.

        Args:
            facts: What holds for the new one.
            turn: Its last turn, or ``START``; without it everything is taken over.
            sink: Where its events go.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``turn_not_found``.
        """
        self._check_idle("Fork it")
        check_writable(self.journal)
        history = self._history if turn is None else self._history.until(turn)
        forked = Session(facts, around=self._around, history=history, ledger=self._ledger.until(turn), sink=sink)
        self._touch()
        return forked

    def rewind(self, request: RewindSession, sink: EventSink) -> None:
        """Forget all that came after a turn, or after ``START``.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``turn_not_found``.
        """
        self._check_idle("Rewind it")
        check_writable(self.journal)
        self._history = self._history.until(request.turn)
        self._ledger.rewind(request.turn)
        self._measure()
        n_messages = len(self._history.messages)
        self._tell_changed(self._stream.rewound(request.turn, n_messages, request_id=request.id), sink)

    def describe(self, metadata: dict[str, str]) -> events.MetadataSet:
        """Have other metadata, also while a turn runs; that is no use of the session.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        check_writable(self.journal)
        self.facts = replace(self.facts, metadata=dict(metadata))
        self._stream.write(Described(facts=self.facts))
        return events.MetadataSet(session_id=self.facts.session_id, metadata=self.facts.metadata)

    def close(self) -> events.SessionClosed:
        """End the session, its running turn as aborted, and let the engine forget it."""
        if (answering := self._answering) is not None:
            answering.abandon()
        self._leave(SessionChange.CLOSE)
        self._stream.write(self._gone())
        return events.SessionClosed(session_id=self.facts.session_id)

    # What happens to it.

    def go_on(self) -> None:
        """Have the engine continue the turn that an earlier daemon left unfinished, if there is one."""
        if (answering := self._answering) is not None:
            self._go_unheard()
            answering.take_over()

    def detach(self) -> None:
        """Go on without a socket; a turn that runs for long then keeps only its text."""
        self._audience.detach()
        self._go_unheard()

    def expire(self) -> None:
        """End the idle session because nobody used it."""
        self._leave(SessionChange.EXPIRE)
        self._stream.tell(self._stream.expired(), self._gone())

    def prompt_read(self, turn: Turn, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Have a prompt counted at once: what a daemon that is killed has read counts, whatever becomes of the turn."""
        self._count(replace(self._spent_by(turn), prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))

    def answer_grew(self, turn: Turn) -> None:
        """Have what an answer spent counted in coarse steps where nothing else is written of it.

        So a daemon that is killed forgets no more than a step of each. The next one goes on with a stored answer.
        """
        n_tokens = turn.n_tokens - turn.counted_tokens
        if n_tokens >= COUNTED_TOKENS and not self.facts.store and self._own_journal.fault is None:
            self._count(replace(self._spent_by(turn), completion_tokens=n_tokens))
            turn.counted_tokens = turn.n_tokens

    def turn_ended(self, turn: Turn, history: History, outcome: Outcome) -> None:
        """Take the history as it is after the running turn, and tell of its end."""
        if self.journal.lacks(self.facts.session_id):
            outcome = replace(outcome, warnings=(*outcome.warnings, _INCOMPLETE))
        end = self._stream.end(turn, outcome)
        self._turn_is_over()
        self._history = history
        note = turn.order.note
        listed = self._ledger.record(turn.turn_key, end, n_messages=len(history.messages), note=note)
        self._measure()
        record = Ended(
            session_id=self.facts.session_id,
            client_id=self.facts.client_id,
            seq=end.seq,
            last_used_at=self._last_used_at,
            history=history,
            turn=listed,
            turn_key=turn.turn_key,
            end=end,
            token_id=turn.order.token_id,
            note=note,
            prompt_tokens=turn.prompt_usage[0],
            cached_tokens=turn.prompt_usage[1],
            completion_tokens=turn.counted_tokens,
        )
        self._stream.tell(end, record)
        if not self.facts.store:
            self._count(record.spent())
        self._around.turn_ended(outcome.record(self.facts, turn.turn_id, model=turn.order.model))

    def turn_broken(self, turn: Turn, failure: Failed, outcome: Outcome) -> None:
        """Be idle again after a turn that a defect has ended, and tell that it failed."""
        if self._answering is not None and self._answering.turn is turn:
            self._turn_is_over()
        self.turn_failed(turn, failure, outcome)

    def turn_failed(self, turn: Turn, failure: Failed, outcome: Outcome) -> None:
        """Tell that the running turn leaves nothing behind."""
        if self._answering is not None:
            self._turn_is_over()
        error = self._stream.failed(turn, failure)
        remembered = Failure(error, turn.order.note)
        self._ledger.remember(turn.turn_id, remembered)
        spent = replace(self._spent_by(turn), completion_tokens=turn.n_tokens - turn.counted_tokens)
        record = Dropped(
            session_id=self.facts.session_id,
            seq=self._stream.seq,
            last_used_at=self._last_used_at,
            turn_id=turn.turn_id,
            failure=remembered,
            spent=spent,
        )
        self._stream.tell(error, record)
        if not self.facts.store:
            self._count(spent)
        self._around.turn_ended(outcome.record(self.facts, turn.turn_id, model=turn.order.model))

    def _spent_by(self, turn: Turn) -> Spent:
        return Spent(client_id=self.facts.client_id, token_id=turn.order.token_id, at=self._around.clock())

    def _count(self, spent: Spent) -> None:
        """Write down what was spent; a session that is not stored waits for no store that cannot write."""
        if self.facts.store or self._own_journal.fault is None:
            self._own_journal.write(spent, flush=False)

    # How it changes.

    def _begin(self, request: Infer, terms: Terms, sink: EventSink) -> None:
        around, facts = self._around, self.facts
        check_writable(self.journal)
        around.admit()
        noted = self._ledger.n_note_chars + len(terms.note)
        asked = messages_of(request)
        self._history.check_results(asked)
        extent = Extent.of(asked)
        around.room(noted_chars=noted).check(self._history.extent + extent)
        self._check_held(extent.n_chars)
        order = new_order(request, terms, facts=facts, around=around)
        now = around.monotonic()
        answering = self._answer(Turn(order, since=now, now=now))
        try:
            answering.hand_over()
        except BaseException:
            # Whatever it is, a session without a turn is not busy.
            self._answering = None
            raise
        self._change(SessionChange.TURN_QUEUED)
        self._touch()
        self._audience.attach(sink)
        answering.begun(request_id=request.id)

    def _answer(self, turn: Turn) -> Answering:
        self._answering = Answering(
            turn, history=self._history, asker=self, stream=self._stream, facts=self.facts, around=self._around
        )
        return self._answering

    def _turn_is_over(self) -> None:
        self._answering = None
        self._audience.rest()
        self._change(SessionChange.TURN_ENDED)
        self._touch()

    def _gone(self) -> Gone:
        return Gone(session_id=self.facts.session_id, n_chars=self.n_chars)

    def _leave(self, change: SessionChange) -> None:
        self._change(change)
        self._hold(0)
        self._around.engines.release(self.facts.session_id)

    def _change(self, change: SessionChange) -> None:
        before, self._state = self._state, SESSION.after(self._state, change)
        busier = (self._state is SessionState.BUSY) - (before is SessionState.BUSY)
        if busier:
            self._around.busy.add(busier, client_id=self.facts.client_id, stateless=self.facts.stateless)

    def _check_held(self, n_chars: int) -> None:
        if not self.facts.stateless:
            self._around.held.check(n_chars, client_id=self.facts.client_id)

    def _measure(self) -> None:
        """Count what the session holds now among its client's."""
        if not self.facts.stateless:
            self._hold(self.n_chars)

    def _hold(self, n_chars: int) -> None:
        self._around.held.add(n_chars - self._counted_chars, client_id=self.facts.client_id)
        self._counted_chars = n_chars

    def _touch(self) -> None:
        self._last_used = self._around.monotonic()
        self._last_used_at = self._around.clock()

    def _tell_changed(self, event: SessionEvent, sink: EventSink) -> None:
        self._touch()
        record = Changed(
            session_id=self.facts.session_id,
            seq=event.seq,
            last_used_at=self._last_used_at,
            history=self._history,
            turns=self._ledger.all_turns,
            rewound=isinstance(event, events.SessionRewound),
        )
        self._stream.answer(event, record, sink)

    def _check_idle(self, doing: str) -> None:
        if self._answering is not None:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, hint=f"{doing} when its turn has ended.")

    def _go_unheard(self) -> None:
        """Keep the running turn's events only for as long as somebody may come back for them."""
        if self._answering is not None:
            self._audience.fold_later(self._around.detached_turn_s, self._around.call_later)
