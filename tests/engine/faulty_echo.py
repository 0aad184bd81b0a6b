"""An echo backend whose moves can be made to fail as on a real one."""

from __future__ import annotations

from inferencecenter.engine.backend import DecodeError
from inferencecenter.engine.echo import EchoBackend
from inferencecenter.ipc.engine_options import EngineOptions


class FaultyEcho(EchoBackend):
    """``refuse`` names the moves that fail from now on."""

    def __init__(self, *, slots: int, n_ctx: int) -> None:
        super().__init__(EngineOptions(backend="echo", parent_pid=0, slots=slots, n_ctx=n_ctx))
        self.refuse: set[str] = set()

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Truncate, or empty the slot."""
        return super().truncate(slot, 0 if "truncate" in self.refuse else n_tokens) and "truncate" not in self.refuse

    def swap(self, a: int, b: int) -> None:
        """Swap, or lose both."""
        if "swap" in self.refuse:
            raise DecodeError((a, b), "planned")
        super().swap(a, b)

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Copy, or empty the target."""
        done = super().copy(source, target, n_tokens)
        return done if "copy" not in self.refuse else not super().truncate(target, 0)

    def save(self, slot: int, buffer: memoryview) -> int:
        """Save, or return nothing."""
        return 0 if "save" in self.refuse else super().save(slot, buffer)

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Restore, or empty the slot."""
        done = super().restore(slot, data, n_tokens)
        return done if "restore" not in self.refuse else not super().truncate(slot, 0)
