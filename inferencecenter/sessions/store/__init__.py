"""Sessions on disk: one SQLite file, written by one thread, read at the next start."""
