"""A store whose worker runs on request, and entries with recognizable payloads."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.kv_cache.store import KvStore, TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGE_BYTES = 4096


class ManualWorker(Executor):
    """Runs submitted jobs in order, on request."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, n_jobs: int | None = None) -> None:
        """Run the next jobs, or all."""
        while self._jobs and (n_jobs is None or n_jobs > 0):
            future, job = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = job()
                except Exception as error:  # noqa: BLE001 - as executors do
                    future.set_exception(error)
                else:
                    future.set_result(result)
            n_jobs = None if n_jobs is None else n_jobs - 1


def payload_of(key: str, tokens: Sequence[int], n_bytes: int) -> bytes:
    """Return bytes that are unique to a key and its tokens."""
    pattern = f"{key}:{','.join(map(str, tokens))};".encode()
    return (pattern * (n_bytes // len(pattern) + 1))[:n_bytes]


@dataclass
class Bench:
    """A store in its own directory, with its log and the number of ended fetches."""

    path: Path
    ram_bytes: int = 20 * PAGE_BYTES
    disk_bytes: int = 100 * PAGE_BYTES
    client_share: float = 1.0
    fingerprint: str = "model"
    can_truncate: bool = True
    worker: ManualWorker = field(default_factory=ManualWorker)
    log: list[tuple[str, str]] = field(default_factory=list)
    fetched: int = 0

    def __post_init__(self) -> None:
        self.store = self.open(adopt=RecoveryMode.NONE)

    @property
    def ram_dir(self) -> Path:
        """The RAM tier's directory."""
        return self.path / "ram"

    @property
    def disk_dir(self) -> Path:
        """The disk tier's directory."""
        return self.path / "disk"

    @property
    def warnings(self) -> list[str]:
        """The lines of the log."""
        return [line for _, line in self.log]

    def open(self, *, adopt: RecoveryMode) -> KvStore:
        """Open a store, as a new engine does; jobs of the previous one are lost."""
        self.worker = ManualWorker()
        self.store = KvStore(
            fingerprint=self.fingerprint,
            bytes_per_token=4,
            ram=TierOptions(self.ram_dir, self.ram_bytes) if self.ram_bytes else None,
            disk=TierOptions(self.disk_dir, self.disk_bytes) if self.disk_bytes else None,
            client_share=self.client_share,
            adopt=adopt,
            can_truncate=self.can_truncate,
            worker=self.worker,
            on_fetched=self._on_fetched,
            on_log=lambda level, line: self.log.append((level, line)),
        )
        return self.store

    def settle(self) -> None:
        """Run all jobs, and those that their results cause."""
        while len(self.worker):
            self.worker.run()
            self.store.check_integrity()

    def park(
        self,
        key: str,
        tokens: Sequence[int],
        *,
        scope: str = "client",
        n_bytes: int = 3000,
        durable: bool = True,
        keep: Sequence[str] = (),
        redundant: bool = False,
    ) -> bool:
        """Offload an entry whose payload depends on its key and tokens."""

        def write(buffer: memoryview) -> int:
            buffer[:] = payload_of(key, tokens, n_bytes)
            return n_bytes

        return self.store.park(
            key,
            scope=scope,
            tokens=tokens,
            size_bytes=n_bytes,
            write=write,
            durable=durable,
            keep=keep,
            redundant=redundant,
        )

    def load(self, key: str) -> bytes | None:
        """Return the payload of a key; its stored tokens are expected."""
        taken: list[bytes] = []

        def read(data: memoryview) -> bool:
            assert data.readonly
            taken.append(bytes(data))
            return True

        entry = self.store._tiers.index.get(key)
        return taken[0] if self.store.load(key, b"" if entry is None else entry.tokens, read) else None

    def ready(self, key: str, tokens: Sequence[int], scope: str = "client") -> bool | None:
        """Return whether the tokens are found under the key, and in RAM."""
        match = self.store.find(scope, tokens)
        return match.ready if match is not None and match.key == key else None

    def park_on_disk(self) -> Path:
        """Offload ``s1``, evict it from RAM with others and return its file."""
        assert self.park("s1", [1, 2, 3])
        for number in range(20):
            self.park(f"other{number}", [9, number])
            self.settle()
        assert self.ready("s1", [1]) is False
        (path,) = (path for path in self.disk_files() if b"s1:" in path.read_bytes())
        return path

    def ram_files(self) -> list[Path]:
        """The files of the RAM tier."""
        return sorted(self.ram_dir.glob("*.ram"))

    def disk_files(self) -> list[Path]:
        """The files of the disk tier, finished or not."""
        return sorted(self.disk_dir.iterdir()) if self.disk_dir.exists() else []

    def _on_fetched(self) -> None:
        self.fetched += 1
