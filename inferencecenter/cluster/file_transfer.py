"""Copies model files from the front to the machines that lack them.

A host connects to a port of its own for this, by TLS with the certificate and the key of its link, so that gigabytes
neither delay the frames of engines nor pass through the front's event loop: both ends are blocking sockets in threads,
and TLS, digests and disk reads run without the interpreter's lock. All files together are sent at a limited rate.

A request names a file of the engine's order and an offset; the reply is a line of JSON. Then follow blocks, each after
its length in four bytes, of which ``_ALIVE`` only says that the front still reads, and at ``_END`` a line of JSON with
the SHA-256 of the whole file. The front compares size and time of change before and after that, and refuses a file that
is not the one of the order.

A copy is complete or absent: it is written to ``.NAME.part`` and renamed once its digest is correct. A partial one
belongs to exactly one version of the file (``copy_key`` names its directory), so that it is continued after any loss.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgspec
import structlog

from inferencecenter.cluster.certificates import FRONT_NAME, client_context
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, reason_of
from inferencecenter.hardware.placement import MIB

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.ipc.link import LinkTicket, ModelFile
    from inferencecenter.supervisor.remote import Certificates, HostRegistry

_BLOCK_BYTES: Final = MIB
_LENGTH: Final = struct.Struct(">I")
_ALIVE: Final = 0
_END: Final = 2**32 - 1
_MAX_LINE_BYTES: Final = 16_384
_MAX_CONNECTIONS: Final = 32
"""Copies at the same time; further connections wait in the kernel."""
_HANDSHAKE_TIMEOUT_S: Final = 10.0
_IDLE_TIMEOUT_S: Final = 60.0
"""An end that sends or takes nothing for this time is gone."""
_ALIVE_EVERY_BYTES: Final = 64 * MIB
_RETRY_S: Final = 1.0
_MAX_DAMAGED: Final = 2
"""A copy whose digest is wrong so often is given up; a first one may have lost what a crash left unwritten."""
_PROGRESS_EVERY_S: Final = 0.5
_KEY_CHARS: Final = 16
_MARGIN_BYTES: Final = 64 * MIB
"""Disk space that a copy leaves free."""
_log = structlog.get_logger(__name__)


class FileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Send a file from an offset; engine, epoch and key are those of the host's link."""

    engine: str
    epoch: int
    key: str
    path: str
    offset: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine}, {self.path}, offset={self.offset})"


class FileReply(msgspec.Struct, frozen=True):
    """Blocks follow, unless there is an error. After one that is ``final`` the same request has the same reply."""

    error: str = ""
    final: bool = False


class FileEnd(msgspec.Struct, frozen=True):
    """The SHA-256 of the whole file in hex, or why the blocks before it are of no use."""

    sha256: str = ""
    error: str = ""


class _Pacer:
    """Spaces blocks so that all together have at most a number of bytes a second; 0 is no limit."""

    def __init__(self, bytes_per_s: float, stopped: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopped = stopped
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, n_bytes: int) -> None:
        """Wait until this many bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            start_s = max(now_s, self._free_s)
            self._free_s = start_s + n_bytes / self._bytes_per_s
        self._stopped.wait(start_s - now_s)


class FileServer:
    """Sends the files of engines' orders to their hosts; implements ``supervisor.remote.FileSource``.

    Args:
        certificates: Those of the daemon and its hosts.
        registry: Which hosts are accepted.
        bytes_per_s: The limit of all copies together; 0 is none.
    """

    def __init__(self, certificates: Certificates, registry: HostRegistry, *, bytes_per_s: float) -> None:
        self._context = certificates.server_context()
        self._registry = registry
        self._stopped = threading.Event()
        self._pacer = _Pacer(bytes_per_s, self._stopped)
        self._offers: dict[str, tuple[ModelFile, ...]] = {}
        self._listening: socket.socket | None = None
        self._connections: set[ssl.SSLSocket] = set()
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self.port = 0

    def open(self, host: str, port: int) -> None:
        """Listen in a thread.

        Raises:
            OSError: The address is in use or not one of this machine.
        """
        self._listening = socket.create_server((host, port), backlog=_MAX_CONNECTIONS)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="file-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and drop all connections."""
        self._stopped.set()
        if self._listening is not None:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # which ends ``accept``
            self._listening.close()
        for connection in tuple(self._connections):
            _drop(connection)

    def offer(self, engine: str, files: tuple[ModelFile, ...]) -> int:
        """Let the host of an engine copy these files and no others; return the port."""
        self._offers[engine] = files
        return self.port

    def _accept(self) -> None:
        assert self._listening is not None, "it is open"
        while not self._stopped.is_set():
            self._free.acquire()
            try:
                connection, _ = self._listening.accept()
            except OSError:
                self._free.release()
                if self._stopped.wait(_RETRY_S):  # else there are too many open files
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), name="file-copy", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_TIMEOUT_S)
        link = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._connections.add(link)
        try:
            with link:
                if not self._stopped.is_set():
                    link.do_handshake()
                    self._answer(link)
        except (OSError, msgspec.MsgspecError, EOFError) as error:
            _log.info("file_copy_ended", reason=reason_of(error))
        finally:
            self._connections.discard(link)
            self._free.release()

    def _answer(self, link: ssl.SSLSocket) -> None:
        with _reader(link) as reader:
            request = msgspec.json.decode(_read_line(reader), type=FileRequest)
        link.settimeout(_IDLE_TIMEOUT_S)
        if not self._registry.is_connected(request.engine, request.epoch, request.key):
            _log.warning("file_copy_refused", engine=request.engine)
            _send_line(link, FileReply("another host has taken its place"))
            return
        file = next((each for each in self._offers.get(request.engine, ()) if each.path == request.path), None)
        if file is None:
            _send_line(link, FileReply(f"{request.path} is no file of this engine", final=True))
            return
        try:
            source = Path(file.path).open("rb")  # noqa: SIM115 - closed below
        except OSError as error:
            _send_line(link, FileReply(f"the daemon cannot read {file.path}: {reason_of(error)}", final=True))
            return
        with source:
            if not 0 <= request.offset <= file.size_bytes or not _is_version(source, file):
                _send_line(link, FileReply(f"{file.path} has changed", final=True))
                return
            _log.info("file_copy_begins", engine=request.engine, path=file.path, offset=request.offset)
            _send_line(link, FileReply())
            self._send(link, source, file, offset=request.offset)

    def _send(self, link: ssl.SSLSocket, source: BinaryIO, file: ModelFile, *, offset: int) -> None:
        """Send the blocks from an offset; what is before it is only read for the digest."""
        digest = hashlib.sha256()
        block = memoryview(bytearray(_LENGTH.size + _BLOCK_BYTES))
        position = 0
        while position < file.size_bytes and not self._stopped.is_set():
            wanted = (offset if position < offset else file.size_bytes) - position
            content = block[_LENGTH.size : _LENGTH.size + min(_BLOCK_BYTES, wanted)]
            n_bytes = source.readinto(content)  # type: ignore[attr-defined]
            if not n_bytes:
                break
            digest.update(content[:n_bytes])
            if position >= offset:
                self._pacer.wait(n_bytes)
                _LENGTH.pack_into(block, 0, n_bytes)
                link.sendall(block[: _LENGTH.size + n_bytes])
            elif position // _ALIVE_EVERY_BYTES != (position + n_bytes) // _ALIVE_EVERY_BYTES:
                link.sendall(_LENGTH.pack(_ALIVE))
            position += n_bytes
        if self._stopped.is_set():
            return
        link.sendall(_LENGTH.pack(_END))
        if position != file.size_bytes or not _is_version(source, file):
            _send_line(link, FileEnd(error=f"{file.path} has changed"))
        else:
            _send_line(link, FileEnd(sha256=digest.hexdigest()))
            _log.info("file_copied", path=file.path, size_mib=file.size_bytes // MIB)


def _drop(link: ssl.SSLSocket) -> None:
    """Shut a connection down that another thread uses. The method of the TLS socket would turn TLS off before that."""
    with suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)


def _is_version(source: BinaryIO, file: ModelFile) -> bool:
    status = os.fstat(source.fileno())
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def _send_line(link: ssl.SSLSocket, message: msgspec.Struct) -> None:
    link.sendall(msgspec.json.encode(message) + b"\n")


def _reader(link: ssl.SSLSocket) -> BinaryIO:
    return cast("BinaryIO", link.makefile("rb", buffering=_BLOCK_BYTES))


def _read_line(reader: BinaryIO) -> bytes:
    line = reader.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended within a message")
    return line


def _read_exactly(reader: BinaryIO, into: memoryview) -> None:
    position = 0
    while position < len(into):
        n_bytes = reader.readinto(into[position:])  # type: ignore[attr-defined]
        if not n_bytes:
            raise EOFError("the connection ended within a block")
        position += n_bytes


def copy_key(files: Sequence[ModelFile]) -> str:
    """Return a directory name for one version of files that belong together."""
    version = [(Path(each.path).name, each.size_bytes, each.mtime_ns, each.digest) for each in files]
    return hashlib.sha256(msgspec.json.encode(version)).hexdigest()[:_KEY_CHARS]


class CopyCancelledError(Exception):
    """The host ends, or has another order."""


class _RefusedError(Exception):
    """The front does not send the file."""


@contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{path} on the machine {os.uname().nodename} cannot be written: {reason_of(error)}",
            hint="Free space there, or start the node with another --directory.",
        ) from error


class FileCopier:
    """Copies files of the front to this machine. Its methods block; ``cancel`` ends them from any thread.

    Args:
        directory: Where copies are, a directory for each version of a file.
        ticket: Of the host's link.
        access: Returns the front's port for files, and the key of the link's last welcome.
        on_progress: Called from the copying thread with a file's name and the part of it that is here.
    """

    def __init__(
        self,
        directory: Path,
        ticket: LinkTicket,
        *,
        access: Callable[[], tuple[int, str]],
        on_progress: Callable[[str, float], None],
    ) -> None:
        self._directory = directory
        self._ticket = ticket
        self._access = access
        self._on_progress = on_progress
        self._cancelled = threading.Event()
        self._connection: ssl.SSLSocket | None = None

    def cancel(self) -> None:
        """End what is being copied; the partial copy stays."""
        self._cancelled.set()
        if (connection := self._connection) is not None:
            _drop(connection)

    def fetch(self, files: Sequence[ModelFile]) -> Path:
        """Return the directory with copies of files that belong together; those that are missing are made.

        Raises:
            CopyCancelledError: ``cancel`` was called.
            InferenceCenterError: ``invalid_model_file`` if the front refuses a file or it arrives damaged,
                ``storage_unavailable`` if it does not fit here or cannot be written.
        """
        directory = self._directory / copy_key(files)
        with _as_storage_error(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in files:
            target = directory / Path(file.path).name
            if not target.exists():
                self._fetch(file, target)
        return directory

    def _fetch(self, file: ModelFile, target: Path) -> None:
        with _as_storage_error(target):
            lock = target.with_name(f".{target.name}.lock").open("wb")
        with lock:
            # One host of this machine copies it; the others find it then.
            while not _try_lock(lock):
                self._pause()
            if target.exists():
                return
            part = target.with_name(f".{target.name}.part")
            self._check_space(file, part)
            self._receive(file, part)
            with _as_storage_error(target):
                part.replace(target)

    def _pause(self) -> None:
        if self._cancelled.wait(_RETRY_S):
            raise CopyCancelledError

    @staticmethod
    def _check_space(file: ModelFile, part: Path) -> None:
        with _as_storage_error(part):
            missing_bytes = file.size_bytes - (part.stat().st_size if part.exists() else 0)
            system = os.statvfs(part.parent)
        free_bytes = system.f_bavail * system.f_frsize - _MARGIN_BYTES
        if missing_bytes > free_bytes:
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"The machine {os.uname().nodename} has no space for {Path(file.path).name}: it needs "
                f"{missing_bytes / MIB:,.0f} MiB, and {max(0, free_bytes) / MIB:,.0f} MiB are free in {part.parent}.",
                hint="Free space there, or start the node with another --directory.",
            )

    def _receive(self, file: ModelFile, part: Path) -> None:
        """Receive a file over as many connections as it takes."""
        n_damaged = 0
        while n_damaged < _MAX_DAMAGED:
            if self._cancelled.is_set():
                raise CopyCancelledError
            try:
                if self._receive_once(file, part):
                    return
                n_damaged += 1
            except _RefusedError as error:
                with _as_storage_error(part):
                    part.unlink(missing_ok=True)
                raise _not_copied(file, str(error)) from None
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                _log.info("file_copy_interrupted", path=file.path, reason=reason_of(error))
                self._pause()
        raise _not_copied(file, "it arrives damaged")

    def _receive_once(self, file: ModelFile, part: Path) -> bool:
        """Receive the rest of a file; return whether it has the front's digest, and delete it if not."""
        digest = hashlib.sha256()
        with _as_storage_error(part):
            output = part.open("ab+")
        with output:
            with _as_storage_error(part):
                if part.stat().st_size > file.size_bytes:
                    output.truncate(0)
                offset = self._hash(output, digest)
            end = self._receive_blocks(file, output, digest, offset)
            with _as_storage_error(part):
                output.flush()
                os.fsync(output.fileno())
        if end.sha256 == digest.hexdigest():
            return True
        if end.error:
            raise _RefusedError(end.error)
        with _as_storage_error(part):
            part.unlink()
        _log.warning("file_copy_damaged", path=file.path)
        return False

    def _hash(self, output: BinaryIO, digest: hashlib._Hash) -> int:
        """Add what is in a partial copy to the digest, and return its size."""
        output.seek(0)
        while content := output.read(_BLOCK_BYTES):
            if self._cancelled.is_set():
                raise CopyCancelledError
            digest.update(content)
        return output.tell()

    def _receive_blocks(self, file: ModelFile, output: BinaryIO, digest: hashlib._Hash, offset: int) -> FileEnd:
        name, block, position = Path(file.path).name, memoryview(bytearray(_BLOCK_BYTES)), offset
        shown_s = 0.0
        with self._connect() as link, _reader(link) as reader:
            self._request(link, file, offset)
            reply = msgspec.json.decode(_read_line(reader), type=FileReply)
            if reply.error:
                raise (_RefusedError if reply.final else OSError)(reply.error)
            while True:
                _read_exactly(reader, block[: _LENGTH.size])
                (n_bytes,) = _LENGTH.unpack_from(block)
                if n_bytes == _END:
                    return msgspec.json.decode(_read_line(reader), type=FileEnd)
                if n_bytes > min(_BLOCK_BYTES, file.size_bytes - position):
                    raise OSError("a block is too large")
                _read_exactly(reader, block[:n_bytes])
                with _as_storage_error(Path(output.name)):
                    output.write(block[:n_bytes])
                digest.update(block[:n_bytes])
                position += n_bytes
                if (now_s := time.monotonic()) - shown_s >= _PROGRESS_EVERY_S:
                    shown_s = now_s
                    self._on_progress(name, position / file.size_bytes)

    @contextmanager
    def _connect(self) -> Iterator[ssl.SSLSocket]:
        port, _ = self._access()
        connection = socket.create_connection((self._ticket.address[0], port), timeout=_HANDSHAKE_TIMEOUT_S)
        link = client_context(self._ticket).wrap_socket(
            connection, server_hostname=FRONT_NAME, do_handshake_on_connect=False
        )
        self._connection = link
        try:
            with link:
                if self._cancelled.is_set():
                    raise CopyCancelledError
                link.do_handshake()
                link.settimeout(_IDLE_TIMEOUT_S)
                yield link
        finally:
            self._connection = None

    def _request(self, link: ssl.SSLSocket, file: ModelFile, offset: int) -> None:
        _, key = self._access()
        request = FileRequest(
            engine=self._ticket.engine, epoch=self._ticket.epoch, key=key, path=file.path, offset=offset
        )
        _send_line(link, request)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _not_copied(file: ModelFile, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_MODEL_FILE,
        f"{Path(file.path).name} cannot be copied to the machine {os.uname().nodename}: {reason}.",
        hint="Load the model again, or copy the file to that machine.",
    )
