"""What every part of the daemon builds on: errors, tasks, state machines and SQLite files."""
