"""A daemon whose hosts are started by node agents: ``python -m tests.cluster.agent_daemon serve``."""

from __future__ import annotations

from inferencecenter.cli import main
from inferencecenter.cluster import ray_cluster
from tests.cluster import agent_driver

if __name__ == "__main__":
    vars(ray_cluster).update(DRIVER=agent_driver.MODULE)
    main()
