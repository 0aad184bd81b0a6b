"""The llama.cpp implementation of ``engine.backend``; the only package that calls it, through its low-level API."""
