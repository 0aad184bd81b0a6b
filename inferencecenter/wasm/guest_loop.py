"""The event loop of the client, which runs in the thread that waits for it.

If the guest's thread left the loop to another one, each streamed token would cost two changes of threads, each with a
hand-over of the interpreter's lock: more than everything else that a guest adds. So a thread that waits runs the loop
itself. While the guest computes, a background thread runs it, so that the client answers pings, reads text and
reconnects. It takes over once no other thread has run the loop for ``_IDLE_S``, which is longer than the time between
two tokens.

The thread that runs the loop holds a lock. If that is the background thread, a thread that wants to wait stops the loop
and then gets the lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    T = TypeVar("T")

_IDLE_S: Final = 0.25


class GuestLoop:
    """An event loop for one client, to be closed.

    One thread at a time may wait.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._is_running = threading.Lock()
        self._is_claimed = False
        self._is_awaited = False
        self._released_at = time.monotonic()
        self._is_closing = False
        self._nudge = threading.Event()
        self._background = threading.Thread(target=self._run_in_background, name="inferencecenter-client", daemon=True)
        self._background.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its result, in this thread; an interrupted wait, as by Ctrl-C, cancels it."""
        task = self.start(coroutine)
        try:
            self.wait(task.done)
        except BaseException:
            self.cancel(task)
            raise
        return task.result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine, which runs while a thread waits, or in the background."""
        self._claim()
        try:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda _: self.wake())
            return task
        finally:
            self._release()

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task, before any that is started later runs; the background thread runs its end if no other does."""
        self._claim()
        try:
            task.cancel()
        finally:
            self._release()
        self._nudge.set()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Run the loop until ``is_over``, which is evaluated after each ``wake`` and each end of a task."""
        if is_over():
            return  # leaves the loop to the background thread
        self._claim()
        self._is_awaited = True
        try:
            while not is_over():
                self._loop.run_forever()
        finally:
            self._is_awaited = False
            self._release()

    def wake(self) -> None:
        """Let the thread that waits look again; to be called on the loop."""
        if self._is_awaited:
            self._loop.stop()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Schedule a callback on the loop, from any thread."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel what runs, and close the loop."""
        self._is_closing = True
        self._nudge.set()
        self.call_soon(self._loop.stop)
        self._background.join()
        self._runner.close()

    def _claim(self) -> None:
        if not self._is_running.acquire(blocking=False):
            self._is_claimed = True  # or the background thread would get the lock again
            self.call_soon(self._loop.stop)
            self._is_running.acquire()
            self._is_claimed = False

    def _release(self) -> None:
        self._released_at = time.monotonic()
        self._is_running.release()

    def _run_in_background(self) -> None:
        while not self._is_closing:
            wait_s = self._released_at + _IDLE_S - time.monotonic()
            if wait_s > 0 and not self._nudge.wait(wait_s):
                continue
            self._nudge.clear()
            if self._is_claimed or not self._is_running.acquire(blocking=False):
                self._nudge.wait(_IDLE_S)
                continue
            try:
                if not self._is_closing:
                    self._loop.run_forever()
            finally:
                self._is_running.release()
