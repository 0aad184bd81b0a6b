"""Tests of the local wire to a running daemon."""

from __future__ import annotations

import asyncio
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.control import ControlSocket, notify

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_notice_reaches_the_daemon(tmp_path: Path) -> None:
    """The callback runs on the daemon's loop; the socket is the owner's alone and goes away at the end."""
    told = asyncio.Event()
    control = ControlSocket(tmp_path, tokens_changed=told.set)
    control.open()
    assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600
    assert notify(tmp_path)
    async with asyncio.timeout(5):
        await told.wait()
    control.close()
    assert not (tmp_path / "control.sock").exists()


async def test_the_directory_may_lie_deep(tmp_path: Path) -> None:
    """A path longer than a socket address holds works too."""
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    told = asyncio.Event()
    control = ControlSocket(deep, tokens_changed=told.set)
    control.open()
    assert notify(deep)
    async with asyncio.timeout(5):
        await told.wait()
    control.close()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon left behind does not keep the next one from listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(tmp_path / "control.sock"))
    assert not notify(tmp_path)
    control = ControlSocket(tmp_path, tokens_changed=lambda: None)
    control.open()
    assert notify(tmp_path)
    control.close()


async def test_unknown_words_do_nothing(tmp_path: Path) -> None:
    """A datagram of another version is passed over, and the next one is heard."""
    calls: list[str] = []
    told = asyncio.Event()

    def changed() -> None:
        calls.append("tokens")
        told.set()

    control = ControlSocket(tmp_path, tokens_changed=changed)
    control.open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"x" * 1000, str(tmp_path / "control.sock"))
    assert notify(tmp_path)
    async with asyncio.timeout(5):
        await told.wait()
    assert calls == ["tokens"]
    control.close()


def test_nobody_listens(tmp_path: Path) -> None:
    """Without a daemon, or without its directory, the caller is told so."""
    assert not notify(tmp_path)
    assert not notify(tmp_path / "missing")


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """The error says which socket could not be made."""
    control = ControlSocket(tmp_path / "missing", tokens_changed=lambda: None)
    with pytest.raises(InferenceCenterError, match=r"control\.sock") as caught:
        control.open()
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
