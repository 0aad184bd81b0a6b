"""Model files: the registry, reading them, and pulling them from a hub."""
