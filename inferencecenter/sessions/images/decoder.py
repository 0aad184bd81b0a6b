"""The other side of ``decoding_worker``: starts that process, and sends it files."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import finalize

import orjson

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import MessageImage

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS_HINT: Final = "PNG, JPEG, WebP and GIF files are supported; of an animation the first frame is used."
_WORKER: Final = "inferencecenter.sessions.images.decoding_worker"
_LENGTH_BYTES: Final = 8
_WALL_S: Final = 90.0
"""More than the worker gives a file, and its own start."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image, and its pixels: red, green and blue bytes, row by row from the top."""

    image: MessageImage
    pixels: bytes


class ImageDecoder:
    """Decodes files in other processes, the first of which starts with the first file. Used by one thread at a time.

    Args:
        worker: The module that is run.
        wall_s: Time limit of a file.
    """

    def __init__(self, *, worker: str = _WORKER, wall_s: float = _WALL_S) -> None:
        self._worker = worker
        self._wall_s = wall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def decode(self, file: bytes) -> DecodedImage:
        """Decode a file. Blocks.

        Raises:
            InferenceCenterError: ``invalid_request`` for a file that is no image, is damaged or exceeds a limit.
        """
        try:
            answer = self._answer(file)
        except OSError:  # the worker has ended
            self.close()
            answer = b""
        line, _, pixels = answer.partition(b"\n")
        if not line:
            raise _refusal("decoding it takes too much time or memory")
        result = orjson.loads(line)
        if "error" in result:
            raise _refusal(result["error"])
        return DecodedImage(MessageImage(digest=hashlib.sha256(file).hexdigest(), **result), pixels)

    def close(self) -> None:
        """End the process, also while a file is decoded, which is refused then."""
        self._end()

    def _answer(self, file: bytes) -> bytes:
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = subprocess.Popen(  # noqa: S603 - a command of our own
                [sys.executable, "-m", self._worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._end = finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(len(file).to_bytes(_LENGTH_BYTES) + file)
        process.stdin.flush()
        deadline = time.monotonic() + self._wall_s
        n_bytes = int.from_bytes(self._read(process, _LENGTH_BYTES, deadline))
        return self._read(process, n_bytes, deadline)

    @staticmethod
    def _read(process: subprocess.Popen[bytes], n_bytes: int, deadline: float) -> bytes:
        assert process.stdout is not None
        pipe, result = process.stdout.fileno(), bytearray()
        while len(result) < n_bytes:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(pipe, n_bytes - len(result)) if readable else b""
            if not part:
                raise TimeoutError
            result += part
        return bytes(result)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what it did not read is lost
            pipe.close()  # type: ignore[union-attr]


def _refusal(reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST, f"an image cannot be used: {reason}", field="messages", hint=FORMATS_HINT
    )
