"""A host whose RPC server returns what it gets."""

import sys
from unittest import mock

from inferencecenter.cluster import rpc_host

if __name__ == "__main__":
    with mock.patch.object(rpc_host, "SERVER", "tests.cluster.stub_rpc_server"):
        sys.exit(rpc_host.main())
