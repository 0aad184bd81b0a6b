"""Fair scheduling of clients' jobs on few threads."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.fair_workers import FairWorkers, Job, JobCancelledError
from tests.engine.kv_cache.harness import ManualWorker

if TYPE_CHECKING:
    from collections.abc import Callable


class Text:
    """A large object that a job refers to."""


class Shop:
    """Workers whose executor runs on request, and the jobs that have run."""

    def __init__(self, *, most: int = 1) -> None:
        self.executor = ManualWorker()
        self.workers = FairWorkers(self.executor, most=most)
        self.done: list[str] = []

    def submit(self, name: str, work: Callable[[Job], None] = lambda job: None, *, size_bytes: int = 0) -> Job:
        """Submit a job; its client is the first letter of its name."""

        def run(job: Job) -> None:
            work(job)
            self.done.append(name)

        job = Job(name[0], run, size_bytes)
        self.workers.submit(job)
        return job


def test_clients_alternate() -> None:
    """A client with many jobs delays another by one of them; the jobs of a client run in order."""
    shop = Shop()
    for number in range(4):
        shop.submit(f"a{number}")
    shop.submit("b0")
    shop.submit("b1")
    shop.submit("c0")
    shop.executor.run()
    assert shop.done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_jobs_at_the_executor_are_bounded() -> None:
    """Other work of the executor waits for running jobs only."""
    shop = Shop(most=3)
    for name in ("a0", "a1", "b0", "b1", "c0", "c1"):
        shop.submit(name)
    assert (len(shop.executor), len(shop.workers)) == (3, 3)
    shop.executor.run(1)
    assert (len(shop.executor), len(shop.workers)) == (3, 2)


@pytest.mark.parametrize(("most", "own"), [(1, 1), (2, 1), (4, 3)])
def test_client_cannot_occupy_all_workers(most: int, own: int) -> None:
    """One is left for another client, or for a short job; a single worker runs any job."""
    shop = Shop(most=most)
    for number in range(8):
        shop.submit(f"a{number}", size_bytes=10**6)
    assert len(shop.executor) == own
    shop.submit("b0", size_bytes=10**6)
    assert len(shop.executor) == min(most, own + 1)
    shop.executor.run()
    assert sorted(shop.done) == [*(f"a{number}" for number in range(8)), "b0"]


def test_short_job_does_not_wait_for_a_long_one_of_its_client() -> None:
    """A turn of another session is tokenized beside a large text."""
    shop = Shop(most=2)
    shop.submit("a0", size_bytes=10**6)
    shop.submit("a1", size_bytes=100)
    assert len(shop.executor) == 2


def test_cancelled_job_leaves_no_entry() -> None:
    """Queued jobs are removed with what they refer to, at any place in the queue."""
    shop = Shop()
    shop.submit("a0")
    texts = [Text() for _ in range(500)]
    jobs = [shop.submit(f"b{number}", partial(lambda _text, _job: None, text)) for number, text in enumerate(texts)]
    kept = weakref.WeakSet(texts)
    for job in reversed(jobs):
        shop.workers.cancel(job)
    texts.clear()
    jobs.clear()
    del job
    gc.collect()
    assert (len(kept), len(shop.workers)) == (0, 0)
    shop.submit("c0")
    shop.executor.run()
    assert shop.done == ["a0", "c0"]


def test_running_job_stops_when_cancelled() -> None:
    """It ends between two of its parts; a submitted job that has not started never does."""
    shop = Shop(most=2)
    seen: list[int] = []

    def work(job: Job) -> None:
        for part in job.each([1, 2, 3]):
            seen.append(part)
            if part == 2:
                shop.workers.cancel(job)

    def ends(job: Job) -> None:
        with pytest.raises(JobCancelledError):
            work(job)

    shop.submit("a0", ends)
    shop.workers.cancel(shop.submit("b0"))
    shop.executor.run()
    assert seen == [1, 2]
    assert shop.done == ["a0"]


def test_no_job_starts_after_close() -> None:
    """Running jobs are cancelled."""
    shop = Shop()
    runs, waits = shop.submit("a0"), shop.submit("a1")
    shop.workers.close()
    assert runs.cancelled
    assert waits.cancelled
    shop.executor.run()
    assert shop.done == []


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 3))
def test_client_waits_for_one_job_of_each_other_client(clients: list[str], most: int) -> None:
    """Between two jobs of a waiting client, no other client runs two."""
    shop = Shop(most=most)
    for number, client in enumerate(clients):
        shop.submit(f"{client}{number}")
    shop.executor.run()
    assert sorted(shop.done) == sorted(f"{client}{number}" for number, client in enumerate(clients))
    order = [name[0] for name in shop.done[most:]]  # the first ones ran before the others came
    for client in set(order):
        last = len(order) - order[::-1].index(client)
        between = "".join(order[:last]).split(client)[1:-1]
        assert all(len(set(part)) == len(part) for part in between)
