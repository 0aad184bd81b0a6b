"""A daemon whose hosts are started without Ray: ``python -m benchmarks.cluster.daemon serve``.

Everything else is the daemon's own: the listener, certificates, keys, hosts and their TLS connections.
"""

from __future__ import annotations

from benchmarks.cluster import driver
from inferencecenter.cli import main
from inferencecenter.cluster import ray_cluster

if __name__ == "__main__":
    vars(ray_cluster).update(DRIVER=driver.MODULE)
    main()
