"""KV stores for tests, whose jobs run synchronously."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.kv_cache.store import KvStore, TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.engine.backend import Backend

MIB = 2**20

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class AtOnce(Executor):
    """Runs each job before ``submit`` returns."""

    def submit(self, job: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Future[ResultT]:
        """Run the job, and keep its result."""
        future: Future[ResultT] = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def open_store(
    backend: Backend,
    path: Path,
    *,
    ram_bytes: int = MIB,
    disk_bytes: int = 0,
    adopt: RecoveryMode = RecoveryMode.NONE,
    on_fetched: Callable[[], None] = lambda: None,
    on_log: Callable[[str, str], None] = lambda level, text: None,
) -> KvStore:
    """Return a store in directories of ``path``."""
    return KvStore(
        fingerprint=backend.fingerprint,
        bytes_per_token=backend.kv_bytes_per_token,
        ram=TierOptions(path / "ram", ram_bytes),
        disk=TierOptions(path / "disk", disk_bytes),
        adopt=adopt,
        worker=AtOnce(),
        on_fetched=on_fetched,
        on_log=on_log,
    )
