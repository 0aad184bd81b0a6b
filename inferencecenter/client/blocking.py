"""Synchronous client, for programs without asyncio and for notebooks, whose event loop is busy while a cell runs.

A client is thread-safe. Callbacks such as ``on_notice`` run in the client's background thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from inferencecenter.client.answer import AnswerProperties
from inferencecenter.client.client import Client as AsyncClient
from inferencecenter.client.errors import failure
from inferencecenter.core.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    from inferencecenter.client.answer import Answer, TurnStreamEvent
    from inferencecenter.client.client import RankedDocuments, TextEmbeddings
    from inferencecenter.client.options import ClientOptions, InferOptions, Messages, SessionOptions
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.turn import ClientTurn as AsyncTurn
    from inferencecenter.core.errors import InferenceCenterError
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.events import (
        Appended,
        AuthSuccess,
        Hello,
        McpCall,
        MetadataSet,
        Metrics,
        ModelSet,
        Presets,
        Session,
        SessionCreated,
        SessionResumed,
        SessionRewound,
        SessionsFound,
        ShareCreated,
        Swap,
        UsageReport,
    )
    from inferencecenter.protocol.values import (
        McpServer,
        MessageImage,
        ModelSummary,
        Preset,
        PresetType,
        Priority,
        SessionSummary,
        SessionUsage,
        Share,
    )


class LoopThread:
    """An event loop in a daemon thread that runs coroutines for other threads until it is closed."""

    def __init__(self) -> None:
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="inferencecenter-client", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its result; an interrupted wait, as by Ctrl-C, cancels it.

        Raises:
            UnreachableError: The thread was closed.
            RuntimeError: Called from the loop's own thread, where it would deadlock.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return its future.

        Raises:
            UnreachableError: The thread was closed.
            RuntimeError: Called from the loop's own thread, where waiting for it would deadlock.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a callback of this client cannot make a blocking call on it")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise failure(ErrorCode.DAEMON_UNREACHABLE, "the client was closed") from None

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Schedule a callback on the loop; once the loop is closed it is ignored."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel running coroutines and join the thread."""
        self.call_soon(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._is_up.set()
        await self._closing.wait()


T = TypeVar("T")


class BlockingClient:
    """A connection to one daemon, open inside ``with``, or from ``open`` to ``close``.

    Arguments, methods and errors are those of ``inferencecenter.client.Client``.
    """

    def __init__(self, url: str, token: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(url, token, **options)
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<blocking {self._client!r}>"

    def __enter__(self) -> BlockingClient:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Open a socket and authenticate; see ``inferencecenter.client.Client.open``."""
        thread = LoopThread()
        try:
            thread.call(self._client.open())
        except BaseException:
            thread.close()
            raise
        self._thread = thread

    def close(self) -> None:
        """Close the socket. Sessions and their turns continue on the daemon; abandoned turns are aborted first."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._client.close())
            finally:
                thread.close()

    @property
    def hello(self) -> Hello:
        """The daemon's ``hello`` of the latest connection."""
        return self._client.hello

    @property
    def account(self) -> AuthSuccess:
        """The authenticated account."""
        return self._client.account

    @property
    def connected(self) -> bool:
        """Whether the socket is open and every session is restored."""
        return self._client.connected

    @property
    def ended(self) -> InferenceCenterError | None:
        """Why the connection ended for good; ``None`` while it has not."""
        return self._client.ended

    @contextlib.contextmanager
    def session(self, **options: Unpack[SessionOptions]) -> Iterator[BlockingSession]:
        """Open a session that is closed when the block exits; ``create_session`` opens one that stays."""
        session = self.create_session(**options)
        try:
            yield session
        except BaseException:
            session.leave(failed=True)
            raise
        session.leave(failed=False)

    def create_session(self, **options: Unpack[SessionOptions]) -> BlockingSession:
        """Open a session, waiting for its model to load if necessary."""
        return BlockingSession(self._running, self._call(self._client.create_session(**options)))

    def resume(self, session_id: str) -> tuple[BlockingSession, SessionResumed]:
        """Resume a session and return it with its history."""
        session, resumed = self._call(self._client.resume(session_id))
        return BlockingSession(self._running, session), resumed

    def sessions(self, *, order: Literal["oldest", "recent"] = "oldest") -> tuple[SessionSummary, ...]:
        """Return all sessions of this client, live and archived, on any connection."""
        return self._call(self._client.sessions(order=order))

    def session_usage(self) -> SessionUsage | None:
        """Return this client's use of its session limits."""
        return self._call(self._client.session_usage())

    def search_sessions(self, query: str, *, limit: int = 20, after: str | None = None) -> SessionsFound:
        """Search titles and messages of this client's stored sessions, most recently used first."""
        return self._call(self._client.search_sessions(query, limit=limit, after=after))

    def presets(self) -> Presets:
        """Return the client's presets: named conversation settings and prompts."""
        return self._call(self._client.presets())

    def save_preset(self, preset: Preset) -> None:
        """Save a preset, replacing the one with its type and name."""
        self._call(self._client.save_preset(preset))

    def delete_preset(self, preset_type: PresetType, name: str) -> None:
        """Delete a preset."""
        self._call(self._client.delete_preset(preset_type, name))

    def models(self) -> tuple[ModelSummary, ...]:
        """Return the models available to this client, sorted by name."""
        return self._call(self._client.models())

    def add_image(self, file: str | Path | bytes) -> MessageImage:
        """Upload an image that is too large for a frame."""
        return self._call(self._client.add_image(file))

    def embed(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        priority: Priority | None = None,
    ) -> TextEmbeddings:
        """Return the embedding vectors of texts, in the same order."""
        return self._call(self._client.embed(texts, model=model, dimensions=dimensions, priority=priority))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        priority: Priority | None = None,
    ) -> RankedDocuments:
        """Score the relevance of documents to a query, and return them best first."""
        return self._call(self._client.rerank(query, documents, model=model, top_n=top_n, priority=priority))

    def create_share(self, session_id: str, *, expires_in_s: int | None = None) -> ShareCreated:
        """Share a snapshot of a session by a link, which any account of the daemon can open."""
        return self._call(self._client.create_share(session_id, expires_in_s=expires_in_s))

    def shares(self) -> tuple[Share, ...]:
        """Return this client's share links, oldest first."""
        return self._call(self._client.shares())

    def revoke_share(self, share_id: str) -> None:
        """Revoke a share link."""
        self._call(self._client.revoke_share(share_id))

    def mcp_servers(self, server: str | None = None) -> tuple[McpServer, ...]:
        """Return the MCP servers that the client may use, with their tools."""
        return self._call(self._client.mcp_servers(server))

    def usage(self, *, days: int = 30, client_id: str | None = None) -> UsageReport:
        """Return the usage by day and the remaining quota."""
        return self._call(self._client.usage(days=days, client_id=client_id))

    def metrics(self, interval_s: float = 1.0) -> Iterator[Metrics]:
        """Yield samples of GPU, engine and load metrics periodically."""
        readings = self._client.metrics(interval_s)

        async def following() -> Metrics:
            return await anext(readings)

        while True:
            yield self._call(following())

    def load_model(self, name: str, *, on_progress: Callable[[Swap], None] | None = None) -> None:
        """Load a model and make it the default for sessions that name none; return when it is loaded."""
        self._call(self._client.load_model(name, on_progress=on_progress))

    def unload_model(self, name: str) -> None:
        """Free a model's memory once its turns have ended."""
        self._call(self._client.unload_model(name))

    def request(self, request: Request) -> Event:
        """Send a request and return its direct reply; waits while the connection is lost."""
        return self._call(self._client.request(request))

    @property
    def _running(self) -> LoopThread:
        if self._thread is None:
            raise failure(ErrorCode.DAEMON_UNREACHABLE, "the client is not open", hint="Use it inside `with`.")
        return self._thread

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            thread = self._running
        except BaseException:
            coroutine.close()
            raise
        return thread.call(coroutine)


class BlockingSession:
    """An open session, made by ``Client.session``, ``create_session`` or ``resume``.

    Methods and errors are those of ``inferencecenter.client.ClientSession``.
    """

    def __init__(self, thread: LoopThread, session: ClientSession) -> None:
        self._thread = thread
        self._session = session

    def __repr__(self) -> str:
        return f"<blocking {self._session!r}>"

    @property
    def session_id(self) -> str:
        """Id of the session, assigned by the daemon."""
        return self._session.session_id

    @property
    def created(self) -> SessionCreated | None:
        """The daemon's reply to the creation of the session; ``None`` for a resumed one."""
        return self._session.created

    def infer(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Unpack[InferOptions]
    ) -> BlockingTurn:
        """Send a prompt or messages and return the turn that answers; iterate over it for the text."""
        return BlockingTurn(self._thread, self._session.infer(prompt, messages=messages, **options))

    def ask(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Unpack[InferOptions]
    ) -> Answer:
        """Send a prompt or messages and return the whole answer."""
        return self._thread.call(self._session.ask(prompt, messages=messages, **options))

    def follow(self) -> BlockingTurn:
        """Return the turn that was running when the session was resumed, from its start to its end."""
        return BlockingTurn(self._thread, self._session.follow())

    def abort(self) -> None:
        """Abort the running turn; may be called from another thread than the turn's reader."""
        self._thread.call(self._session.abort())

    def read(self) -> Session:
        """Return the daemon's full record of the session."""
        return self._thread.call(self._session.read())

    def call_mcp_tool(self, call_id: str, server: str, *, tool: str | None = None) -> McpCall:
        """Run a tool call of the latest answer on an MCP server, and return its outcome."""
        return self._thread.call(self._session.call_mcp_tool(call_id, server, tool=tool))

    def append(self, messages: Messages) -> Appended:
        """Append messages without starting a turn."""
        return self._thread.call(self._session.append(messages))

    def fork(self, turn: str | None = None) -> BlockingSession:
        """Open a session that starts with this one's history, up to a turn."""
        return BlockingSession(self._thread, self._thread.call(self._session.fork(turn)))

    def rewind(self, turn: str) -> SessionRewound:
        """Discard everything after a turn."""
        return self._thread.call(self._session.rewind(turn))

    def set_model(self, model: str | None) -> ModelSet:
        """Answer with another model from the next turn on; ``None`` follows the default model."""
        return self._thread.call(self._session.set_model(model))

    def set_metadata(self, metadata: Mapping[str, str]) -> MetadataSet:
        """Replace the session's metadata, such as a title; does not affect a running turn."""
        return self._thread.call(self._session.set_metadata(metadata))

    def close(self) -> None:
        """Close the session."""
        self._thread.call(self._session.close())

    def leave(self, *, failed: bool) -> None:
        """Close the session at the end of its block; ignored if it no longer exists."""
        self._thread.call(self._session.leave(failed=failed))


class BlockingTurn(AnswerProperties):
    """One turn, to be read once; iterating yields the answer's text as it arrives.

    Leaving the loop early aborts the turn; see ``inferencecenter.client.ClientTurn``.
    """

    def __init__(self, thread: LoopThread, turn: AsyncTurn) -> None:
        self.answer = turn.answer
        self._thread = thread
        self._turn = turn

    def __repr__(self) -> str:
        return f"<blocking {self._turn!r}>"

    @property
    def turn_id(self) -> str | None:
        """Id of the turn, once the daemon has assigned it."""
        return self._turn.turn_id

    def __iter__(self) -> Iterator[str]:
        return self._each(self._turn.next_text)

    def events(self) -> Iterator[TurnStreamEvent]:
        """Iterate over all events of the turn, not only its text; the last is ``End``."""
        return self._each(self._turn.next_event)

    def result(self) -> Answer:
        """Read the turn to its end, even after leaving it, and return the whole answer."""
        return self._thread.call(self._turn.result())

    rest = result  # former name

    def abort(self) -> None:
        """Abort the turn; its reader still receives the events up to ``End``."""
        self._thread.call(self._turn.abort())

    def detach(self) -> None:
        """Let the turn continue on the daemon when it is left, so that a later resume of the session can follow it."""
        self._turn.detach()

    let_run = detach  # former name

    def _each(self, following: Callable[[], Coroutine[Any, Any, T | None]]) -> Iterator[T]:
        try:
            while (item := self._thread.call(following())) is not None:
                yield item
        finally:
            self._thread.call_soon(self._turn.leave)


Client = BlockingClient
"""Import name of the blocking client, like that of the asyncio client."""
