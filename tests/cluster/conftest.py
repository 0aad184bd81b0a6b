"""The stub engine, and cleanup of engines that a test leaves running."""

from tests.supervisor.conftest import stopped, stub

__all__ = ["stopped", "stub"]
