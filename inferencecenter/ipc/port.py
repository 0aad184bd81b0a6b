"""The engine as the front sees it: an interface that the supervisor implements and sessions depend on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.ipc.messages import Detokenized, ModelInfo, PromptSegment, Submit, Tokenized, TurnEvent


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    BACKOFF = "backoff"
    SUSPENDING = "suspending"
    ASLEEP = "asleep"


_SERVING: Final = (EngineState.READY, EngineState.SUSPENDING, EngineState.ASLEEP)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine for hello, readiness, metrics and status.

    ``load_fraction`` runs from 0 to 1; ``detail`` is the last failure in words, empty when all is well.
    ``running`` and ``waiting`` count turns, ``rss_bytes`` is the child's resident memory. ``parked_sessions`` have
    their KV outside the slots, and with shared prefixes it takes ``parked_bytes``, of which ``parked_ram_bytes`` are in
    memory.
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

    @property
    def serves(self) -> bool:
        """Whether a turn that comes now will run with nothing else having to happen; it wakes an engine that sleeps."""
        return self.state in _SERVING


class EngineTurn(Protocol):
    """A turn as the engine's side sees it. Its session owns it and all that it has generated."""

    @property
    def turn_id(self) -> str:
        """Its name."""

    @property
    def client_id(self) -> str:
        """The client that asked for it."""

    @property
    def n_tokens(self) -> int:
        """Tokens it has generated so far."""

    def prepare(self, then: Callable[[], None]) -> bool:
        """Tell whether ``submission`` can be asked for now; if not, call ``then`` when to ask this again.

        Only the last ``then`` is called, on the event loop and never before this returns.

        Raises:
            InferenceCenterError: It cannot run; ``submission`` raises the same.
        """

    def submission(self) -> Submit:
        """Return the turn, or what is left of it, as it is to run now; asked for each time an engine takes it.

        To be called when ``prepare`` has returned true.

        Raises:
            InferenceCenterError: It cannot run; it is told ``Failed`` with this.
        """

    def on_engine_event(self, event: TurnEvent) -> None:
        """Take an event; the last is ``Finished``, ``Failed``, ``Cancelled`` or, if it may shift, ``ContextFull``."""

    def delayed(self, seconds: float) -> None:
        """Take note that it waits so long at least, as other models keep their place in memory."""

    def interrupted(self) -> None:
        """Take note that its engine is gone: it waits until it is submitted to another."""

    def recalled(self) -> None:
        """Take note that no engine has it, and that it is to be submitted to the one that it should have now."""


class EnginePort(Protocol):
    """What sessions and the server may ask of the engine. Called on the event loop; nothing here blocks or awaits."""

    @property
    def status(self) -> EngineStatus:
        """The engine's state now."""

    def submit(self, turn: EngineTurn) -> int:
        """Hand over a turn and return its place in the queue, 0 when a slot is free.

        It is called on the event loop with each event, the last being ``Finished``, ``Failed``, ``Cancelled`` or, for a
        turn that may shift, ``ContextFull``: exactly one of them. While no engine is ready the turn waits for one; when
        an engine dies its turns are ``interrupted`` and go on with the next. Only a turn that ends engines by itself
        hears ``Failed`` with ``engine_crashed``. A turn that overflowed may be submitted again.

        Raises:
            InferenceCenterError: ``engine_unavailable``, ``queue_full``, ``rate_limited`` for a client whose turns have
                ended several engines, or what ``submission`` says.
        """

    def abort(self, turn_id: str) -> None:
        """Ask for the turn's end: it hears ``Finished`` with ``aborted``, or ``Cancelled`` where no engine has it."""

    def release(self, session_id: str) -> None:
        """Let the engine forget a session's KV."""

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Ask for the tokens of a text, with what begins a sequence if they are the ``first`` of one.

        Questions share their room by client, and one whose future is cancelled is withdrawn, also from the engine.
        An engine that sleeps is woken. What is awaited raises ``InferenceCenterError``: ``model_loading`` where none is
        ready in time, ``engine_unavailable`` where it is lost meanwhile, ``invalid_request`` for what is no text.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``overloaded``; nothing is asked.
        """

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Ask for the text of tokens, which are 32-bit numbers; otherwise as ``tokenize``.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``overloaded``; nothing is asked.
        """

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` on the event loop whenever ``status.state`` changes, and at each tenth of the loading."""


class ModelsPort(Protocol):
    """The models that there are, each with an engine that is loaded when it is wanted. Called on the event loop."""

    @property
    def default(self) -> str:
        """Name of the model of all sessions that name none; another one after a swap."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models."""

    def engine(self, name: str) -> EnginePort:
        """Return the engine of a model, loaded or not. What runs on it goes on when another takes its place.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Load a model for a client, if it is not loaded, though no turn asks for it yet.

        Raises:
            InferenceCenterError: ``model_not_found``, or why it could not be loaded.
        """

    def params_of(self, name: str) -> Mapping[str, Any]:
        """Return the parameters that the configuration gives a model, between its file's and everybody's.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """

    def release(self, session_id: str) -> None:
        """Let all engines forget a session's KV."""
