"""An engine with fault points: ``python -m tests.faults.engine --fd N``.

Its points are ``load`` and ``loaded``, ``prefill`` and ``decode`` before each batch, ``save`` and ``restore``. A fault
named ``poison``, for the echo backend, occurs with each batch that has a slot with this word in it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.engine import __main__ as real
from inferencecenter.ipc.messages import LogLine
from tests.faults.fault_injection import FaultPoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.engine.backend import Chunk
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.framing import BlockingChannel
    from inferencecenter.ipc.heartbeat import Heartbeat

POISON: Final = "poison"
_FLOOD_LINE: Final = "flood " * 2000


class FaultyBackend:
    """A backend with fault points; everything else is the real one's."""

    def __init__(self, backend: Any, points: FaultPoints) -> None:
        self._backend = backend
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode, unless a fault occurs or the batch is poisoned."""
        self._points.reach("prefill" if any(len(chunk.tokens) > 1 for chunk in chunks) else "decode")
        if self._points.is_set(POISON) and any(self._is_poisoned(chunk) for chunk in chunks):
            self._points.trigger(POISON)
        self._backend.decode(chunks)

    def save(self, slot: int, buffer: memoryview) -> int:
        """Save, and run into a fault set after it."""
        size: int = self._backend.save(slot, buffer)
        self._points.reach("save")
        return size

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Restore, unless a fault occurs."""
        self._points.reach("restore")
        restored: bool = self._backend.restore(slot, data, n_tokens)
        return restored

    def _is_poisoned(self, chunk: Chunk) -> bool:
        tokens = (*self._backend.held(chunk.slot), *chunk.tokens)
        return POISON.encode() in b"".join(self._backend.token_bytes(token) for token in tokens)


def main() -> int:
    """Run the real engine with a faulty backend."""
    points = FaultPoints.from_environment()
    load = real._load

    def load_faulty(pipe: BlockingChannel, options: EngineOptions, heartbeat: Heartbeat) -> FaultyBackend:
        def flood() -> None:
            while True:
                pipe.send(LogLine("debug", _FLOOD_LINE, "flood"))

        points.actions |= {"flood": flood, "garbage": lambda: pipe._connection.sendall(b"\xff" * 2**16)}
        points.reach("load")
        backend: Any = load(pipe, options, heartbeat)
        points.reach("loaded")
        return FaultyBackend(backend, points)

    vars(real)["_load"] = load_faulty
    return real.main()


if __name__ == "__main__":
    sys.exit(main())
