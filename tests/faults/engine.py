"""An engine that runs into traps: ``python -m tests.faults.engine --fd N``.

Its places are ``load`` and ``loaded``, ``prefill`` and ``decode`` before each batch, ``save`` and ``restore``. A trap
named ``poison``, for the echo backend, springs with each batch that has a slot with this word in it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.engine import __main__ as real
from inferencecenter.ipc.messages import LogLine
from tests.faults.traps import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.engine.backend import Chunk
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.framing import BlockingChannel
    from inferencecenter.ipc.heartbeat import Heartbeat

POISON: Final = "poison"
_FLOOD_LINE: Final = "flood " * 2000


class TrappedBackend:
    """A backend with traps on its ways; everything else is the real one's."""

    def __init__(self, backend: Any, walk: Walk) -> None:
        self._backend = backend
        self._walk = walk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode, unless a trap springs or the batch is poisoned."""
        self._walk.past("prefill" if any(len(chunk.tokens) > 1 for chunk in chunks) else "decode")
        if self._walk.is_set(POISON) and any(self._is_poisoned(chunk) for chunk in chunks):
            self._walk.into(POISON)
        self._backend.decode(chunks)

    def save(self, slot: int, buffer: memoryview) -> int:
        """Save, unless a trap springs halfway."""
        size: int = self._backend.save(slot, buffer)
        self._walk.past("save")
        return size

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Restore, unless a trap springs."""
        self._walk.past("restore")
        restored: bool = self._backend.restore(slot, data, n_tokens)
        return restored

    def _is_poisoned(self, chunk: Chunk) -> bool:
        tokens = (*self._backend.held(chunk.slot), *chunk.tokens)
        return POISON.encode() in b"".join(self._backend.token_bytes(token) for token in tokens)


def main() -> int:
    """Run the real engine with a trapped backend."""
    walk = Walk.from_environment()
    load = real._load

    def load_trapped(pipe: BlockingChannel, options: EngineOptions, heartbeat: Heartbeat) -> TrappedBackend:
        def flood() -> None:
            while True:
                pipe.send(LogLine("debug", _FLOOD_LINE, "flood"))

        walk.actions |= {"flood": flood, "garbage": lambda: pipe._connection.sendall(b"\xff" * 2**16)}
        walk.past("load")
        backend: Any = load(pipe, options, heartbeat)
        walk.past("loaded")
        return TrappedBackend(backend, walk)

    vars(real)["_load"] = load_trapped
    return real.main()


if __name__ == "__main__":
    sys.exit(main())
