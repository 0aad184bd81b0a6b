"""Clients that run for minutes with random actions: they abort, disconnect, resume, read slowly, fork and rewind."""
