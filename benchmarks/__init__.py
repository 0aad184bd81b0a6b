"""Measured speed: the same work on this daemon and on others, side by side."""
