"""Installs llama.cpp into an environment: compiles the libraries that the engine loads, caches and packages them."""
