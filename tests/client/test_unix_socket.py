"""The client, the command line and a real daemon over the Unix socket, without a token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from inferencecenter.client import Client, RequestError, blocking
from inferencecenter.client.errors import NotAllowedError, UnreachableError
from inferencecenter.client.options import socket_url, unix_path
from tests.e2e.harness import run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon

# A black pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000"
    "000049454e44ae426082"
)


@pytest.fixture(scope="module")
def socket_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the daemon listens."""
    return tmp_path_factory.mktemp("unix") / "daemon.sock"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, socket_file: Path) -> Iterator[Daemon]:
    """A daemon on the echo backend, whose user has the account ``admin``."""
    settings = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_SERVER__UNIX_SOCKET": str(socket_file)}
    with run_daemon(tmp_path_factory.mktemp("unix-state") / "state", None, **settings) as running:
        yield running
    assert not socket_file.exists()


@pytest.mark.parametrize("url", ["unix:///run/a.sock", "UNIX:///run/a.sock"])
def test_path_of_a_unix_address(url: str) -> None:
    """The scheme is accepted in any case."""
    assert unix_path(socket_url(url)) == "/run/a.sock"
    assert unix_path(socket_url("http://127.0.0.1:3000")) is None


@pytest.mark.parametrize("url", ["unix://run/a.sock", "unix://"])
def test_path_must_be_absolute(url: str) -> None:
    """A relative one would depend on the working directory."""
    with pytest.raises(RequestError, match="absolute") as caught:
        Client(url)
    assert caught.value.field == "url"


async def test_client_needs_no_token(daemon: Daemon, socket_file: Path) -> None:
    """With the account of its user, or with a token as on the port."""
    async with Client(f"unix://{socket_file}") as client:
        async with client.session() as session:
            assert "hello" in str(await session.ask("hello"))
        image = await client.add_image(PNG)
        assert image.digest
    async with Client(f"unix://{socket_file}", daemon.admin_token) as client, client.session() as session:
        assert "again" in str(await session.ask("again"))
    with pytest.raises(NotAllowedError):
        async with Client(f"unix://{socket_file}", "ic_wrong_token"):
            pass


def test_blocking_client(daemon: Daemon, socket_file: Path) -> None:
    """As the other one."""
    with blocking.Client(f"unix://{socket_file}") as client, client.session() as session:
        assert "hello" in str(session.ask("hello"))


async def test_absent_socket_is_unreachable(tmp_path: Path) -> None:
    """The error names the address."""
    with pytest.raises(UnreachableError, match="unix:///"):
        async with Client(f"unix://{tmp_path / 'none'}", reconnect=False):
            pass


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("chat",), "good morning"), (("stats", "--once", "--json"), "slots"), (("model", "list", "--json"), "echo")],
)
async def test_command_line(daemon: Daemon, socket_file: Path, arguments: tuple[str, ...], expected: str) -> None:
    """``--url`` takes the address; no token file is read."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "inferencecenter", *arguments, "--url", f"unix://{socket_file}"],
        input="good morning\n",
        env={"INFERENCECENTER_STATE_DIR": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in done.stdout
