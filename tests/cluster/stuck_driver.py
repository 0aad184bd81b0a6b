"""Serves requests as ``cluster/ray_driver.py`` does while one machine does not answer.

A start there is answered after the next other request; one on the machine ``dead`` ends the process.
"""

from __future__ import annotations

import sys

import msgspec

from inferencecenter.cluster.ray_cluster import RayNode, RayReply, RayRequest

MODULE = "tests.cluster.stuck_driver"


def main() -> int:
    """Serve requests until the end of standard input."""
    stuck: list[RayRequest] = []
    sys.stdout.buffer.write(b"a line of Ray\n")
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=RayRequest)
        if request.node == "dead":
            return 1
        if request.node == "stuck":
            stuck.append(request)
            continue
        replies = [RayReply(number=request.number, nodes=(RayNode("a", "10.0.0.1", alive=True),))]
        replies += [RayReply(number=each.number, error="it does not answer") for each in stuck]
        stuck.clear()
        for reply in replies:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
