"""A host as on another machine: the front's paths are not there."""

import sys
from unittest import mock

from inferencecenter.cluster import engine_host
from inferencecenter.cluster.node import Node

if __name__ == "__main__":
    with mock.patch.object(Node, "_places", lambda self, _files: (self.models,)):
        sys.exit(engine_host.main())
