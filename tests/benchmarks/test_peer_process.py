"""Processes of peer servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.peer_process import filled, start_peer
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


async def test_server_is_ready_with_its_health_endpoint(tmp_path: Path) -> None:
    """It is stopped afterwards, and refused while another one answers."""
    (tmp_path / "health").write_text("ok")
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    command = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {tmp_path}"
    async with start_peer(command, url=url) as ready_s:
        assert ready_s > 0
        with pytest.raises(InferenceCenterError, match="answers already"):
            await start_peer(command, url=url).__aenter__()
    async with start_peer(command, url=url):
        pass


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"{sys.executable} -c pass", ErrorCode.ENGINE_UNAVAILABLE),
        ("/nowhere/server", ErrorCode.INVALID_REQUEST),
        ("'unclosed", ErrorCode.INVALID_REQUEST),
    ],
)
async def test_server_start_failure_is_reported(command: str, code: ErrorCode) -> None:
    """It exits at once, is no program, or is no command line."""
    with pytest.raises(InferenceCenterError) as failed:
        async with start_peer(command, url=f"http://127.0.0.1:{free_port()}"):
            pass

    assert failed.value.code is code


def test_command_receives_our_slots_and_context() -> None:
    """The context is that of a slot, or of all slots together; other braces stay."""
    command = filled("server -np {slots} -c {context} --per-slot {n_ctx} --form '{x}'", slots=4, n_ctx=512)

    assert command == "server -np 4 -c 2048 --per-slot 512 --form '{x}'"
