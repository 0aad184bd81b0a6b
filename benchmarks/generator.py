"""Starts the load generator and sends it jobs."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from benchmarks.jobs import Aborted, Answer, Failed, Holding, Turns
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.jobs import Job

A = TypeVar("A", Turns, Aborted, Holding)

MODULE: Final = "benchmarks.load"
JOB_LIMIT_S: Final = 3600.0
"""Time limit of a job."""
_MAX_LINE_BYTES: Final = 2**30
_EXIT_GRACE_S: Final = 5.0

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


class LoadGenerator:
    """A running ``python -m benchmarks.load``; ``start_generator`` makes one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, job: Job, answer: type[A]) -> A:
        """Run a job and return its result of the given kind.

        Raises:
            InferenceCenterError: The job failed; ``internal`` if the generator exited or exceeded ``JOB_LIMIT_S``.
        """
        assert self._process.stdin is not None and self._process.stdout is not None, "started with pipes"  # noqa: PT018
        try:
            async with asyncio.timeout(JOB_LIMIT_S):
                self._process.stdin.write(_encoder.encode(job) + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (OSError, TimeoutError) as error:
            raise _lost(str(error) or f"no answer within {JOB_LIMIT_S:.0f} s") from error
        if not line:
            raise _lost("the process ended; what it wrote is above")
        received = _decoder.decode(line)
        if isinstance(received, Failed):
            raise InferenceCenterError(ErrorCode(received.code), received.message, hint=received.hint)
        assert isinstance(received, answer), f"a {type(job).__name__} is not answered by {type(received).__name__}"
        return received

    async def close(self) -> None:
        """End the process by closing its input, and kill it if it does not exit."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_EXIT_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def start_generator() -> AsyncIterator[LoadGenerator]:
    """Start a load generator and end it when the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
    )
    generator = LoadGenerator(process)
    try:
        yield generator
    finally:
        await generator.close()


def _lost(reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INTERNAL, f"the load generator is lost: {reason}")
