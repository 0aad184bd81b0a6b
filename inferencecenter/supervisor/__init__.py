"""Keeps the engine processes alive and is their only peer in the daemon."""
