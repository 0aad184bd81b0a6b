"""Cleanup of engines that a test leaves running."""

from tests.supervisor.conftest import stopped

__all__ = ["stopped"]
