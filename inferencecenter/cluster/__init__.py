"""Engines on other machines."""
