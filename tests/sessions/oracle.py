"""An engine with deterministic answers, a store in memory, and a client that checks event numbers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.ipc.messages import (
    Cancelled,
    Failed,
    Finished,
    ModelInfo,
    Started,
    Submit,
    TokenDelta,
    unpack_tokens,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events
from inferencecenter.sessions.journal import (
    ConfigChanged,
    EpochChanged,
    HistoryChanged,
    McpCallsChanged,
    PendingTurn,
    PresetRemoved,
    PresetStored,
    SessionArchived,
    SessionDeleted,
    SessionOpened,
    ShareDeleted,
    ShareRecorded,
    StoredSession,
    TokensAppended,
    TurnEnded,
    TurnFailed,
    TurnQueued,
    UsageRecorded,
)
from tests.ipc.lookups import CharacterTokens
from tests.sessions.conftest import make_model, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inferencecenter.ipc.port import EngineTurn
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.journal import Record
    from inferencecenter.sessions.output_parsing.parts import Part

END = "\0"


def script(prompt: str) -> str:
    """The oracle's answer to a prompt: different prompts get answers of different text and length."""
    digest = zlib.crc32(prompt.encode())
    return "".join(f"{digest + n:x} " for n in range(3 + digest % 5))


@dataclass
class _Running:
    """A turn in the engine. ``shown`` counts the emitted characters."""

    turn: EngineTurn
    prompt: str
    said: str
    shown: int
    started: bool = False
    n_prompt: int = 0


@dataclass
class Oracle(CharacterTokens):
    """An engine that generates one character per step and emits it ``lag`` characters later, as for a stop string."""

    lag: int = 2
    status: EngineStatus = field(default_factory=lambda: EngineStatus(EngineState.READY, model=make_model()))
    waiting: dict[str, EngineTurn] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    submissions: list[Submit] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> ModelInfo | None:
        """The model in the status."""
        return self.status.model

    def submit(self, turn: EngineTurn) -> int:
        """Accept a turn; without an engine it waits."""
        if self.status.state is EngineState.READY:
            self._take(turn)
        else:
            self.waiting[turn.turn_id] = turn
        return 0

    def abort(self, turn_id: str) -> None:
        """End a turn with its next step, or at once if no engine has it."""
        if (turn := self.waiting.pop(turn_id, None)) is not None:
            turn.on_engine_event(Cancelled(turn_id))
        elif turn_id in self.running:
            self.aborted.add(turn_id)

    def release(self, session_id: str) -> None:
        """Do nothing: no KV cache is kept."""

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Do nothing: the state never changes."""

    def lose(self) -> None:
        """Lose the engine with all its state."""
        self.status = replace(self.status, state=EngineState.BACKOFF)
        lost, self.running = self.running, {}
        for turn_id, running in lost.items():
            running.turn.on_engine_lost()
            if turn_id in self.aborted:
                running.turn.on_engine_event(Cancelled(turn_id))
            else:
                self.waiting[turn_id] = running.turn
        self.aborted.clear()

    def ready(self, model: ModelInfo | None = None) -> None:
        """Start an engine and submit the waiting turns to it."""
        self.status = EngineStatus(EngineState.READY, model=model or self.status.model or make_model())
        taken, self.waiting = self.waiting, {}
        for turn_id, turn in taken.items():
            try:
                self._take(turn)
            except InferenceCenterError as error:
                turn.on_engine_event(Failed(turn_id=turn_id, code=error.code.value, message=error.message))

    def step(self) -> None:
        """Start each turn, generate its next character, or end it."""
        for turn_id, running in list(self.running.items()):
            self._advance(turn_id, running)

    def run(self) -> None:
        """Run all turns to their end."""
        while self.running:
            self.step()

    def _take(self, turn: EngineTurn) -> None:
        submit = turn.submission(lambda: None)
        assert isinstance(submit, Submit)
        self.submissions.append(submit)
        spelled = "".join(map(chr, unpack_tokens(submit.tokens)))
        prompt = spelled + "".join(piece.text for piece in submit.pieces)
        said = "".join(map(chr, unpack_tokens(submit.answer)))
        assert self.prompts.setdefault(submit.turn_id, prompt) == prompt, "a turn is always asked the same"
        assert script(prompt).startswith(said)
        assert submit.shown_chars <= len(said)
        self.running[submit.turn_id] = _Running(turn, prompt, said, submit.shown_chars, n_prompt=len(prompt))

    def _advance(self, turn_id: str, running: _Running) -> None:
        turn, answer = running.turn, script(running.prompt)
        if turn_id in self.aborted:
            self._end(turn_id, running, "aborted")
        elif not running.started:
            running.started = True
            turn.on_engine_event(Started(turn_id, packed(running.prompt), 0))
        elif len(running.said) < len(answer):
            running.said += answer[len(running.said)]
            self._show(running, len(running.said) - self.lag, packed(running.said[-1]))
        else:
            self._end(turn_id, running, "stop")

    def _show(self, running: _Running, to: int, tokens: bytes) -> None:
        to = max(running.shown, to)
        text, running.shown = running.said[running.shown : to], to
        running.turn.on_engine_event(TokenDelta(running.turn.turn_id, tokens, text))

    def _end(self, turn_id: str, running: _Running, reason: str) -> None:
        stopped = reason == "stop"
        self._show(running, len(running.said), packed(END) if stopped else b"")
        del self.running[turn_id]
        self.aborted.discard(turn_id)
        running.turn.on_engine_event(
            Finished(
                turn_id=turn_id,
                reason=reason,
                stop=None,
                kept_tokens=len(running.said) + stopped,
                kept_chars=len(running.said),
                end_text="<|im_end|>" if stopped else "",
                prompt_tokens=running.n_prompt,
                cached_tokens=0,
                generated_tokens=len(running.said) + stopped,
                queue_ms=0.0,
                ttft_ms=0.0,
                total_ms=0.0,
                tokens_per_s=0.0,
            )
        )


def kept(records: Iterable[Record]) -> list[StoredSession]:
    """The session that a store restores from ``records``."""
    sessions: dict[str, StoredSession] = {}
    for record in records:
        if isinstance(record, SessionOpened):
            sessions[record.config.session_id] = StoredSession(
                config=record.config,
                seq=0,
                last_used_at=record.last_used_at,
                history=record.history,
                turns=record.turns,
                ends={},
                pending_turn=None,
                notes=record.notes,
            )
        elif isinstance(record, SessionDeleted):
            del sessions[record.session_id]
        elif not isinstance(
            record, UsageRecorded | SessionArchived | PresetStored | PresetRemoved | ShareRecorded | ShareDeleted
        ):
            sessions[record.session_id] = _after(sessions[record.session_id], record)
    return list(sessions.values())


def _parts(before: PendingTurn, said: TokensAppended) -> tuple[Part, ...] | None:
    if before.parts is None and said.parts is None:
        return None
    return (*(before.parts or ()), *(said.parts or ()))


def _after(
    session: StoredSession,
    record: TurnQueued
    | TokensAppended
    | TurnEnded
    | TurnFailed
    | HistoryChanged
    | McpCallsChanged
    | ConfigChanged
    | EpochChanged,
) -> StoredSession:
    match record:
        case TurnQueued():
            before = session.pending_turn or PendingTurn(spec=record.spec, tokens=b"", text="")
            pending_turn = replace(before, spec=record.spec)
            return replace(session, seq=record.seq, last_used_at=record.last_used_at, pending_turn=pending_turn)
        case TokensAppended():
            assert session.pending_turn is not None
            assert session.pending_turn.spec.turn_id == record.turn_id
            pending_turn = replace(
                session.pending_turn,
                tokens=session.pending_turn.tokens + record.tokens,
                text=session.pending_turn.text + record.text,
                parts=_parts(session.pending_turn, record),
            )
            return replace(session, seq=record.seq, pending_turn=pending_turn)
        case TurnEnded():
            ends = dict(session.ends)
            if record.turn_key is not None:
                ends[record.turn_key] = record.end
            return replace(
                session,
                seq=record.seq,
                last_used_at=record.last_used_at,
                history=record.history,
                turns=(*session.turns, record.turn),
                ends=ends,
                pending_turn=None,
                notes={**session.notes, record.turn.turn_id: record.note} if record.note else session.notes,
            )
        case TurnFailed():
            failures = dict(session.failures)
            if record.failure is not None and record.failure.note:
                failures[record.turn_id] = record.failure
            return replace(
                session, seq=record.seq, last_used_at=record.last_used_at, pending_turn=None, failures=failures
            )
        case HistoryChanged():
            left = {turn.turn_id for turn in record.turns}
            return replace(
                session,
                seq=record.seq,
                last_used_at=record.last_used_at,
                history=record.history,
                turns=record.turns,
                ends={key: end for key, end in session.ends.items() if end.turn_id in left},
                failures={} if record.rewound else session.failures,
            )
        case _:
            return _configured(session, record)


def _configured(session: StoredSession, record: McpCallsChanged | ConfigChanged | EpochChanged) -> StoredSession:
    match record:
        case McpCallsChanged():
            return replace(session, seq=record.seq, last_used_at=record.last_used_at, mcp_calls=record.calls)
        case ConfigChanged():
            return replace(session, config=record.config)
        case EpochChanged():
            return replace(session, config=replace(session.config, epoch=record.epoch))


@dataclass
class Reader:
    """A client of one session that applies each numbered event once and in order.

    ``answers`` are the texts of ended turns by turn id; ``text`` is that of the running turn.
    """

    epoch: str
    last_seq: int = 0
    turn_id: str | None = None
    text: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    detached: bool = False

    def take(self, event: Event) -> None:
        """Apply an event."""
        if event.id is not None:
            self.acknowledged.add(event.id)
        match event:
            case events.SessionDetached():
                self.detached = True
            case events.SessionResumed(resumed=False):
                self._start_over(event)
            case events.SessionResumed():
                assert event.epoch == self.epoch
            case events.End() if event.id is not None and event.seq <= self.last_seq:
                pass  # a repeated request is answered with the known end
            case events.Queued() | events.Token() | events.End():
                self._follow(event)
            case _:
                raise AssertionError(f"nothing sends {event.op} here")

    def _follow(self, event: events.Queued | events.Token | events.End) -> None:
        assert event.seq > self.last_seq, f"{event.op} {event.seq} comes after {self.last_seq}"
        if not isinstance(event, events.Token):
            assert event.seq == self.last_seq + 1, f"nothing is between {self.last_seq} and {event.op} {event.seq}"
        self.last_seq = event.seq
        if isinstance(event, events.Queued):
            if event.turn_id != self.turn_id:
                self.turn_id, self.text = event.turn_id, ""
        elif isinstance(event, events.Token):
            assert event.turn_id == self.turn_id
            self.text += event.content
        else:
            assert event.turn_id == self.turn_id
            self.answers[event.turn_id], self.turn_id = self.text, None

    def _start_over(self, event: events.SessionResumed) -> None:
        assert event.transcript is not None
        assert event.turns is not None
        self.epoch, self.last_seq = event.epoch, event.seq
        self.answers = {turn.turn_id: event.transcript[turn.messages - 1].content for turn in event.turns}
        self.turn_id, self.text = event.turn_id, event.content or ""
