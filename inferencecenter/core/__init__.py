"""Foundations of the daemon: errors, tasks, state machines and SQLite files."""
