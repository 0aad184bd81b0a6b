"""Settings: their definitions, sources and reload."""
