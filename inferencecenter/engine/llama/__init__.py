"""llama.cpp behind the engine's seam; the only part that calls it, through its low-level API."""
