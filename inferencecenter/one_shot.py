"""Runs one prompt without a daemon, port, accounts or files: an engine process and a session in memory."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from inferencecenter.config.settings import SessionSettings, bundled_model, bundled_projector
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.vram_calibration import PLAN_FILE, VramCalibration
from inferencecenter.ipc.engine_options import KvCachePaths
from inferencecenter.ipc.port import EngineState
from inferencecenter.models.registry import DEMO, ModelSpec, draft_file, not_registered, read_registry
from inferencecenter.protocol import requests
from inferencecenter.protocol.events import ContextShifted, End, Error, Progress, Queued, Reasoning, Token
from inferencecenter.protocol.values import IMAGE_MARK, ChatMessage
from inferencecenter.sessions.context import Principal, parse_config_params
from inferencecenter.sessions.images.library import MAX_HELD_BYTES, ImageLibrary
from inferencecenter.sessions.manager import SessionManager
from inferencecenter.sessions.prompt.template_process import TemplateProcessPool
from inferencecenter.supervisor.engine_options import engine_options
from inferencecenter.supervisor.planning import Planner
from inferencecenter.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from inferencecenter.config.settings import Settings
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.protocol.base import Event

_STOP_S: Final = 1.0
_CLIENT: Final = Principal("shell", max_sessions=1, priority="interactive", scopes=frozenset({"user"}))
_SETTLED: Final = (EngineState.READY, EngineState.FAILED)

Shown: TypeAlias = Queued | Progress | ContextShifted | Token | Reasoning | End
"""The events of a turn, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotRequest:
    """A prompt after ``images``, which are files; with ``raw`` it is continued as plain text, after ``system``."""

    prompt: str
    params: Mapping[str, Any]
    images: tuple[bytes, ...] = ()
    system: str | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotResult:
    """How the turn ended; ``end`` is ``None`` if it never began, ``interrupted`` the signal that ended it, or 0."""

    end: End | None
    interrupted: int = 0


def chosen_model(settings: Settings, wanted: str) -> ModelSpec:
    """Return a model by its registered name, ``demo``, or the path of its file.

    Raises:
        InferenceCenterError: ``model_not_found``, or ``invalid_config``.
    """
    registry = read_registry(settings)
    if wanted in registry.models:
        return registry.get(wanted)
    path, mmproj = (bundled_model(), bundled_projector()) if wanted == DEMO else (Path(wanted), None)
    if "/" not in wanted and path.suffix != ".gguf" and not path.is_file():
        raise not_registered(wanted, {DEMO: None, **registry.models})
    draft = draft_file(settings.engine, registry.models, of=path.stem)
    return ModelSpec(name=path.stem, path=path, engine=settings.engine, draft=draft, mmproj=mmproj)


async def complete(
    spec: ModelSpec,
    question: OneShotRequest,
    settings: Settings,
    *,
    on_status: Callable[[EngineStatus], None],
    on_event: Callable[[Shown], None],
) -> OneShotResult:
    """Load a model, run one prompt, and unload the model; to be run in the main thread.

    SIGINT and SIGTERM end the answer, and keep the text so far.

    Args:
        spec: The model. It runs in one slot.
        question: The request.
        settings: The settings of engines and GPUs. Nothing is written into the state directory.
        on_status: Called with each change of the engine's state, and at each tenth of the load progress.
        on_event: Called with each event of the turn; an exception ends the turn and is raised from here.

    Raises:
        InferenceCenterError: Why there is no answer.
    """
    config_params = parse_config_params(settings)
    images = ImageLibrary(None, max_bytes=MAX_HELD_BYTES, clock=time.time)
    supervisor = _supervisor(spec, settings, pixels=images.pixels)
    templates = TemplateProcessPool()
    turn = _Turn(on_event)

    def moved(status: EngineStatus) -> None:
        on_status(status)
        if status.state in _SETTLED:
            turn.engine_settled.set()

    supervisor.subscribe(moved)
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, turn.interrupt, each)
    supervisor.start()
    templates.start_spare()
    try:
        await turn.engine_settled.wait()
        if turn.interrupted:
            return OneShotResult(end=None, interrupted=turn.interrupted)
        if supervisor.load_failure is not None:
            raise supervisor.load_failure
        sessions = SessionManager(
            engines=_OneModel(spec, supervisor),
            renderers=templates,
            config_params=config_params,
            settings=SessionSettings(max_sessions=1),
            images=images,
        )
        await turn.begin(sessions, question)
        return OneShotResult(end=await turn.ended, interrupted=turn.interrupted)
    finally:
        await supervisor.stop(suspend_deadline_s=_STOP_S)
        await templates.aclose()
        images.close()


class _Turn:
    """The only turn, and the sink for its session's events. Implements ``sessions.client.EventSink``."""

    def __init__(self, on_event: Callable[[Shown], None]) -> None:
        self._on_event = on_event
        self._abort: Callable[[], None] | None = None
        self.engine_settled = asyncio.Event()
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.interrupted = 0

    async def begin(self, sessions: SessionManager, question: OneShotRequest) -> None:
        """Open a session and submit the turn.

        Raises:
            InferenceCenterError: The turn is refused.
        """
        created = sessions.create(
            _CLIENT,
            requests.CreateSession(
                op="create_session", system=question.system, mode="raw" if question.raw else "chat", store=False
            ),
            self,
        )
        session_id = created.session_id
        self._abort = lambda: sessions.abort(_CLIENT, requests.Abort(op="abort", session_id=session_id))
        asked: dict[str, Any] = {"prompt": question.prompt}
        if question.images:
            owner = sessions.image_owner(_CLIENT, session_id)
            images = [await sessions.images.add(owner, file, path="images") for file in question.images]
            content = IMAGE_MARK * len(images) + question.prompt.replace(IMAGE_MARK, "\ufffd")
            asked = {"messages": [ChatMessage(role="user", content=content, images=tuple(images))]}
        sessions.infer(
            _CLIENT,
            requests.Infer(op="infer", session_id=session_id, params=dict(question.params), **asked),
            self,
        )

    def interrupt(self, number: int) -> None:
        """End the turn, or the wait for it; a second signal has its default effect."""
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(each)
        self.interrupted = number
        self.engine_settled.set()
        if self._abort is not None and not self.ended.done():
            self._abort()

    def send(self, event: Event) -> None:
        """Pass on an event of the turn; a closed output ends it."""
        if self.ended.done():
            return
        try:
            if isinstance(event, Shown):
                self._on_event(event)
        except OSError as error:
            self.ended.set_exception(error)
            return
        if isinstance(event, End):
            self.ended.set_result(event)
        elif isinstance(event, Error):
            self.ended.set_exception(
                InferenceCenterError(ErrorCode(event.code), event.message, hint=event.hint, field=event.field)
            )


@dataclass(frozen=True, slots=True)
class _OneModel:
    """A single model. Implements ``ipc.port.ModelsPort``."""

    spec: ModelSpec
    supervisor: Supervisor

    @property
    def default(self) -> str:
        return self.spec.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.spec.name,)

    @property
    def aliases(self) -> Mapping[str, str]:
        return {}

    def engine(self, name: str) -> Supervisor:
        if name != self.spec.name:
            raise not_registered(name, {self.spec.name: self.spec})
        return self.supervisor

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Raise if the model could not be loaded."""
        if (failure := self.engine(name).load_failure) is not None:
            raise failure

    def kind_of(self, name: str) -> str:
        self.engine(name)
        return self.spec.kind

    def sees(self, name: str) -> bool:
        model = self.engine(name).model
        return model is not None and model.sees

    def params_of(self, name: str) -> Mapping[str, Any]:
        self.engine(name)
        return self.spec.params

    def release(self, session_id: str) -> None:
        """Have the engine drop a session's KV."""
        self.supervisor.release(session_id)


def _supervisor(spec: ModelSpec, settings: Settings, *, pixels: Callable[[str], Awaitable[bytes | None]]) -> Supervisor:
    """Return the engine's supervisor; the VRAM calibration is used but not updated."""
    engine = spec.engine.model_copy(update={"slots": 1, "sleep_after_s": -1.0, "queue_warning": 0})
    alone = replace(spec, engine=engine)
    planner = Planner(engine=engine, gpu=settings.gpu, calibration=VramCalibration(settings.state_dir / PLAN_FILE))
    return Supervisor(
        planner.first(engine_options(alone, KvCachePaths())),
        plan_again=planner.again,
        pixels=pixels,
    )
