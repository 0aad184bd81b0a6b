"""Sessions on a scripted engine: a fake engine, journal, socket, timer and clock that a test controls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.config.settings import SessionSettings
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.ipc.messages import (
    Cancelled,
    ContextFull,
    Failed,
    Finished,
    ModelInfo,
    Started,
    Submit,
    TokenDelta,
    TurnEvent,
    pack_tokens,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import not_registered
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params
from inferencecenter.protocol.values import ChatMessage, MessageInParts
from inferencecenter.sessions.context import Principal, UnlimitedQuota
from inferencecenter.sessions.manager import SessionManager
from inferencecenter.sessions.prompt.renderer import InlineRenderer
from inferencecenter.sessions.prompt.template import ChatTemplate
from tests.ipc.lookups import CharacterTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.ipc.port import EnginePort, EngineTurn
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.context import Quota
    from inferencecenter.sessions.journal import Journal, Record, StorageFault
    from inferencecenter.sessions.observability import Tracer, TurnRecord
    from inferencecenter.sessions.prompt.renderer import PromptRenderers
    from inferencecenter.sessions.store.store import SessionStore

DETACHED_TURN_S = 900.0
SETTINGS = SessionSettings(max_sessions=6, max_messages=1_000, detached_turn_s=DETACHED_TURN_S)
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")
BRACKETS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
"""A short template."""


def make_model(**changes: Any) -> ModelInfo:
    """A model with two control tokens and no template of its own."""
    config: dict[str, Any] = {
        "name": "toy",
        "path": "",
        "description": "",
        "architecture": "toy",
        "backend": "fake",
        "n_params": 0,
        "size_bytes": 0,
        "n_vocab": 258,
        "n_layers": 0,
        "n_gpu_layers": 0,
        "n_ctx_train": 1024,
        "n_ctx": 1024,
        "slots": 2,
        "n_threads": 1,
        "chat_template": "",
        "bos_token": "",
        "eos_token": "<|im_end|>",
        "add_bos": False,
        "special_tokens": CONTROL_TOKENS,
        "sampling_defaults_json": b"{}",
        "library": "",
    }
    return ModelInfo(**(config | changes))


TOY = make_model()
LARGE = make_model(name="large", chat_template=BRACKETS, n_ctx=4096, n_vocab=512)


def packed(text: str) -> bytes:
    """Tokens that spell ``text``, one a character."""
    return pack_tokens([ord(character) for character in text])


class InlineTemplates:
    """Renders chat templates synchronously in this process. Implements ``sessions.prompt.renderer.PromptRenderers``."""

    def of(self, model: ModelInfo) -> InlineRenderer:
        """Return the renderer of a model's template."""
        return InlineRenderer(ChatTemplate(model))


def failure_of(turn_id: str, error: InferenceCenterError) -> Failed:
    """The failure of a turn."""
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


@dataclass
class FakeEngine(CharacterTokens):
    """Accepts turns and emits the events that a test sends."""

    status: EngineStatus = field(default_factory=lambda: EngineStatus(state=EngineState.READY, model=make_model()))
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    turns: dict[str, EngineTurn] = field(default_factory=dict)
    over: dict[str, EngineTurn] = field(default_factory=dict)
    position: int = 0
    refusal: Exception | None = None

    @property
    def model(self) -> ModelInfo | None:
        """The model in the status."""
        return self.status.model

    def submit(self, turn: EngineTurn) -> int:
        """Accept or refuse the turn; while no engine is ready it waits for ``ready``."""
        if self.refusal is not None:
            raise self.refusal
        if self.status.state is EngineState.READY:
            self._take(turn)
        self.turns[turn.turn_id] = turn
        return self.position

    def lose(self) -> None:
        """Lose the engine: all turns are interrupted."""
        self.status = replace(self.status, state=EngineState.BACKOFF)
        for turn in self.turns.values():
            turn.on_engine_lost()

    def ready(self, model: ModelInfo | None = None) -> None:
        """Start an engine and submit all waiting turns to it."""
        self.status = EngineStatus(state=EngineState.READY, model=model or self.status.model or make_model())
        for turn_id, turn in tuple(self.turns.items()):
            try:
                self._take(turn)
            except InferenceCenterError as error:
                del self.turns[turn_id]
                turn.on_engine_event(failure_of(turn_id, error))

    def _take(self, turn: EngineTurn) -> None:
        if (submission := turn.submission(partial(self._take_later, turn))) is not None:
            assert isinstance(submission, Submit)
            self.submitted.append(submission)

    def _take_later(self, turn: EngineTurn) -> None:
        if self.status.state is not EngineState.READY or turn.turn_id not in self.turns:
            return
        try:
            self._take(turn)
        except InferenceCenterError as error:
            del self.turns[turn.turn_id]
            turn.on_engine_event(failure_of(turn.turn_id, error))

    def recall(self, *, begun: bool = False) -> None:
        """Recall the turns without tokens, as after a change of the default, or all turns."""
        for turn_id, turn in tuple(self.turns.items()):
            if begun or not turn.n_tokens:
                del self.turns[turn_id]
                turn.resubmit()

    def abort(self, turn_id: str) -> None:
        """Record the abort."""
        self.aborted.append(turn_id)

    def withdraw(self, turn_id: str) -> None:
        """End a turn that no engine has."""
        self.turns.pop(turn_id).on_engine_event(Cancelled(turn_id))

    def release(self, session_id: str) -> None:
        """Record the release."""
        self.released.append(session_id)

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Ignore the listener; the state never changes."""

    @property
    def last(self) -> Submit:
        """The turn submitted last."""
        return self.submitted[-1]

    @property
    def last_text(self) -> str:
        """The new text of the turn submitted last."""
        return "".join(piece.text for piece in self.last.pieces)

    def say(self, event: TurnEvent) -> None:
        """Deliver ``event`` to the last turn."""
        turn_id = self.last.turn_id
        turn = self.turns.get(turn_id) or self.over[turn_id]
        if isinstance(event, Finished | Failed):
            self.over[turn_id] = turn
            self.turns.pop(turn_id, None)
        turn.on_engine_event(event)

    def start(self) -> None:
        """Give the last turn a slot."""
        turn = self.last
        self.say(Started(turn.turn_id, turn.tokens + packed(self.last_text), len(turn.tokens) // 4))

    def generate(self, text: str) -> None:
        """Generate ``text`` in the last turn."""
        self.say(TokenDelta(self.last.turn_id, packed(text), text))

    def finish(self, reason: str = "stop", *, kept: str = "", end_text: str = "<|im_end|>", **changes: Any) -> None:
        """Finish the last turn, keeping ``kept``; an end text counts as one token."""
        if end_text:
            self.say(TokenDelta(self.last.turn_id, packed("\0"), ""))
        self.say(self.finished(reason, kept=kept, end_text=end_text, **changes))

    def finished(self, reason: str, *, kept: str, end_text: str = "", **changes: Any) -> Finished:
        """The ``Finished`` event of the last turn, keeping ``kept``."""
        config: dict[str, Any] = {
            "turn_id": self.last.turn_id,
            "reason": reason,
            "stop": None,
            "kept_tokens": len(kept) + bool(end_text),
            "kept_chars": len(kept),
            "end_text": end_text,
            "prompt_tokens": 7,
            "cached_tokens": 3,
            "generated_tokens": len(kept) + bool(end_text),
            "queue_ms": 1.0,
            "ttft_ms": 2.0,
            "total_ms": 3.0,
            "tokens_per_s": 4.0,
        }
        return Finished(**(config | changes))

    def overflow(self, n_tokens: int, *, said: str | None = None, text: str = "", **changes: Any) -> None:
        """Report a full context for the last turn; without ``said`` it never started."""
        end = None if said is None else self.finished("context_full", kept=said + text, **changes)
        self.say(ContextFull(turn_id=self.last.turn_id, n_tokens=n_tokens, text=text, end=end))

    def answer(self, text: str) -> None:
        """Run the last turn from start to end."""
        self.start()
        self.generate(text)
        self.finish(kept=text)

    def fail(self, code: str = "engine_crashed") -> None:
        """Fail the last turn."""
        self.say(Failed(turn_id=self.last.turn_id, code=code, message="It failed."))


@dataclass
class FakeEngines:
    """Models by name, each with an engine; a swap changes the default."""

    engines: dict[str, EnginePort] = field(default_factory=lambda: {"toy": FakeEngine()})
    default: str = "toy"
    own_params: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)
    unloadable: dict[str, InferenceCenterError] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(self.engines)

    def engine(self, name: str) -> EnginePort:
        """Return an engine, or raise ``model_not_found``."""
        if name not in self.engines:
            raise not_registered(name, self.engines)
        return self.engines[name]

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Record the request, or raise why the model cannot be loaded."""
        self.engine(name)
        self.wanted.append(name)
        if name in self.unloadable:
            raise self.unloadable[name]

    def sees(self, name: str) -> bool:
        """Return whether the loaded model takes images."""
        model = self.engine(name).model
        return model is not None and model.sees

    def kind_of(self, name: str) -> str:
        """Return that a model generates text, unless a test says otherwise."""
        self.engine(name)
        return self.kinds.get(name, "chat")

    def params_of(self, name: str) -> dict[str, Any]:
        """Return the parameters that a test set for the model."""
        self.engine(name)
        return self.own_params.get(name, {})

    def release(self, session_id: str) -> None:
        """Record the release and pass it to every engine."""
        self.released.append(session_id)
        for engine in self.engines.values():
            engine.release(session_id)


def one_model(engine: EnginePort, name: str = "toy") -> FakeEngines:
    """A daemon with one model."""
    return FakeEngines(engines={name: engine}, default=name)


@dataclass
class FakeSink:
    """A socket that records its events."""

    events: list[Event] = field(default_factory=list)

    def send(self, event: Event) -> None:
        """Record the event."""
        self.events.append(event)

    def replay(self, missed: Sequence[Event]) -> None:
        """Record the events."""
        self.events.extend(missed)

    @property
    def ops(self) -> list[str]:
        """The ops received so far."""
        return [event.op for event in self.events]

    @property
    def last(self) -> Any:
        """The event received last."""
        return self.events[-1]

    @property
    def text(self) -> str:
        """All text received so far."""
        return "".join(event.content for event in self.events if isinstance(event, events.Token))


@dataclass
class FakeJournal:
    """A journal in memory that commits when a test says so."""

    records: list[Record] = field(default_factory=list)
    flushed: list[bool] = field(default_factory=list)
    held: deque[Callable[[], None]] = field(default_factory=deque)
    holding: bool = False
    fault: StorageFault | None = None
    n_pending: int = 0
    n_skipped: int = 0

    def is_incomplete(self, session_id: str) -> bool:
        """Return ``False``: no record is lost."""
        return False

    def of_client(self, client_id: str) -> Journal:
        """Return itself: all clients share one journal."""
        return self

    def write(self, record: Record, *, flush: bool) -> None:
        """Record the record."""
        self.records.append(record)
        self.flushed.append(flush)

    def release(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at once, or hold it back."""
        if self.holding or self.held:
            self.held.append(callback)
        else:
            callback()

    def let_go(self, count: int | None = None) -> None:
        """Release everything held back, or the first ``count`` calls."""
        for _ in range(len(self.held) if count is None else min(count, len(self.held))):
            self.held.popleft()()

    def of(self, kind: type[Any]) -> list[Any]:
        """The records of a type."""
        return [record for record in self.records if isinstance(record, kind)]


@dataclass
class FakeTimer:
    """A scheduled call that a test fires."""

    delay_s: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """Record the cancellation."""
        self.cancelled = True


class FakeQuota(UnlimitedQuota):
    """Counts nothing and only applies the limits."""

    def __init__(self, limits: AccessLimits) -> None:
        self.limits = limits


@dataclass
class SessionHarness:
    """Sessions with one client, engines and a clock that a test controls."""

    engines: FakeEngines = field(default_factory=FakeEngines)
    renderers: PromptRenderers = field(default_factory=InlineTemplates)
    sink: FakeSink = field(default_factory=FakeSink)
    client: Principal = field(default_factory=lambda: Principal("ada", 4, "normal", frozenset({"user"})))
    now: float = 1000.0
    timers: list[FakeTimer] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    journal: FakeJournal | None = field(default_factory=FakeJournal)
    store: SessionStore | None = None
    config_params: Params = field(default_factory=Params)
    settings: SessionSettings = SETTINGS
    max_transcript_chars: int = 10_000
    limits: AccessLimits = NO_LIMITS
    quota_of: Callable[[str, str], Quota] | None = None
    drawn: int = 0
    wall: Callable[[], float] | None = None
    refusal: InferenceCenterError | None = None
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        self.sessions = self.reopen()

    def reopen(self, **settings: Any) -> SessionManager:
        """Create the session manager again, with other ``settings`` where given."""
        self.settings = SessionSettings(**self.settings.model_dump() | settings)
        self.sessions = SessionManager(
            engines=self.engines,
            renderers=self.renderers,
            config_params=self.config_params,
            settings=self.settings,
            journal=self.store or self.journal,
            archive=self.store.reader if self.store is not None else None,
            max_transcript_chars=self.max_transcript_chars,
            observer=self,
            tracer=self.tracer,
            admit=self._admit,
            quota_of=self.quota_of or (lambda _client_id, _token_id: FakeQuota(self.limits)),
            clock=self.wall or (lambda: self.now),
            monotonic=lambda: self.now,
            local_time=lambda: datetime.fromtimestamp(self.now, tz=UTC),
            random_bytes=self._draw,
            call_later=self._call_later,
        )
        return self.sessions

    @property
    def engine(self) -> FakeEngine:
        """The default model's engine."""
        return self.engine_of(self.engines.default)

    @engine.setter
    def engine(self, engine: FakeEngine) -> None:
        self.engines.engines[self.engines.default] = engine

    def engine_of(self, name: str) -> FakeEngine:
        """A model's engine."""
        engine = self.engines.engines[name]
        assert isinstance(engine, FakeEngine)
        return engine

    def add_model(self, name: str, *, loaded: bool = True, **changes: Any) -> FakeEngine:
        """Add another model and return its engine."""
        model = make_model(name=name, **changes) if loaded else None
        status = EngineStatus(state=EngineState.READY if loaded else EngineState.ASLEEP, model=model)
        engine = self.engines.engines[name] = FakeEngine(status=status)
        return engine

    def _admit(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def turn_ended(self, record: TurnRecord) -> None:
        """Record the ended turn."""
        self.records.append(record)

    def create(self, client: Principal | None = None, **fields: Any) -> str:
        """Open a session and return its id."""
        request = requests.CreateSession(op="create_session", **fields)
        return self.sessions.create(client or self.client, request, self.sink).session_id

    def infer(self, session_id: str, prompt: str = "Hi", **fields: Any) -> None:
        """Start a turn."""
        given: dict[str, Any] = {"prompt": prompt} if "messages" not in fields else {}
        self.sessions.infer(
            self.client, requests.Infer(op="infer", session_id=session_id, **given, **fields), self.sink
        )

    def turn(self, session_id: str, prompt: str, answer: str, **fields: Any) -> str:
        """Run a turn to its end on the default model, and return its id."""
        return self.turn_on(self.engine, session_id, prompt, answer, **fields)

    def turn_on(self, engine: FakeEngine, session_id: str, prompt: str, answer: str, **fields: Any) -> str:
        """Run a turn to its end, and return its id."""
        self.infer(session_id, prompt, **fields)
        engine.answer(answer)
        return engine.last.turn_id

    def append(self, session_id: str, *messages: tuple[Any, str]) -> None:
        """Append messages, given as role and content."""
        said: list[ChatMessage | MessageInParts] = [
            ChatMessage(role=role, content=content) for role, content in messages
        ]
        request = requests.Append(op="append", session_id=session_id, messages=said)
        self.sessions.append(self.client, request, self.sink)

    def fork(self, session_id: str, turn: str | None = None, client: Principal | None = None) -> str:
        """Fork a session and return the new one's id."""
        request = requests.ForkSession(op="fork_session", session_id=session_id, turn=turn)
        return self.sessions.fork(client or self.client, request, self.sink).session_id

    def rewind(self, session_id: str, turn: str) -> events.SessionRewound:
        """Rewind a session."""
        request = requests.RewindSession(op="rewind_session", session_id=session_id, turn=turn)
        self.sessions.rewind(self.client, request, self.sink)
        rewound = self.sink.last
        assert isinstance(rewound, events.SessionRewound)
        return rewound

    def resume(self, session_id: str, sink: FakeSink | None = None, **fields: Any) -> None:
        """Resume a session."""
        request = requests.ResumeSession(op="resume_session", session_id=session_id, **fields)
        self.sessions.resume(self.client, request, sink or self.sink)

    def close(self, session_id: str) -> None:
        """Close a session."""
        request = requests.CloseSession(op="close_session", session_id=session_id)
        self.sessions.close(self.client, request, self.sink)

    def abort(self, session_id: str, **fields: Any) -> None:
        """Abort the running turn."""
        self.sessions.abort(self.client, requests.Abort(op="abort", session_id=session_id, **fields))

    def get(self, session_id: str) -> events.Session:
        """The full description of a session."""
        return self.sessions.get(self.client, requests.GetSession(op="get_session", session_id=session_id))

    def transcript(self, session_id: str) -> list[tuple[str, str]]:
        """Roles and contents of a session's messages."""
        return [(message.role, message.content) for message in self.get(session_id).transcript]

    def fire(self) -> None:
        """Fire the last timer."""
        timer = self.timers[-1]
        assert not timer.cancelled
        timer.callback()

    def _draw(self, size: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(size, "little")

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, callback))
        return self.timers[-1]


@pytest.fixture
def world() -> SessionHarness:
    """Sessions with one client and an engine that is ready."""
    return SessionHarness()


@pytest.fixture
def model() -> ModelInfo:
    """A model without a template of its own."""
    return make_model()
