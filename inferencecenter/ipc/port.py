"""The engine as the front sees it: an interface that the supervisor implements and sessions depend on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.ipc.messages import (
        Detokenized,
        Embed,
        ModelInfo,
        PromptSegment,
        Submit,
        Tokenized,
        TokensCounted,
        TurnEvent,
    )


class EngineState(StrEnum):
    """State of the engine process."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    BACKOFF = "backoff"
    SUSPENDING = "suspending"
    ASLEEP = "asleep"


_SERVING: Final = (EngineState.READY, EngineState.SUSPENDING, EngineState.ASLEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollStatus:
    """A change of a model that replaces its replicas one after the other: ``done`` of ``total`` are replaced.

    It has ``failed`` if the former replicas were put back. ``detail`` is the reason for that, or what it waits for.
    """

    done: int
    total: int
    failed: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine for hello, readiness, metrics and status.

    ``load_fraction`` runs from 0 to 1; ``detail`` describes the last failure, empty when there is none. ``running`` and
    ``waiting`` count turns, ``rss_bytes`` is the child's resident memory. ``parked_sessions`` have their KV outside the
    slots; with shared prefixes it takes ``parked_bytes``, of which ``parked_ram_bytes`` are in memory. ``node`` is the
    machine of a replica, and ``copying`` the progress of copying a file there, as text.

    Of a model with several ``replicas`` it is the state of the most usable one, the sum of their figures, and a
    ``model`` with the slots of all. ``roll`` is the change that replaces them, or the last one if it failed.
    """

    state: EngineState
    model: ModelInfo | None = None
    pid: int | None = None
    load_fraction: float = 0.0
    detail: str = ""
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    rss_bytes: int = 0
    parked_sessions: int = 0
    parked_bytes: int = 0
    parked_ram_bytes: int = 0
    node: str = ""
    copying: str = ""
    replicas: tuple[EngineStatus, ...] = ()
    roll: RollStatus | None = None

    @property
    def description(self) -> str:
        """What is copied, else the last failure; empty if there is neither."""
        return self.copying or self.detail

    @property
    def serves(self) -> bool:
        """Whether a turn submitted now runs without intervention; it wakes a sleeping engine."""
        return self.state in _SERVING


@dataclass(frozen=True, slots=True)
class SessionKv:
    """The KV that a turn can use: that of its session, or of the session that this one was forked from.

    Without it ``n_tokens`` of history have to be prefilled.
    """

    session_id: str
    n_tokens: int
    forked_from: str | None = None


class EngineTurn(Protocol):
    """A turn as the engine's side sees it. Its session owns it and everything it has generated.

    A request for embeddings is one too: it has no session, and generates no tokens.
    """

    @property
    def turn_id(self) -> str: ...

    @property
    def client_id(self) -> str:
        """The client that requested it."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens generated so far."""

    @property
    def session_kv(self) -> SessionKv | None:
        """The KV by which one of several replicas is chosen; ``None`` without a session."""

    def submission(self, then: Callable[[], None]) -> Submit | Embed | None:
        """Return the turn, or the rest of it, as it should run now; called each time an engine may take it.

        ``None`` while its prompt is rendered: ``then`` is called when to ask again, and only the last one, on the event
        loop and never before this returns.

        Raises:
            InferenceCenterError: It cannot run; it receives ``Failed`` with this error.
        """

    def on_engine_event(self, event: TurnEvent) -> None:
        """Handle an event.

        The last is ``Finished``, ``Failed``, ``Cancelled`` or, if it may shift, ``ContextFull``; of a request for
        embeddings ``EmbeddingDone``, ``Failed`` or ``Cancelled``.
        """

    def on_placed(self, node: str) -> None:
        """Handle the choice of a machine, before ``submission`` is called for an engine there."""

    def on_delay(self, seconds: float) -> None:
        """Handle a delay of at least this long, because other models occupy the memory."""

    def on_engine_lost(self) -> None:
        """Handle the loss of its engine: the turn waits until it is submitted to another."""

    def resubmit(self) -> None:
        """Submit the turn, which no engine has any more, to its session's current engine."""


class EnginePort(Protocol):
    """The engine's interface for sessions and server. Called on the event loop; nothing here blocks or awaits."""

    @property
    def status(self) -> EngineStatus:
        """The engine's state now."""

    @property
    def model(self) -> ModelInfo | None:
        """The model as it was loaded last, as in ``status``; ``None`` before the first load."""

    def submit(self, turn: EngineTurn) -> int:
        """Submit a turn and return its position in the queue, 0 when a slot is free.

        Its ``on_engine_event`` is called on the event loop with each event, the last being exactly one ``Finished``,
        ``Failed``, ``Cancelled`` or, for a turn that may shift, ``ContextFull``. The turn waits while no engine is
        ready; when an engine is lost, its turns get ``on_engine_lost`` and resume on the next. Only a turn that crashes
        engines by itself receives ``Failed`` with ``engine_crashed``. A turn that overflowed may be submitted again.

        Raises:
            InferenceCenterError: ``engine_unavailable``, ``queue_full``, ``rate_limited`` for a client whose turns have
                crashed several engines, or any error of ``submission``.
        """

    def abort(self, turn_id: str) -> None:
        """Abort a turn: it receives ``Finished`` with ``aborted``, or ``Cancelled`` if no engine has it."""

    def release(self, session_id: str) -> None:
        """Drop a session's KV."""

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Request the tokens of a text, with BOS if they are the ``first`` of a sequence.

        Lookups share a budget by client; cancelling the future cancels the lookup, also in the engine. A sleeping
        engine is woken. The future raises ``InferenceCenterError``: ``model_loading`` if no engine is ready in time,
        ``engine_unavailable`` if it is lost meanwhile, ``invalid_request`` for invalid text.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``overloaded``; nothing was requested.
        """

    def count_tokens(
        self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str
    ) -> asyncio.Future[TokensCounted]:
        """Request the number of tokens of a text; otherwise as ``tokenize``.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``overloaded``; nothing was requested.
        """

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Request the text of tokens, which are 32-bit numbers; otherwise as ``tokenize``.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``overloaded``; nothing was requested.
        """

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` on the event loop when ``status.state`` changes, and at each tenth of loading."""


class ModelsPort(Protocol):
    """All models, each with an engine that is loaded on demand. Called on the event loop."""

    @property
    def default(self) -> str:
        """Name of the model of sessions that name none; changes with a swap."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names, each with the model's."""

    def engine(self, name: str) -> EnginePort:
        """Return the engine of a model, loaded or not. Its turns continue when a swap replaces it.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Load a model for a client, if it is not loaded, without a turn.

        Raises:
            InferenceCenterError: ``model_not_found``, or the reason it could not be loaded.
        """

    def kind_of(self, name: str) -> str:
        """Return a model's ``config.sections.ModelKind``, whether it is loaded or not.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def sees(self, name: str) -> bool:
        """Return whether a model takes images, whether it is loaded or not.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def params_of(self, name: str) -> Mapping[str, Any]:
        """Return a model's configured parameters, which override its file's and are overridden by requests.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def release(self, session_id: str) -> None:
        """Drop a session's KV in all engines."""
