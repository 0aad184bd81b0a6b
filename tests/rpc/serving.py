"""A server of llama.cpp's RPC: ``python -m tests.rpc.serving HOST:PORT N`` serves the processor as N devices."""

from __future__ import annotations

import sys

from inferencecenter.engine.llama.library import load_library


def main() -> None:
    """Serve one client after the other, until the process is ended."""
    load_library()
    from inferencecenter.engine.llama import devices  # noqa: PLC0415 - needs the library loaded

    devices.serve(sys.argv[1], [devices._device_by_type(0)] * int(sys.argv[2]), n_threads=1)


if __name__ == "__main__":
    main()
