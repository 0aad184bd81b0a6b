"""The client for programs without asyncio, and for notebooks, whose own event loop is busy while a cell runs.

Any number of threads may use one client at once. What it calls back, as ``on_notice``, it calls in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from inferencecenter.client.answer import Answered
from inferencecenter.client.client import Client as AsyncClient
from inferencecenter.client.errors import failure
from inferencecenter.core.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from types import TracebackType

    from inferencecenter.client.answer import Answer
    from inferencecenter.client.options import ClientOptions, InferOptions, Messages, SessionOptions
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.stream import TurnStreamEvent
    from inferencecenter.client.turn import ClientTurn as AsyncTurn
    from inferencecenter.core.errors import InferenceCenterError
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.events import (
        Appended,
        AuthSuccess,
        Hello,
        MetadataSet,
        Metrics,
        Session,
        SessionCreated,
        SessionResumed,
        SessionRewound,
        Swap,
        UsageReport,
    )
    from inferencecenter.protocol.values import ModelSummary, SessionSummary


class LoopThread:
    """Runs coroutines for other threads until it is closed. It ends with its program, also when it was not closed."""

    def __init__(self) -> None:
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="inferencecenter-client", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; when the wait is interrupted, as by Ctrl-C, it is cancelled.

        Raises:
            UnreachableError: The thread was closed.
            RuntimeError: The thread would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("what is called back cannot wait for the client that calls it")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise failure(ErrorCode.DAEMON_UNREACHABLE, "the client was closed") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, callback: Callable[[], object]) -> None:
        """Have a function called there, after all that it was given before; without the thread it is not."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel what still runs, and end."""
        self.soon(self._closing.set)
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
    """A client of one daemon, open inside ``with``, or from ``open`` to ``close``.

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
        """Close the socket. Sessions stay, and turns go on, but for those that were left."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._client.close())
            finally:
                thread.close()

    @property
    def hello(self) -> Hello:
        """What the daemon said when the socket opened last."""
        return self._client.hello

    @property
    def account(self) -> AuthSuccess:
        """Who the daemon says this is."""
        return self._client.account

    @property
    def connected(self) -> bool:
        """Whether the daemon hears this client now, and every session is open."""
        return self._client.connected

    @property
    def ended(self) -> InferenceCenterError | None:
        """Why the connection is over for good; ``None`` while it is not."""
        return self._client.ended

    @contextlib.contextmanager
    def session(self, **options: Unpack[SessionOptions]) -> Iterator[BlockingSession]:
        """Have a session that is closed when it is left; ``create_session`` opens one that stays."""
        session = self.create_session(**options)
        try:
            yield session
        except BaseException:
            session.leave(failed=True)
            raise
        session.leave(failed=False)

    def create_session(self, **options: Unpack[SessionOptions]) -> BlockingSession:
        """Open a session; if its model has to be loaded first, wait for that."""
        return BlockingSession(self._running, self._call(self._client.create_session(**options)))

    def resume(self, session_id: str) -> tuple[BlockingSession, SessionResumed]:
        """Take up a session, and return all that was said before with it."""
        session, resumed = self._call(self._client.resume(session_id))
        return BlockingSession(self._running, session), resumed

    def sessions(self) -> tuple[SessionSummary, ...]:
        """Return all sessions of this client, oldest first, whichever connection has them."""
        return self._call(self._client.sessions())

    def models(self) -> tuple[ModelSummary, ...]:
        """Return the models that this client may use, by name."""
        return self._call(self._client.models())

    def usage(self, *, days: int = 30, client_id: str | None = None) -> UsageReport:
        """Return what was used by day, and what the token may still use."""
        return self._call(self._client.usage(days=days, client_id=client_id))

    def metrics(self, interval_s: float = 1.0) -> Iterator[Metrics]:
        """Yield readings of the GPU, the engine and the work, again and again."""
        readings = self._client.metrics(interval_s)

        async def following() -> Metrics:
            return await anext(readings)

        while True:
            yield self._call(following())

    def load_model(self, name: str, *, on_progress: Callable[[Swap], None] | None = None) -> None:
        """Have a model loaded and be the one of all sessions that name none; return when it is."""
        self._call(self._client.load_model(name, on_progress=on_progress))

    def unload_model(self, name: str) -> None:
        """Have a model's memory freed when its turns have ended."""
        self._call(self._client.unload_model(name))

    def request(self, request: Request) -> Event:
        """Send a request and return its direct reply; while the connection is lost, wait."""
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
    """An open session; ``Client.session``, ``create_session`` and ``resume`` make one.

    Methods and errors are those of ``inferencecenter.client.ClientSession``.
    """

    def __init__(self, thread: LoopThread, session: ClientSession) -> None:
        self._thread = thread
        self._session = session

    def __repr__(self) -> str:
        return f"<blocking {self._session!r}>"

    @property
    def session_id(self) -> str:
        """The name the daemon gave it."""
        return self._session.session_id

    @property
    def created(self) -> SessionCreated | None:
        """What the daemon said when this connection opened it; ``None`` for one that was taken up."""
        return self._session.created

    def infer(
        self, prompt: str | None = None, *, messages: Messages | None = None, **asked: Unpack[InferOptions]
    ) -> BlockingTurn:
        """Say something and return the turn that answers it; iterate over it for the text."""
        return BlockingTurn(self._thread, self._session.infer(prompt, messages=messages, **asked))

    def ask(
        self, prompt: str | None = None, *, messages: Messages | None = None, **asked: Unpack[InferOptions]
    ) -> Answer:
        """Say something and return the whole answer."""
        return self._thread.call(self._session.ask(prompt, messages=messages, **asked))

    def follow(self) -> BlockingTurn:
        """Return the turn that was running when the session was resumed, from its beginning to its end."""
        return BlockingTurn(self._thread, self._session.follow())

    def abort(self) -> None:
        """Ask for the end of the running turn, as from another thread than the one that reads it."""
        self._thread.call(self._session.abort())

    def read(self) -> Session:
        """Return all that the daemon knows of the session."""
        return self._thread.call(self._session.read())

    def append(self, messages: Messages) -> Appended:
        """Add messages without having them answered."""
        return self._thread.call(self._session.append(messages))

    def fork(self, turn: str | None = None) -> BlockingSession:
        """Open another session that begins as this one does, up to a turn."""
        return BlockingSession(self._thread, self._thread.call(self._session.fork(turn)))

    def rewind(self, turn: str) -> SessionRewound:
        """Forget all that came after a turn."""
        return self._thread.call(self._session.rewind(turn))

    def set_metadata(self, metadata: Mapping[str, str]) -> MetadataSet:
        """Give the session other metadata, as a title; a turn that runs goes on."""
        return self._thread.call(self._session.set_metadata(metadata))

    def close(self) -> None:
        """End the session."""
        self._thread.call(self._session.close())

    def leave(self, *, failed: bool) -> None:
        """End the session when its block is left; one that is gone already has ended."""
        self._thread.call(self._session.leave(failed=failed))


class BlockingTurn(Answered):
    """One turn, to be read once; iterating yields the answer's text as it comes.

    Who leaves the loop before the end has the turn end; see ``inferencecenter.client.Turn``.
    """

    def __init__(self, thread: LoopThread, turn: AsyncTurn) -> None:
        self.answer = turn.answer
        self._thread = thread
        self._turn = turn

    def __repr__(self) -> str:
        return f"<blocking {self._turn!r}>"

    @property
    def turn_id(self) -> str | None:
        """Its id, once the daemon has named it."""
        return self._turn.turn_id

    def __iter__(self) -> Iterator[str]:
        return self._each(self._turn.next_text)

    def events(self) -> Iterator[TurnStreamEvent]:
        """Iterate over all that the turn tells, not only its text; the last is ``End``."""
        return self._each(self._turn.next_event)

    def rest(self) -> Answer:
        """Read on to the end, also of a turn that was left, and return the whole answer."""
        return self._thread.call(self._turn.rest())

    def abort(self) -> None:
        """Have the turn end; whoever reads it goes on to its end."""
        self._thread.call(self._turn.abort())

    def let_run(self) -> None:
        """Have the turn go on when it is left, for whoever resumes its session later."""
        self._turn.let_run()

    def _each(self, following: Callable[[], Coroutine[Any, Any, T | None]]) -> Iterator[T]:
        try:
            while (item := self._thread.call(following())) is not None:
                yield item
        finally:
            self._thread.soon(self._turn.leave)


Client = BlockingClient
"""The name under which programs import it, beside the asyncio client of the same name."""
