"""Keeps the engine process alive and speaks to it for everybody else."""
