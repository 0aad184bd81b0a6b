"""Copying model files from the front to a machine, and what interrupts it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter import __version__
from inferencecenter.cluster import file_transfer
from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.file_transfer import CopyCancelledError, FileCopier, FileServer
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.link import HostHello, ModelFile, file_digest
from inferencecenter.supervisor.remote import HostListener, HostRegistry
from tests.cluster.harness import Proxy
from tests.supervisor.harness import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 5 * 2**20 + 17


@dataclass
class Transfer:
    """A front that offers a file, and the directory of a machine."""

    folder: Path
    progress: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        certificates = ClusterCertificates(self.folder / "cluster")
        registry = HostRegistry(self.folder / "hosts.json")
        listener = HostListener(certificates, registry, lost_after_s=3, orphan_s=30)
        listener._address = ("127.0.0.1", 0)
        self.ticket = listener.ticket("m/0")
        hello = HostHello(version=__version__, engine="m/0", epoch=self.ticket.epoch, key=self.ticket.key, node="box")
        self.key = registry.admit(hello) or ""
        self.server = FileServer(certificates, registry, bytes_per_s=0)
        self.server.open("127.0.0.1", 0)
        self.port = self.server.port
        self.source = self.folder / "model.gguf"
        self.source.write_bytes(os.urandom(SIZE))
        self.listener = listener

    def offered(self, path: Path | None = None) -> ModelFile:
        """Offer a file in its present version."""
        path = path or self.source
        status = path.stat()
        file = ModelFile(str(path), status.st_size, file_digest(path), status.st_mtime_ns, str(path))
        self.server.offer("m/0", (file,))
        return file

    def copier(self, **changes: Any) -> FileCopier:
        """Return a copier of this machine."""
        return FileCopier(
            self.folder / "copies",
            self.ticket,
            access=lambda: (self.port, changes.get("key", self.key)),
            on_progress=lambda name, done: self.progress.append((name, done)),
        )

    @property
    def part(self) -> Path | None:
        """The partial copy, if there is one."""
        return next((self.folder / "copies").glob("*/.model.gguf.part"), None)

    def seed(self, file: ModelFile, content: bytes) -> None:
        """Leave a partial copy."""
        directory = self.folder / "copies" / file_transfer.copy_key([file])
        directory.mkdir(parents=True)
        (directory / ".model.gguf.part").write_bytes(content)


@pytest.fixture
def transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfer]:
    """A front and a machine, with short pauses."""
    monkeypatch.setattr(file_transfer, "_RETRY_S", 0.01)
    transfer = Transfer(tmp_path)
    yield transfer
    transfer.server.close()


def refused(copier: FileCopier, file: ModelFile) -> InferenceCenterError:
    """Return the error of a copy."""
    with pytest.raises(InferenceCenterError) as caught:
        copier.fetch([file])
    return caught.value


def test_file_is_copied_once(transfer: Transfer) -> None:
    """The copy is equal, the progress is reported, and the next request finds it without the front."""
    file = transfer.offered()
    copy = transfer.copier().fetch([file]) / "model.gguf"
    assert copy.read_bytes() == transfer.source.read_bytes()
    assert transfer.part is None
    assert transfer.progress[0][0] == "model.gguf"
    assert 0 < transfer.progress[0][1] <= 1
    transfer.server.close()
    assert transfer.copier().fetch([file]) / "model.gguf" == copy


def test_parts_of_a_model_are_in_one_directory(transfer: Transfer) -> None:
    """As llama.cpp looks for them."""
    other = transfer.folder / "other.gguf"
    other.write_bytes(b"other")
    files = [transfer.offered(other), transfer.offered()]
    transfer.server.offer("m/0", tuple(files))
    directory = transfer.copier().fetch(files)
    assert (directory / "other.gguf").read_bytes() == b"other"
    assert (directory / "model.gguf").stat().st_size == SIZE


def test_empty_file_is_copied(transfer: Transfer) -> None:
    """Without a block."""
    transfer.source.write_bytes(b"")
    copy = transfer.copier().fetch([transfer.offered()]) / "model.gguf"
    assert copy.read_bytes() == b""


async def test_lost_connection_continues_at_its_offset(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived is not sent again. The file is larger than all buffers between the two."""
    transfer.source.write_bytes(os.urandom(2**20) * 32)
    file = transfer.offered()
    proxy = Proxy(("127.0.0.1", transfer.server.port))
    _, transfer.port = await proxy.open()
    loop, offsets = asyncio.get_running_loop(), []
    receive = FileCopier._receive_blocks

    def counted(self: FileCopier, *arguments: Any) -> Any:
        offsets.append(arguments[-1])
        return receive(self, *arguments)

    def cut_once(_name: str, done: float) -> None:
        transfer.progress.append(("", done))
        if len(transfer.progress) == 2:
            asyncio.run_coroutine_threadsafe(cut(), loop).result(TIMEOUT_S)

    async def cut() -> None:
        proxy.cut()

    monkeypatch.setattr(FileCopier, "_receive_blocks", counted)
    monkeypatch.setattr(file_transfer, "_PROGRESS_EVERY_S", 0.0)
    copier = FileCopier(
        transfer.folder / "copies", transfer.ticket, access=lambda: (transfer.port, transfer.key), on_progress=cut_once
    )
    directory = await asyncio.to_thread(copier.fetch, [file])
    await proxy.close()
    assert (directory / "model.gguf").read_bytes() == transfer.source.read_bytes()
    assert offsets[0] == 0
    assert offsets[-1] >= 2 * 2**20


def test_partial_copy_is_continued(transfer: Transfer) -> None:
    """That of an earlier host; the digest covers it."""
    file = transfer.offered()
    content = transfer.source.read_bytes()
    transfer.seed(file, content[: SIZE - 10])
    copy = transfer.copier().fetch([file]) / "model.gguf"
    assert copy.read_bytes() == content


@pytest.mark.parametrize("size", [100, SIZE, SIZE + 5])
def test_damaged_partial_copy_is_made_anew(transfer: Transfer, size: int) -> None:
    """A crash of the machine may leave zeros, and another program anything."""
    file = transfer.offered()
    transfer.seed(file, bytes(size))
    copy = transfer.copier().fetch([file]) / "model.gguf"
    assert copy.read_bytes() == transfer.source.read_bytes()


def test_changed_file_is_refused(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the copy begins, and in the middle of it; nothing of it stays."""
    file = transfer.offered()
    transfer.source.write_bytes(os.urandom(SIZE))
    error = refused(transfer.copier(), file)
    assert error.code is ErrorCode.INVALID_MODEL_FILE
    assert "has changed" in error.message
    file = transfer.offered()
    monkeypatch.setattr(transfer.server._pacer, "wait", lambda _: os.utime(transfer.source, ns=(0, 0)))
    assert "has changed" in refused(transfer.copier(), file).message
    assert transfer.part is None
    assert not list((transfer.folder / "copies").glob("*/model.gguf"))


def test_versions_of_a_file_have_their_own_copies(transfer: Transfer) -> None:
    """The earlier one may be in use."""
    first = transfer.copier().fetch([transfer.offered()])
    transfer.source.write_bytes(os.urandom(SIZE))
    second = transfer.copier().fetch([transfer.offered()])
    assert first != second
    assert (first / "model.gguf").exists()
    assert (second / "model.gguf").read_bytes() == transfer.source.read_bytes()


def test_only_files_of_the_engine_are_sent(transfer: Transfer) -> None:
    """Whatever path a host requests."""
    offered = transfer.offered()
    file = msgspec.structs.replace(offered, path=str(transfer.folder / "hosts.json"))
    assert "no file of this engine" in refused(transfer.copier(), file).message


def test_host_without_the_key_gets_nothing(transfer: Transfer) -> None:
    """It may have been replaced; it tries again until it ends."""
    file = transfer.offered()
    copier = transfer.copier(key="0" * 64)
    timer = threading.Timer(0.1, copier.cancel)
    timer.start()
    with pytest.raises(CopyCancelledError):
        copier.fetch([file])
    timer.join()
    assert (transfer.part or Path("/dev/null")).read_bytes() == b""


def test_file_that_does_not_fit_is_not_begun(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing where."""
    file = transfer.offered()
    full = os.statvfs_result((4096, 4096, 10, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    error = refused(transfer.copier(), file)
    assert error.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "has no space for model.gguf: it needs 5 MiB, and 0 MiB are free" in error.message
    assert transfer.part is None


def test_directory_that_cannot_be_written(transfer: Transfer) -> None:
    """A file is in its place."""
    (transfer.folder / "copies").write_text("")
    assert refused(transfer.copier(), transfer.offered()).code is ErrorCode.STORAGE_UNAVAILABLE


def test_second_host_waits_for_the_first(transfer: Transfer) -> None:
    """One copy of a file at a time; the other host finds it complete."""
    file = transfer.offered()
    held, go_on = threading.Event(), threading.Event()

    def hold(_name: str, _done: float) -> None:
        held.set()
        assert go_on.wait(TIMEOUT_S)

    first = FileCopier(
        transfer.folder / "copies", transfer.ticket, access=lambda: (transfer.port, transfer.key), on_progress=hold
    )
    copies: list[Path] = []
    hosts = [
        threading.Thread(target=lambda copier=copier: copies.append(copier.fetch([file])), daemon=True)
        for copier in (first, transfer.copier())
    ]
    hosts[0].start()
    assert held.wait(TIMEOUT_S)
    hosts[1].start()
    hosts[1].join(0.1)
    assert hosts[1].is_alive()
    go_on.set()
    for host in hosts:
        host.join(TIMEOUT_S)
    assert len(copies) == 2
    assert transfer.progress == []


def test_rate_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies share it: each block waits for those before it."""
    waits: list[float] = []
    stopped = threading.Event()
    monkeypatch.setattr(stopped, "wait", lambda seconds: waits.append(round(seconds, 3)))
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    pacer = file_transfer._Pacer(1000.0, stopped)
    for _ in range(3):
        pacer.wait(500)
    assert waits == [0.0, 0.5, 1.0]
