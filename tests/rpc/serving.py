"""A server of llama.cpp's RPC: ``python -m tests.rpc.serving HOST:PORT N`` serves the processor as N devices."""

from __future__ import annotations

import ctypes
import sys

from inferencecenter.engine.llama.library import load_library


def main() -> None:
    """Serve one client after the other, until the process is ended."""
    load_library()
    from inferencecenter.engine.llama import devices  # noqa: PLC0415 - needs the library loaded

    endpoint, count = sys.argv[1].encode(), int(sys.argv[2])
    start = devices._function(devices._backend_by_name(b"RPC"), b"ggml_backend_rpc_start_server")
    served = (ctypes.c_void_p * count)(*[devices._device_by_type(0)] * count)
    signature = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    )
    signature(start)(endpoint, None, 1, count, served)


if __name__ == "__main__":
    main()
