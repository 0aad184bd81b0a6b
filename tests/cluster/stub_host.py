"""A host whose engine is the stub."""

import sys
from unittest import mock

from inferencecenter.cluster import engine_host
from inferencecenter.ipc import engine_child
from tests.supervisor import stub_engine

if __name__ == "__main__":
    with mock.patch.object(engine_child, "MODULE", stub_engine.MODULE):
        sys.exit(engine_host.main())
