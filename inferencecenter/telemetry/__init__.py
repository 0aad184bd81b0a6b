"""Metrics, logs and traces of the daemon."""
