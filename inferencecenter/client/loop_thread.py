"""An event loop in a thread of its own, for callers that have none, or have one that is busy with them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from inferencecenter.client.failures import failure
from inferencecenter.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


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
