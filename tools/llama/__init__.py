"""Puts llama.cpp into an environment: compiles what the engine loads, keeps it for the next checkout, packs it."""
