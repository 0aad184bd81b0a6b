"""What llama.cpp took of each kind of memory, read from its log: the library has no other way to tell that to C."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

from inferencecenter.ipc.messages import BufferUse

_LINE: Final = re.compile(r"(\S+) +(model|KV|RS|output|compute) buffer size = +(\d+\.\d+) MiB")
# A model may have several buffers of weights or KV of one kind; the others are told again when they grow.
_ADDS_UP: Final = ("model", "KV", "RS")


class BufferSizes:
    """Collects the sizes from the lines of a load."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def read(self, line: str) -> None:
        """Take note of a line that states a size."""
        found = _LINE.search(line)
        if found is None:
            return
        name, what, mib = found.groups()
        n_bytes = round(float(mib) * 2**20)
        of_name = self._bytes[name]
        of_name[what] = of_name[what] + n_bytes if what in _ADDS_UP else n_bytes

    def uses(self) -> tuple[BufferUse, ...]:
        """Return what was taken so far, by llama.cpp's names of the kinds of memory."""
        return tuple(
            BufferUse(
                name=name,
                weight_bytes=sizes["model"],
                kv_bytes=sizes["KV"] + sizes["RS"],
                compute_bytes=sizes["compute"],
                output_bytes=sizes["output"],
            )
            for name, sizes in self._bytes.items()
        )
