"""The control socket of a running daemon."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.control import (
    ControlSocket,
    ReloadProblem,
    ReloadReport,
    notify_tokens_changed,
    request_purge,
    request_reload,
    try_lock_state_dir,
)


async def test_notification_reaches_the_daemon(tmp_path: Path) -> None:
    """The callback runs on the daemon's loop; the socket is private and removed at the end."""
    told = asyncio.Event()
    control = ControlSocket(tmp_path, tokens_changed=told.set)
    control.open()
    assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600
    assert notify_tokens_changed(tmp_path)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()
    assert not (tmp_path / "control.sock").exists()


async def test_long_state_directory_path(tmp_path: Path) -> None:
    """A path longer than a socket address works too."""
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    told = asyncio.Event()
    control = ControlSocket(deep, tokens_changed=told.set)
    control.open()
    assert notify_tokens_changed(deep)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()


async def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    """A killed daemon's socket does not stop the next one from listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(tmp_path / "control.sock"))
    assert not notify_tokens_changed(tmp_path)
    control = ControlSocket(tmp_path, tokens_changed=lambda: None)
    control.open()
    assert notify_tokens_changed(tmp_path)
    control.close()


async def test_unknown_command_is_ignored(tmp_path: Path) -> None:
    """The next datagram is handled."""
    calls: list[str] = []
    told = asyncio.Event()

    def changed() -> None:
        calls.append("tokens")
        told.set()

    control = ControlSocket(tmp_path, tokens_changed=changed)
    control.open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"x" * 1000, str(tmp_path / "control.sock"))
    assert notify_tokens_changed(tmp_path)
    async with asyncio.timeout(60):
        await told.wait()
    assert calls == ["tokens"]
    control.close()


@pytest.mark.parametrize("name", ["s_1", "Ünïcode with spaces", "x" * 1000])
async def test_purge_reaches_the_daemon(tmp_path: Path, name: str) -> None:
    """The daemon receives its kind and the complete name."""
    asked: list[tuple[str, str]] = []
    told = asyncio.Event()

    def purge(kind: str, name: str) -> None:
        asked.append((kind, name))
        if len(asked) == 2:
            told.set()

    control = ControlSocket(tmp_path, tokens_changed=lambda: None, purge=purge)
    control.open()
    assert request_purge(tmp_path, "session", name)
    assert request_purge(tmp_path, "client", name)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()
    assert asked == [("session", name), ("client", name)]


async def test_truncated_or_invalid_name_purges_nothing(tmp_path: Path) -> None:
    """The sender refuses names that are too long, and the daemon truncated ones."""
    asked: list[str] = []
    told = asyncio.Event()
    control = ControlSocket(tmp_path, tokens_changed=told.set, purge=lambda _, name: asked.append(name))
    control.open()
    with pytest.raises(InferenceCenterError, match="too long"):
        request_purge(tmp_path, "client", "x" * 5000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        for word in (b"purge client " + b"x" * 5000, b"purge client \xff", b"purge everything x"):
            other.sendto(word, str(tmp_path / "control.sock"))
    assert notify_tokens_changed(tmp_path)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()
    assert asked == []


def test_state_directory_lock_is_exclusive(tmp_path: Path) -> None:
    """The second daemon is refused until the first has exited."""
    with try_lock_state_dir(tmp_path) as first, try_lock_state_dir(tmp_path) as second:
        assert (first, second) == (True, False)
    with try_lock_state_dir(tmp_path) as third:
        assert third


def test_missing_daemon_is_reported(tmp_path: Path) -> None:
    """The directory may be missing, too."""
    assert not notify_tokens_changed(tmp_path)
    assert not notify_tokens_changed(tmp_path / "missing")
    assert not request_purge(tmp_path, "session", "s_1")


async def test_unusable_directory_is_named(tmp_path: Path) -> None:
    """The error has the path of the socket."""
    control = ControlSocket(tmp_path / "missing", tokens_changed=lambda: None)
    with pytest.raises(InferenceCenterError, match=r"control\.sock") as caught:
        control.open()
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_reload_returns_its_problems(tmp_path: Path) -> None:
    """Their number is bounded, and no descriptor stays open."""
    problem = ReloadProblem("clients", ErrorCode.INVALID_CONFIG, "clients.toml is broken", "client_id", None)
    report = ReloadReport((problem,) * 50, ("server.port",))
    control = ControlSocket(tmp_path, tokens_changed=lambda: None, reload=lambda: report)
    control.open()
    before = _open_descriptors()
    answer = await asyncio.to_thread(request_reload, tmp_path, timeout_s=60)
    assert answer == ReloadReport((problem,) * 20, ("server.port",))
    assert _open_descriptors() == before
    control.close()


async def test_unsupported_command_is_detected_at_once(tmp_path: Path) -> None:
    """The daemon closes the descriptor, which ends the wait before the timeout."""
    control = ControlSocket(tmp_path, tokens_changed=lambda: None)
    control.open()
    with pytest.raises(InferenceCenterError, match="of a version without this command") as caught:
        await asyncio.to_thread(request_reload, tmp_path, timeout_s=3600)
    assert caught.value.code is ErrorCode.DAEMON_UNREACHABLE
    control.close()


async def test_failing_command_is_detected_at_once(tmp_path: Path) -> None:
    """The reply's descriptor is closed, and the next command works."""
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(context["exception"]))

    def reload() -> ReloadReport:
        raise RuntimeError("unforeseen")

    told = asyncio.Event()
    control = ControlSocket(tmp_path, tokens_changed=told.set, reload=reload)
    control.open()
    with pytest.raises(InferenceCenterError, match="the daemon ended"):
        await asyncio.to_thread(request_reload, tmp_path, timeout_s=3600)
    assert [str(error) for error in failed] == ["unforeseen"]
    assert notify_tokens_changed(tmp_path)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()


async def test_reply_to_a_closed_caller_is_dropped(tmp_path: Path) -> None:
    """The daemon neither fails nor waits."""
    told = asyncio.Event()
    control = ControlSocket(tmp_path, tokens_changed=told.set, reload=ReloadReport)
    control.open()
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, theirs:
        ours.close()
        sender.connect(str(tmp_path / "control.sock"))
        socket.send_fds(sender, [b"reload"], [theirs.fileno()])
    assert notify_tokens_changed(tmp_path)
    async with asyncio.timeout(60):
        await told.wait()
    control.close()


def test_reload_without_a_daemon_is_an_error(tmp_path: Path) -> None:
    """The message names the state directory."""
    with pytest.raises(InferenceCenterError, match="no daemon listens in") as caught:
        request_reload(tmp_path, timeout_s=60)
    assert caught.value.code is ErrorCode.DAEMON_UNREACHABLE
