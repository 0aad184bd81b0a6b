"""The Unix socket: its file, the credentials of its peers, and the accounts of their users.

A peer on this socket has no network address. Where the address of a peer is used (rate limits, logs, the audit log) the
text ``unix:`` with its user id takes its place, so each user has the limits of one address. The kernel supplies the
user id, as of the time when the peer connected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferencecenter.auth.bootstrap import ADMIN_CLIENT
from inferencecenter.core.addresses import unix_peer
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_PATH_BYTES: Final = 107
"""Linux has 108 bytes for the path of a socket, the last of which is 0."""
_FIELD: Final = "server.unix_socket"
_CREDENTIALS: Final = struct.Struct("=iII")
"""``struct ucred``: pid, uid, gid."""
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_ROOT: Final = 0


def peer_text(connection: socket.socket) -> str:
    """Return what stands for the address of the peer of an accepted connection."""
    return unix_peer(peer_uid(connection))


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


@contextlib.contextmanager
def unix_socket(path: Path, *, mode: int, backlog: int) -> Iterator[socket.socket]:
    """Listen at ``path`` inside the context, and remove the file at its end.

    The file of a daemon that was killed is replaced. To find out that no program listens, to replace the file and to
    listen are three steps, between which another daemon that starts would find the same stale file. So a lock is held
    meanwhile, and a daemon that does not get it is refused.

    Raises:
        InferenceCenterError: ``invalid_config`` for an unsuitable path, ``address_in_use`` if a program listens there,
            or the file cannot be made.
    """
    check_path(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path):
            _replace_stale(path)
            # The umask applies to this mode, which is the file's until it is set below: there is no moment in which the
            # file has more permissions than configured.
            os.fchmod(listening.fileno(), mode)
            listening.bind(str(path))
            path.chmod(mode)
            listening.listen(backlog)
            listening.setblocking(False)
            identity = _identity(path)
    except OSError as error:
        listening.close()
        raise _cannot_listen(path, error.strerror or str(error)) from error
    except InferenceCenterError:
        listening.close()
        raise
    try:
        yield listening
    finally:
        listening.close()
        # Not the file of another daemon: one that starts now replaces this file, one for which an operator has removed
        # it has a file of its own.
        with contextlib.suppress(OSError, InferenceCenterError), _locked(path):
            if _identity(path) == identity:
                path.unlink()


def check_path(path: Path) -> None:
    """Refuse a path at which no socket can be made, or at which others could replace it.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    n_bytes = len(os.fsencode(path))
    if n_bytes > MAX_PATH_BYTES:
        raise _unsuitable(f"{path} has {n_bytes} bytes; the path of a socket has at most {MAX_PATH_BYTES}")
    try:
        directory = path.parent.stat()
    except OSError as error:
        raise _unsuitable(f"{path.parent}: {error.strerror}", hint="Its directory must exist.") from error
    if directory.st_mode & stat.S_IWOTH and not directory.st_mode & stat.S_ISVTX:
        raise _unsuitable(
            f"every user can replace files in {path.parent}, and would receive what clients send",
            hint="Choose a directory that only the daemon's user can write to, such as /run/inferencecenter.",
        )
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise _unsuitable(f"{path} exists and is no socket")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unsuitable(f"{path}: {error.strerror}") from error


def is_listening(path: Path) -> bool:
    """Return whether a program accepts connections at ``path``.

    Raises:
        OSError: That cannot be found out, such as ``PermissionError``.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the socket at ``path``: a file beside it that only the daemon's user can open.

    Raises:
        InferenceCenterError: ``address_in_use``, if another daemon holds it.
        OSError: The file cannot be made.
    """
    lock = path.with_name(f"{path.name}.lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(descriptor, path)
            if _names(lock, descriptor):
                try:
                    yield
                finally:
                    lock.unlink()
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _cannot_listen(path, "another daemon is starting there") from None


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file; its former holder may have removed it before it was locked."""
    status = os.fstat(descriptor)
    with contextlib.suppress(FileNotFoundError):
        return _identity(path) == (status.st_dev, status.st_ino)
    return False


def _replace_stale(path: Path) -> None:
    if is_listening(path):
        raise _cannot_listen(path, os.strerror(errno.EADDRINUSE))
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _cannot_listen(path: Path, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.ADDRESS_IN_USE,
        f"cannot listen on {path}: {reason}",
        field=_FIELD,
        hint="Another daemon may listen there; the directory must be writable by the daemon's user.",
    )


def _unsuitable(message: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, message, field=_FIELD, hint=hint)


def unix_accounts(entries: Iterable[str]) -> dict[int, str]:
    """Return the accounts of user ids, given entries of ``auth.unix_users``.

    Without an entry of their own, root and the user of this process have the administrator's account, whose token they
    can read anyway. The user id that stands for users of other namespaces never has an account.

    Raises:
        InferenceCenterError: ``invalid_config`` for an unknown user, or one that is listed twice.
    """
    unmapped = _unmapped_uid()
    accounts = {uid: ADMIN_CLIENT for uid in (_ROOT, os.getuid()) if uid != unmapped}
    listed: set[int] = set()
    for entry in entries:
        user, _, account = entry.partition("=")
        uid = _uid_of(user)
        if uid == unmapped:
            raise _invalid_entry(f"{user} also stands for every user of another namespace")
        if uid in listed:
            raise _invalid_entry(f"{user} is listed twice")
        listed.add(uid)
        accounts[uid] = account or user
    return accounts


def _uid_of(user: str) -> int:
    if user.isascii() and user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise _invalid_entry(f"there is no user {user}") from None


def _unmapped_uid() -> int | None:
    try:
        return int(_OVERFLOW_UID.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _invalid_entry(message: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        message,
        field="auth.unix_users",
        hint='A user name or id of this machine, and its account: "alice", "alice=alice@home" or "1001=build".',
    )
