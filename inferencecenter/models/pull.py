"""Downloads a model from a hub into a directory: complete and verified, or not at all; downloads are resumed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.files import Manifest, ModelFiles, find_model, list_models, manifest_path
from inferencecenter.models.reference import (
    check_name,
    choose,
    choose_projector,
    file_names,
    parse_reference,
    projector_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from inferencecenter.models.hub import Listing, ModelHub
    from inferencecenter.models.reference import ModelVariant, RemoteFile

INCOMING: Final = ".incoming"
"""Subdirectory of the models for incomplete files, each named by its checksum."""
_RETRY_DELAYS_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry after an attempt that received nothing."""
_HASHED_BYTES: Final = 2**22
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Progress of a pull: the file being fetched, and the bytes received and needed in all."""

    file: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that was pulled; ``fetched`` is false if it existed before."""

    model: ModelFiles
    fetched: bool


def pull(  # noqa: PLR0913 - keyword-only; the last three have defaults
    hub: ModelHub,
    reference: str,
    *,
    directory: Path,
    name: str | None = None,
    with_projector: bool = True,
    report: Callable[[PullProgress], None] = lambda _progress: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Pulled:
    """Download a model into a directory; its files get their names when all are complete and verified.

    A projector in its repository is downloaded with it, also later if only that is missing.

    Args:
        hub: The hub.
        reference: ``owner/repo:Q4_K_M``, ``owner/repo/file.gguf`` or ``owner/repo``.
        directory: The target; created if it does not exist.
        name: The model's local name; by default its file's name in the repository.
        with_projector: Whether a projector is wanted.
        report: Called with the progress after each chunk.
        sleep: Waits for seconds before a retry.
        clock: Unix time in seconds.

    Raises:
        InferenceCenterError: ``invalid_request``, ``model_not_found``, ``forbidden``, ``hub_unreachable``,
            ``storage_unavailable`` (disk full, or another process pulls it) or ``invalid_model_file`` (checksum).
    """
    wanted = parse_reference(reference)
    if name is not None:
        name = check_name(name.removesuffix(".gguf"))
    listing = hub.listing(wanted.repo)
    variant = choose(wanted, listing.files)
    name = name or check_name(variant.name)
    wanted_files = dict(zip(file_names(name, len(variant.files)), variant.files, strict=True))
    projector = choose_projector(variant, listing.files) if with_projector and not variant.is_projector else None
    with _storage_failures(directory), _incoming(directory) as incoming:
        digests: dict[str, str] = {}
        if (existing := _find_pulled(directory, name, variant)) is not None:
            wanted_files.clear()
            digests |= existing.manifest.sha256 if existing.manifest else {}
        if projector is not None and not (directory / projector_name(name)).exists():
            wanted_files[projector_name(name)] = projector
        if existing is not None and not wanted_files:
            return Pulled(existing, fetched=False)
        parts = {own_name: incoming / f"{_digest_of(file, hub)}.part" for own_name, file in wanted_files.items()}
        total_bytes = sum(file.size_bytes for file in wanted_files.values())
        _check_room(total_bytes, parts.values(), directory)
        before = 0
        for own_name, file in wanted_files.items():
            fetch = _Fetch(hub, listing, file, parts[own_name], sleep=sleep)
            digests[own_name] = fetch.run(partial(_report_on, report, file.path, before, total_bytes))
            before += file.size_bytes
        source = f"{listing.repo}/{variant.files[0].path}"
        manifest = Manifest(source=source, commit=listing.commit, pulled_at=clock(), sha256=digests)
        _install(directory, name, parts, manifest)
    return Pulled(find_model(directory, name), fetched=True)


class _Fetch:
    """The download of one file."""

    def __init__(
        self, hub: ModelHub, listing: Listing, file: RemoteFile, part: Path, *, sleep: Callable[[float], None]
    ) -> None:
        self._hub = hub
        self._listing = listing
        self._file = file
        self._part = part
        self._sleep = sleep
        self._done = 0
        self._hashes = _hashes(file)

    def run(self, report: Callable[[int], None]) -> str:
        """Fetch the missing parts, verify the file, and return its SHA-256 in hex.

        Args:
            report: Called with the bytes received.

        Raises:
            InferenceCenterError: See ``pull``.
        """
        with _locked(self._part) as part:
            self._resume(part, report)
            attempts = iter(_RETRY_DELAYS_S)
            while self._done < self._file.size_bytes:
                before = self._done
                try:
                    self._receive(part, report)
                except InferenceCenterError as error:
                    if error.code is not ErrorCode.HUB_UNREACHABLE:
                        raise
                    if self._done > before:
                        attempts = iter(_RETRY_DELAYS_S)
                    if (wait_s := next(attempts, None)) is None:
                        raise
                    self._sleep(wait_s)
            os.fsync(part)
        self._check()
        return self._hashes["sha256"].hexdigest()

    def _resume(self, part: int, report: Callable[[int], None]) -> None:
        """Return the bytes left by an earlier attempt; a part longer than the file does not count."""
        if os.fstat(part).st_size > self._file.size_bytes:
            os.ftruncate(part, 0)
        while chunk := os.pread(part, _HASHED_BYTES, self._done):
            self._add(chunk)
            report(self._done)

    def _receive(self, part: int, report: Callable[[int], None]) -> None:
        with self._hub.read(self._listing, self._file, start=self._done) as body:
            if body.start != self._done:
                os.ftruncate(part, 0)
                self._done, self._hashes = 0, _hashes(self._file)
            before = self._done
            for chunk in body.chunks:
                if self._done + len(chunk) > self._file.size_bytes:
                    raise self._corrupt(f"more than its {self._file.size_bytes} bytes arrive")
                _write(part, chunk, self._done)
                self._add(chunk)
                report(self._done)
        if self._done == before:
            raise InferenceCenterError(ErrorCode.HUB_UNREACHABLE, f"no data of {self._file.path} arrives")

    def _add(self, chunk: bytes) -> None:
        for each in self._hashes.values():
            each.update(chunk)
        self._done += len(chunk)

    def _check(self) -> None:
        kind = "sha256" if self._file.sha256 else "git"
        if self._hashes[kind].hexdigest() != self._file.digest:
            raise self._corrupt("its checksum does not match")

    def _corrupt(self, why: str) -> InferenceCenterError:
        """Delete the downloaded part, and return the error."""
        self._part.unlink(missing_ok=True)
        return InferenceCenterError(
            ErrorCode.INVALID_MODEL_FILE,
            f"{self._file.path} differs from what the hub describes: {why}",
            hint="The downloaded part is deleted. Try again; if it happens again, the file is damaged on the hub.",
        )


def _report_on(report: Callable[[PullProgress], None], file: str, before: int, total: int, done: int) -> None:
    report(PullProgress(file, before + done, total))


def _hashes(file: RemoteFile) -> dict[str, hashlib._Hash]:
    sums = {"sha256": hashlib.sha256()}
    if file.sha256 is None:
        # Git's object name of the content.
        sums["git"] = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    return sums


def _digest_of(file: RemoteFile, hub: ModelHub) -> str:
    if file.digest is None or _DIGEST.fullmatch(file.digest) is None:
        raise InferenceCenterError(
            ErrorCode.HUB_UNREACHABLE,
            f"{hub.endpoint} has no checksum of {file.path}",
            hint="Without a checksum the download cannot be verified.",
        )
    return file.digest


def _find_pulled(directory: Path, name: str, variant: ModelVariant) -> ModelFiles | None:
    """Return the model if it was pulled before.

    Raises:
        InferenceCenterError: ``invalid_request`` if another model has its name.
    """
    existing = next((model for model in list_models(directory) if model.name == name), None)
    if existing is None:
        return None
    sizes = tuple(path.stat().st_size for path in existing.paths)
    digests = tuple((existing.manifest.sha256 if existing.manifest else {}).get(path.name) for path in existing.paths)
    same = sizes == tuple(file.size_bytes for file in variant.files)
    if same and all(file.sha256 in (None, digest) for file, digest in zip(variant.files, digests, strict=True)):
        return existing
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{directory} already has another model named {name}",
        field="name",
        hint=f"Choose another name with --name, or `inferencecenter model remove {name}` first.",
    )


def _check_room(total_bytes: int, parts: Iterable[Path], directory: Path) -> None:
    received = sum(part.stat().st_size for part in parts if part.exists())
    needed, free = total_bytes - received, shutil.disk_usage(directory).free
    if needed > free:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{directory} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are still to be downloaded",
            hint="Free some space, or set models_dir to another directory.",
        )


def _install(directory: Path, name: str, parts: dict[str, Path], manifest: Manifest) -> None:
    """Rename the files, the first part last: without it the others are not recognized as a model."""
    temporary = directory / INCOMING / f"{name}.json"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    temporary.replace(manifest_path(directory, name))
    for own_name, part in reversed(parts.items()):
        part.chmod(0o644)
        part.replace(directory / own_name)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[int]:
    """Open a part file with an exclusive lock."""
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE, "another process fetches the same file", hint="Wait until it ends."
            ) from None
        yield descriptor
    finally:
        if os.fstat(descriptor).st_size == 0:
            part.unlink(missing_ok=True)
        os.close(descriptor)


def _write(descriptor: int, chunk: bytes, at: int) -> None:
    left = memoryview(chunk)
    while left:
        written = os.pwrite(descriptor, left, at)
        at, left = at + written, left[written:]


@contextlib.contextmanager
def _incoming(directory: Path) -> Iterator[Path]:
    """Yield the directory of incomplete files; it is removed at the end if empty."""
    incoming = directory / INCOMING
    incoming.mkdir(parents=True, exist_ok=True)
    try:
        yield incoming
    finally:
        with contextlib.suppress(OSError):
            incoming.rmdir()


@contextlib.contextmanager
def _storage_failures(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{directory} is full" if full else f"{directory} cannot be written: {error.strerror}",
            hint="Free some space and try again; downloaded parts are kept."
            if full
            else "models_dir must be writable for who pulls; for the service's directory that is root.",
        ) from None
