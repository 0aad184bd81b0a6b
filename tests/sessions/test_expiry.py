"""The expiry queue: one timer, bounded batches, no stale entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.sessions.table import ExpiryQueue
from tests.sessions.conftest import FakeTimer

if TYPE_CHECKING:
    from collections.abc import Callable


class Bench:
    """An expiry queue whose clock advances from timer to timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []
        self.due: list[tuple[float, str]] = []
        self.queue = ExpiryQueue(
            monotonic=lambda: self.now, call_later=self._call_later, due=lambda key: self.due.append((self.now, key))
        )

    @property
    def armed(self) -> list[FakeTimer]:
        """The pending timers."""
        return [timer for timer in self.timers if not timer.cancelled]

    def run(self) -> None:
        """Fire all pending timers."""
        while self.armed:
            (timer,) = self.armed
            self.timers.clear()
            self.now += timer.delay_s
            timer.callback()

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, callback))
        return self.timers[-1]


@given(
    steps=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 500_000)), max_size=60),
)
def test_each_key_is_due_once_at_its_last_time(steps: list[tuple[str, int | None]]) -> None:
    """A key put again is due at its latest time, a discarded one never, and there is at most one timer."""
    bench = Bench()
    expected: dict[str, float] = {}
    for key, at in steps:
        if at is None:
            bench.queue.discard(key)
            expected.pop(key, None)
        else:
            bench.queue.put(key, float(at))
            expected[key] = float(at)
        assert len(bench.armed) == bool(expected)
    bench.run()
    assert sorted(bench.due) == sorted((at, key) for key, at in expected.items())
    assert len(bench.queue) == 0


def test_discarded_keys_leave_no_entries() -> None:
    """Opening and closing sessions with a long ttl does not grow the heap."""
    bench = Bench()
    bench.queue.put("stays", 1e6)
    for n in range(10_000):
        bench.queue.put(f"s_{n}", 1e6 + n)
        bench.queue.discard(f"s_{n}")
    assert len(bench.queue._heap) < 100
