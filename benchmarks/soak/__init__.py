"""Clients that behave as people's do, for minutes: they abort, disappear, come back, read slowly, fork and rewind."""
