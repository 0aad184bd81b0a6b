"""The process that asks a cluster's head for its nodes: ``python -m inferencecenter.cluster.ray_probe ADDRESS``.

It need not be on a node, and shows whether the head demands the token. The reply is a ``ProbeReply`` as a line of JSON.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from inferencecenter.cluster.ray_cluster import ProbeReply, RayNode, node_resource

_TIMEOUT_S: Final = 10
_ALIVE: Final = 0


def _probe(address: str) -> ProbeReply:
    prefix = node_resource("")
    try:
        found = GcsClient(address=address).get_all_node_info(timeout=_TIMEOUT_S).values()
    except AuthenticationError as error:
        return ProbeReply(refused=True, error=str(error))
    except Exception as error:  # noqa: BLE001 - a border: Ray raises many kinds
        return ProbeReply(error=str(error))
    return ProbeReply(
        nodes=tuple(
            RayNode(name=resource.removeprefix(prefix), address=node.node_manager_address, alive=node.state == _ALIVE)
            for node in found
            for resource in node.resources_total
            if resource.startswith(prefix)
        )
    )


def main() -> int:
    """Write the reply."""
    sys.stdout.buffer.write(msgspec.json.encode(_probe(sys.argv[1])) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
