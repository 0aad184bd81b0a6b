"""The host's side of wasi-nn, for core modules and components alike: graphs, execution contexts and their turns.

A guest runs in a thread of its own and calls in from there; while it waits, that thread runs the asyncio client
(``guest_loop``). ``stop`` is called from another: it ends every wait of the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from inferencecenter.client.errors import TryLaterError
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.events import Token
from inferencecenter.wasm.errors import NnErrorKind, WasiNnError, wasi_nn_error
from inferencecenter.wasm.guest_config import MAX_CONTEXTS, GuestConfig, parse_config

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from inferencecenter.client import Client
    from inferencecenter.client.answer import Answer
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.turn import ClientTurn
    from inferencecenter.wasm.guest_loop import GuestLoop

    T = TypeVar("T")

MAX_GRAPHS: Final = 16
MAX_NAME_BYTES: Final = 256
MAX_INPUT_BYTES: Final = 64 * 1024 * 1024
"""Bytes of all prompts that a guest has set; the host keeps them until their turns begin."""
DEFAULT_MODEL: Final = "default"
"""Name under which guests find the daemon's default model."""
_MAX_MESSAGES: Final = 64
_CLOSE_TIMEOUT_S: Final = 5.0
_RETRY_MARGIN_S: Final = 0.05


class GuestStoppedError(Exception):
    """The run of the guest was stopped while it waited for the host."""


class GuestLog:
    """Lines on standard error: traced calls, warnings and errors, of which a run writes a bounded number.

    Args:
        write: Writes a line.
        traces: Whether calls are traced.
    """

    def __init__(self, write: Callable[[str], object], *, traces: bool = False) -> None:
        self._write = write
        self.traces = traces
        self._said: set[str] = set()

    def trace(self, text: str) -> None:
        if self.traces:
            self._write(f"wasi-nn: {text}")

    def once(self, text: str) -> None:
        """Write a line unless it was written before, or too many others were."""
        if text not in self._said and len(self._said) < _MAX_MESSAGES:
            self._said.add(text)
            self._write(f"wasi-nn: {text}")
            if len(self._said) == _MAX_MESSAGES:
                self._write("wasi-nn: further messages are omitted")


@dataclass(slots=True)
class _Graph:
    """A model, with the configuration for its contexts and the session that its loading opened.

    The first context takes that session.
    """

    model: str | None
    config: GuestConfig
    spare: ClientSession | None


@dataclass(slots=True)
class _Stream:
    """A turn that is read piece by piece: its text, then its end or its failure."""

    pieces: deque[str | Answer | BaseException]
    pump: asyncio.Task[None]


@dataclass(slots=True)
class _Context:
    """An execution context: a session, its next inputs and its last outputs."""

    graph: _Graph
    session: ClientSession
    config: GuestConfig
    used: int
    prompt: str | None = None
    n_prompt_bytes: int = 0
    stream: _Stream | None = None
    piece: bytes = b""
    texts: list[str] = field(default_factory=list)
    answer: Answer | None = None


class InferenceHost:
    """Graphs and execution contexts of one guest.

    Args:
        client: An open client, which runs in ``loop``.
        loop: The client's loop.
        models: Models by the names under which the guest finds them; without it, all of the account's.
        stores: Whether the daemon stores the sessions, so that they survive its restart.
        ttl_s: Idle seconds after which a session expires, longer than the guest may run.
        log: Receives warnings and errors.
    """

    def __init__(  # noqa: PLR0913 - what a guest is given
        self,
        client: Client,
        loop: GuestLoop,
        *,
        models: Mapping[str, str] | None,
        stores: bool,
        ttl_s: float,
        log: GuestLog,
    ) -> None:
        self._client = client
        self._loop = loop
        self._models = models
        self._stores = stores
        self._ttl_s = ttl_s
        self._log = log
        self._graphs: dict[int, _Graph] = {}
        self._contexts: dict[int, _Context] = {}
        self._n_graphs = 0
        self._n_contexts = 0
        self._n_uses = 0
        self._is_stopped = threading.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} graphs={len(self._graphs)} contexts={len(self._contexts)}>"

    # Graphs.

    def load_by_name(self, name: str, config: bytes | None = None) -> int:
        """Load a model and return the handle of its graph."""
        if len(self._graphs) >= MAX_GRAPHS:
            raise WasiNnError(NnErrorKind.BUSY, f"a guest may load {MAX_GRAPHS} graphs; unload one")
        parsed = GuestConfig() if not config else parse_config(config)
        self._note(parsed)
        model = self._model(name)
        spare = self._open_session(model, parsed)
        self._n_graphs += 1
        self._graphs[self._n_graphs] = _Graph(model, parsed, spare)
        return self._n_graphs

    def unload(self, graph: int) -> None:
        """Close a graph with all its contexts."""
        loaded = self._graph(graph)
        for handle in self._contexts_of(loaded):
            self.finalize_execution_context(handle)
        self.release(graph)

    def release(self, graph: int) -> None:
        """Forget a graph; its contexts stay open."""
        loaded = self._graph(graph)
        del self._graphs[graph]
        if loaded.spare is not None:
            self._wait(_close_session(loaded.spare))

    def init_execution_context(self, graph: int) -> int:
        """Open a session and return the handle of its context."""
        loaded = self._graph(graph)
        self._make_room(loaded)
        session, loaded.spare = loaded.spare, None
        if session is None:
            session = self._open_session(loaded.model, loaded.config)
        self._n_contexts += 1
        self._contexts[self._n_contexts] = _Context(loaded, session, loaded.config, used=self._next_use())
        return self._n_contexts

    def finalize_execution_context(self, context: int) -> None:
        """Abort the context's turn and close its session."""
        opened = self._context(context)
        self._end_stream(opened)
        del self._contexts[context]
        self._wait(_close_session(opened.session))

    # Turns.

    def set_input(self, context: int, index: int, data: bytes) -> None:
        """Set the prompt, tensor 0, or the configuration of the context's turns, tensor 1."""
        opened = self._context(context)
        self.check_input_size(context, len(data))
        if index == 0:
            opened.prompt = _text(data, "the prompt")
            opened.n_prompt_bytes = len(data)
        elif index == 1:
            opened.config = parse_config(data, base=opened.graph.config)
            self._note(opened.config)
        else:
            raise WasiNnError(
                NnErrorKind.INVALID_ARGUMENT, f"input {index} does not exist; 0 is the prompt, 1 metadata"
            )

    def check_input_size(self, context: int, n_bytes: int) -> None:
        """Check that there is room for an input, which can be done before it is copied.

        Raises:
            WasiNnError: ``TOO_LARGE``, or the context does not exist.
        """
        opened = self._context(context)
        others = sum(each.n_prompt_bytes for each in self._contexts.values() if each is not opened)
        if others + n_bytes > MAX_INPUT_BYTES:
            raise WasiNnError(
                NnErrorKind.TOO_LARGE,
                f"a guest's inputs have at most {MAX_INPUT_BYTES} bytes; this has {n_bytes}, other prompts {others}",
            )

    def compute(self, context: int) -> None:
        """Compute a whole turn."""
        opened = self._context(context)
        stream = self._begin(opened)
        writes = opened.config.stream_stdout
        while (piece := self._next_piece(opened, stream)) is not None:
            if writes:
                sys.stdout.write(piece)
                sys.stdout.flush()
        self._check_end(opened)

    def compute_single(self, context: int) -> None:
        """Wait for the next piece of the turn, which the first call begins."""
        opened = self._context(context)
        stream = opened.stream or self._begin(opened)
        piece = self._next_piece(opened, stream)
        if piece is None:
            self._check_end(opened)
            raise WasiNnError(NnErrorKind.END_OF_SEQUENCE, "the answer is complete")
        opened.piece = piece.encode()

    def fini_single(self, context: int) -> None:
        """End the streamed turn, aborting it if the answer is not complete."""
        opened = self._context(context)
        self._end_stream(opened)

    def output(self, context: int, index: int) -> bytes:
        """Return the text so far, tensor 0, or metadata, tensor 1."""
        opened = self._context(context)
        if index == 0:
            return "".join(opened.texts).encode()
        return self._output_metadata(opened, index)

    def output_single(self, context: int, index: int) -> bytes:
        """Return the latest piece of a streamed answer, tensor 0, or metadata, tensor 1."""
        opened = self._context(context)
        return opened.piece if index == 0 else self._output_metadata(opened, index)

    # The end.

    def stop(self) -> None:
        """End every wait of the guest, from another thread."""
        self._is_stopped.set()
        self._loop.call_soon(self._loop.wake)

    def close(self) -> None:
        """Abort all turns and close all sessions, from any thread once the guest has ended or is stopped."""
        self._is_stopped.set()
        contexts, self._contexts = list(self._contexts.values()), {}
        graphs, self._graphs = list(self._graphs.values()), {}
        sessions = [context.session for context in contexts]
        sessions += [graph.spare for graph in graphs if graph.spare is not None]
        for context in contexts:
            if context.stream is not None:
                self._loop.cancel(context.stream.pump)

        async def close_all() -> None:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*map(_close_session, sessions))

        if sessions:
            with contextlib.suppress(InferenceCenterError, TimeoutError):
                self._loop.call(close_all())

    def _model(self, name: str) -> str | None:
        if self._models is not None:
            if name not in self._models:
                raise WasiNnError(NnErrorKind.NOT_FOUND, f"the guest may load {', '.join(self._models)}, not {name!r}")
            return self._models[name]
        return None if name == DEFAULT_MODEL else name

    def _graph(self, handle: int) -> _Graph:
        if (graph := self._graphs.get(handle)) is None:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"{handle} is not a graph of this guest")
        return graph

    def _context(self, handle: int) -> _Context:
        if (context := self._contexts.get(handle)) is None:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"{handle} is not an execution context of this guest")
        context.used = self._next_use()
        return context

    def _next_use(self) -> int:
        self._n_uses += 1
        return self._n_uses

    def _contexts_of(self, graph: _Graph) -> dict[int, _Context]:
        return {handle: context for handle, context in self._contexts.items() if context.graph is graph}

    def _make_room(self, graph: _Graph) -> None:
        """Check that a context may be opened, or close the least recently used one of the graph for it."""
        own, config = self._contexts_of(graph), graph.config
        if len(own) < config.max_contexts and len(self._contexts) < MAX_CONTEXTS:
            return
        if not config.recycle or not own:
            raise WasiNnError(
                NnErrorKind.BUSY,
                f"{len(own)} execution contexts of the graph and {len(self._contexts)} of the guest are open, of"
                f" {config.max_contexts} and {MAX_CONTEXTS}; finalize one",
            )
        self.finalize_execution_context(min(own, key=lambda handle: own[handle].used))

    def _open_session(self, model: str | None, config: GuestConfig) -> ClientSession:
        session = dict(config.session)
        ttl_s = min(session.pop("ttl_s", self._ttl_s), self._ttl_s)
        return self._wait(
            self._client.create_session(
                model=model, params=config.raw_params, store=self._stores, ttl_s=ttl_s, **session
            )
        )

    def _begin(self, context: _Context) -> _Stream:
        graph = context.graph
        running = sum(each.stream is not None for each in self._contexts_of(graph).values())
        if context.stream is not None:
            raise WasiNnError(NnErrorKind.BUSY, "the context streams an answer; end it with fini_single")
        if running >= graph.config.max_streams:
            raise WasiNnError(NnErrorKind.BUSY, f"max_concurrent is {graph.config.max_streams}")
        if not context.prompt:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, "there is no prompt: set input 0 before each turn")
        try:
            turn = context.session.infer(context.prompt, params=context.config.raw_params, **context.config.constraints)
        except InferenceCenterError as error:
            raise wasi_nn_error(error) from None
        context.n_prompt_bytes = 0
        context.prompt, context.piece, context.texts, context.answer = None, b"", [], None
        pieces: deque[str | Answer | BaseException] = deque()
        context.stream = _Stream(pieces, self._loop.start(_pump(turn, pieces, self._loop.wake)))
        return context.stream

    def _next_piece(self, context: _Context, stream: _Stream) -> str | None:
        """Return the next piece of text; ``None`` at the end, which ends the stream."""
        pieces = stream.pieces
        if not pieces:
            self._loop.wait(lambda: bool(pieces) or self._is_stopped.is_set())
        if self._is_stopped.is_set():
            raise GuestStoppedError
        item = pieces.popleft()
        if isinstance(item, str):
            context.texts.append(item)
            return item
        context.stream = None
        if isinstance(item, InferenceCenterError):
            raise wasi_nn_error(item) from None
        if isinstance(item, BaseException):
            raise item
        context.answer = item
        return None

    def _end_stream(self, context: _Context) -> None:
        stream, context.stream = context.stream, None
        if stream is not None:
            self._loop.cancel(stream.pump)

    def _check_end(self, context: _Context) -> None:
        assert context.answer is not None, "the turn has ended"
        if (failure := _FAILURES.get(context.answer.finish_reason or "aborted")) is not None:
            raise WasiNnError(*failure)

    def _output_metadata(self, context: _Context, index: int) -> bytes:
        if index != 1:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"output {index} does not exist; 0 is the text, 1 metadata")
        answer = context.answer
        if answer is None or answer.usage is None:
            return orjson.dumps({"output_tokens": len(context.texts)})
        usage = answer.usage
        return orjson.dumps(
            {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "finish_reason": answer.finish_reason,
                "warnings": answer.warnings,
            }
        )

    def _note(self, config: GuestConfig) -> None:
        self._log.traces = self._log.traces or config.trace
        if not config.quiet:
            for warning in config.warnings:
                self._log.once(warning)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = self._loop.start(coroutine)
        self._loop.wait(lambda: task.done() or self._is_stopped.is_set())
        if not task.done():
            self._loop.cancel(task)
            raise GuestStoppedError
        try:
            return task.result()
        except InferenceCenterError as error:
            raise wasi_nn_error(error) from None


_FAILURES: Final[Mapping[str, tuple[NnErrorKind, str]]] = {
    "context_full": (NnErrorKind.CONTEXT_FULL, "the context is full; the output is incomplete"),
    "time": (NnErrorKind.TIMEOUT, "the turn reached max_time_ms; the output is incomplete"),
    "quota_exceeded": (NnErrorKind.SECURITY, "the token's quota is used up; the output is incomplete"),
    "aborted": (NnErrorKind.RUNTIME_ERROR, "the turn was aborted; the output is incomplete"),
}
"""Ends of a turn that are errors, although its output can be read."""


async def _close_session(session: ClientSession) -> None:
    """Close a session, waiting while the daemon limits the client's rate: a guest must not leave sessions behind."""
    while True:
        try:
            await session.leave(failed=False)
        except TryLaterError as error:
            await asyncio.sleep((error.retry_after_ms or 0) / 1000 + _RETRY_MARGIN_S)
        else:
            return


async def _pump(turn: ClientTurn, pieces: deque[str | Answer | BaseException], on_piece: Callable[[], object]) -> None:
    """Pass the text of a turn to the guest as it comes; the guest may read it later.

    Cancelling this aborts the turn. A turn holds at most a context of text, so the queue is bounded by that.
    """
    try:
        while (event := await turn.next_event()) is not None:
            if isinstance(event, Token):
                pieces.append(event.content)
                on_piece()
        pieces.append(turn.answer)
    except asyncio.CancelledError:
        turn.leave()
        raise
    except BaseException as error:  # noqa: BLE001 - it is raised in the guest's thread
        pieces.append(error)


def _text(data: bytes, what: str) -> str:
    try:
        return data.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise WasiNnError(NnErrorKind.INVALID_ENCODING, f"{what} is not UTF-8: {error.reason}") from None


def model_name(data: bytes) -> str:
    """Return the name of a model that a guest gave."""
    if len(data) > MAX_NAME_BYTES:
        raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"the name of a model has at most {MAX_NAME_BYTES} bytes")
    return _text(data, "the name of the model")
