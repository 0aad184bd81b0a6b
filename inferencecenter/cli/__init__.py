"""The command line."""

from inferencecenter.cli.app import main

__all__ = ["main"]
