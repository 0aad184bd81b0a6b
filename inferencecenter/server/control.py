"""The control socket between the command line and a running daemon: datagrams, one command each.

A command with a reply carries the reply's socket as a file descriptor. The command line reads from the other end until
it closes, so a daemon that dies, or one that drops the descriptor because it does not know the command, is noticed at
once and not by a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import FileIdentity, FileMovedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from inferencecenter.sessions.store.recorder import PurgeKind

TOKENS_CHANGED: Final = b"tokens"
_RELOAD: Final = b"reload"
_MAX_PROBLEMS: Final = 20
_PURGE_COMMANDS: Final[dict[PurgeKind, bytes]] = {"session": b"purge session ", "client": b"purge client "}
DAEMON_LOCK_NAME: Final = "daemon.lock"
"""Lock file in the state directory, held by a running daemon."""
_NAME: Final = "control.sock"
_MAX_DATAGRAM_BYTES: Final = 4096

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReloadProblem:
    """A part of the configuration that was not reloaded and stays as it was, and why."""

    what: str
    code: ErrorCode
    message: str
    field: str | None
    hint: str | None


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """Result of a reload: the problems, and the changed settings that take effect only after a restart."""

    problems: tuple[ReloadProblem, ...] = ()
    needs_restart: tuple[str, ...] = ()


_REPORT: Final = TypeAdapter(ReloadReport)


@contextlib.contextmanager
def exclusive_state_dir(state_dir: Path) -> Iterator[None]:
    """Create the state directory, readable by its owner only, and lock it for this daemon.

    Raises:
        InferenceCenterError: ``storage_unavailable``.
    """
    path = state_dir / DAEMON_LOCK_NAME
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{path} cannot be opened: {error.strerror}",
            hint="The state directory must be writable; choose another with state_dir.",
            field="state_dir",
        ) from error
    with contextlib.ExitStack() as held:
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"another daemon uses {state_dir}",
                hint="Stop it, or give this one another state_dir.",
                field="state_dir",
            ) from None
        yield


@contextlib.contextmanager
def try_lock_state_dir(state_dir: Path) -> Iterator[bool]:
    """Lock ``state_dir`` so that no daemon starts on it; ``False`` if a daemon holds the lock.

    Raises:
        OSError: The directory does not exist or belongs to another user.
    """
    descriptor = os.open(state_dir / DAEMON_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def record_open_files(state_dir: Path, identities: Iterable[FileIdentity | None]) -> None:
    """Record the files that this daemon, which holds the lock of ``state_dir``, has open.

    Raises:
        OSError: It cannot be written.
    """
    inodes = [(path.name, *numbers) for each in identities if each is not None for path, *numbers in each.inodes]
    (state_dir / DAEMON_LOCK_NAME).write_bytes(orjson.dumps(inodes))


def check_open_files(state_dir: Path) -> None:
    """Compare the files in ``state_dir`` with those that a running daemon has open, if one is running.

    Raises:
        FileMovedError: The daemon writes to a file that was moved or deleted.
        OSError: The state directory belongs to another user.
    """
    try:
        recorded = _recorded((state_dir / DAEMON_LOCK_NAME).read_bytes())
    except FileNotFoundError:
        return
    identity = FileIdentity(tuple((state_dir / name, device, inode) for name, device, inode in recorded))
    try:
        identity.check()
    except FileMovedError:
        # The record of a killed daemon is stale.
        with try_lock_state_dir(state_dir) as alone:
            if not alone:
                raise


def notify_tokens_changed(state_dir: Path) -> bool:
    """Notify the daemon of ``state_dir`` that tokens have changed; ``False`` if none is listening."""
    return _send(state_dir, TOKENS_CHANGED)


def request_purge(state_dir: Path, kind: PurgeKind, name: str) -> bool:
    """Request the daemon of ``state_dir`` to purge a session, or all data of a client; ``False`` if none is listening.

    Raises:
        InferenceCenterError: ``invalid_request`` for a malformed name.
    """
    datagram = _PURGE_COMMANDS[kind] + name.encode()
    if len(datagram) > _MAX_DATAGRAM_BYTES:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"the {kind}'s name is too long", field=kind)
    return _send(state_dir, datagram)


def request_reload(state_dir: Path, *, timeout_s: float) -> ReloadReport:
    """Request the daemon of ``state_dir`` to reload its configuration, and return the result.

    Raises:
        InferenceCenterError: ``daemon_unreachable``; no daemon listens, or it does not answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            sent = _send(state_dir, _RELOAD, theirs.fileno())
        if not sent:
            raise _no_answer(f"no daemon listens in {state_dir}", "Is that its state directory, and are you its user?")
        ours.settimeout(timeout_s)
        try:
            answer = b"".join(iter(lambda: ours.recv(_MAX_DATAGRAM_BYTES), b""))
            return _REPORT.validate_json(answer)
        except TimeoutError as error:
            raise _no_answer(f"the daemon has not answered within {timeout_s:g} s", "See its log.") from error
        except (OSError, ValidationError) as error:
            raise _no_answer(
                "the daemon ended, or is of a version without this command", "Look at its log, or restart it."
            ) from error


def _no_answer(message: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, message, hint=hint)


def _send(state_dir: Path, datagram: bytes, *descriptors: int) -> bool:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            with _short_path(state_dir) as path:
                # Not `socket.send_fds`, which ignores the address.
                sender.sendmsg([datagram], ancillary, 0, path)
        except OSError:
            return False
    return True


class ControlSocket:
    """The daemon's end of the control socket; to be opened on the event loop.

    Args:
        state_dir: Directory of the socket. The caller holds its lock, so an existing socket there is stale.
        tokens_changed: Called on the event loop.
        purge: Called on the event loop with the kind and name of what is to be purged; ``None`` without a store.
        reload: Called on the event loop; its result is the reply.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        tokens_changed: Callable[[], None],
        purge: Callable[[PurgeKind, str], object] | None = None,
        reload: Callable[[], ReloadReport] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._tokens_changed = tokens_changed
        self._purge = purge
        self._reload = reload
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def open(self) -> None:
        """Listen.

        Raises:
            InferenceCenterError: ``storage_unavailable`` when the socket cannot be made.
        """
        self._socket.setblocking(False)
        # Set before bind, this is the mode of the file, so that other users can never write to it.
        os.fchmod(self._socket.fileno(), 0o600)
        try:
            (self._state_dir / _NAME).unlink(missing_ok=True)
            with _short_path(self._state_dir) as path:
                self._socket.bind(path)
        except OSError as error:
            self._socket.close()
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"{self._state_dir / _NAME} cannot be made: {error.strerror}",
                hint="The state directory must exist and be writable.",
            ) from error
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        (self._state_dir / _NAME).unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            # One byte more than the limit, to detect datagrams that are too long.
            datagram, descriptors, _, _ = socket.recv_fds(
                self._socket, _MAX_DATAGRAM_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        with contextlib.ExitStack() as received:
            for descriptor in descriptors:
                received.callback(os.close, descriptor)
            self._execute(datagram, descriptors)

    def _execute(self, datagram: bytes, descriptors: Sequence[int]) -> None:
        if datagram == TOKENS_CHANGED:
            self._tokens_changed()
        elif datagram == _RELOAD and self._reload is not None:
            _answer(descriptors, self._reload())
        elif self._purge is not None and (wanted := _purge_in(datagram)) is not None:
            self._purge(*wanted)
        else:
            _log.warning("control_word_unknown", length=len(datagram))


def _answer(descriptors: Sequence[int], report: ReloadReport) -> None:
    """Send the reply without blocking; a command line that has exited meanwhile is ignored."""
    shown = replace(report, problems=report.problems[:_MAX_PROBLEMS])
    for descriptor in descriptors:
        os.set_blocking(descriptor, False)
        try:
            os.write(descriptor, _REPORT.dump_json(shown))
        except OSError as error:
            _log.warning("control_answer_lost", error=error.strerror)


def _purge_in(datagram: bytes) -> tuple[PurgeKind, str] | None:
    """Return the kind and name in a purge command, ``None`` for any other datagram."""
    if len(datagram) > _MAX_DATAGRAM_BYTES:
        return None
    for kind, beginning in _PURGE_COMMANDS.items():
        if datagram.startswith(beginning):
            try:
                return kind, datagram.removeprefix(beginning).decode()
            except UnicodeDecodeError:
                return None
    return None


def _recorded(content: bytes) -> list[tuple[str, int, int]]:
    """Return the daemon's record; empty without one, or while the daemon starts."""
    try:
        return [(str(name), int(device), int(inode)) for name, device, inode in orjson.loads(content)]
    except (ValueError, TypeError):
        return []


@contextlib.contextmanager
def _short_path(state_dir: Path) -> Iterator[str]:
    """A path of the socket that fits the 108 bytes of sockaddr_un, however deep the directory."""
    directory = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{_NAME}"
    finally:
        os.close(directory)
