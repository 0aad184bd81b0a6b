"""Parked KV: sequences that are in no slot, in two directories of one file format (tmpfs and disk)."""
