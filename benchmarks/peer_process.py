"""Starts another server and measures how long that takes."""

from __future__ import annotations

import asyncio
import shlex
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from benchmarks.daemon_process import START_LIMIT_S, stop
from benchmarks.options import refused
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_ASKING_EVERY_S: Final = 0.02
_ANSWER_LIMIT_S: Final = 5.0


def filled(command: str, *, slots: int, n_ctx: int) -> str:
    """Return a peer's start command with our daemon's slots and context in place of their names in braces.

    ``{n_ctx}`` is the context of a slot, ``{context}`` that of all slots together, as llama-server takes it.
    """
    values = {"slots": slots, "n_ctx": n_ctx, "context": slots * n_ctx}
    for name, value in values.items():
        command = command.replace(f"{{{name}}}", str(value))
    return command


@asynccontextmanager
async def start_peer(command: str, *, url: str) -> AsyncIterator[float]:
    """Start a server, yield the seconds until its ``/health`` answered with 200, and stop it when the block is left.

    Raises:
        InferenceCenterError: ``invalid_request`` when something answers there before, or the command cannot be run;
            ``engine_unavailable`` when the server ends before it is ready, or is not ready within ``START_LIMIT_S``.
    """
    health = url.rstrip("/").removesuffix("/v1") + "/health"
    if await asyncio.to_thread(_healthy, health):
        raise refused("peers", f"{url} answers already; stop that server, so that it can be started")
    started_s = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except (OSError, ValueError) as error:
        raise refused("peer_command", f"{command!r} cannot be run: {error}") from error
    try:
        # Readiness is not visible from outside, so the server is polled.
        while not await asyncio.to_thread(_healthy, health):
            if process.returncode is not None or time.monotonic() - started_s > START_LIMIT_S:
                raise InferenceCenterError(
                    ErrorCode.ENGINE_UNAVAILABLE, f"{command!r} did not become ready at {health}"
                )
            await asyncio.sleep(_ASKING_EVERY_S)
        yield time.monotonic() - started_s
    finally:
        await stop(process)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_LIMIT_S) as answer:  # noqa: S310 - the scheme was checked
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
