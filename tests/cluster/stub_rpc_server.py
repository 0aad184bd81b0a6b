"""Stands for llama.cpp's RPC server: returns what it gets, for one client after the other; ``abort`` aborts it."""

import os
import socket
import sys

from inferencecenter.ipc.engine_child import die_with_parent

REFUSES = "STUB_RPC_SERVER_REFUSES"
"""With this variable in its environment it ends before it listens."""

if __name__ == "__main__":
    die_with_parent()
    if REFUSES in os.environ:
        sys.exit("it was built without RPC")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            with listening.accept()[0] as client:
                while data := client.recv(65_536):
                    if data == b"abort":
                        sys.stderr.write("the stub aborts\n")
                        sys.stderr.flush()
                        os.abort()
                    client.sendall(data)
