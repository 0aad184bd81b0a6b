"""Plans, starts and restarts the engine processes, and is their only peer in the daemon."""
