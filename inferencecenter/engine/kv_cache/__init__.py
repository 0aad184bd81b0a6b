"""Parked KV: sequences that are in no slot, in two directories (tmpfs and disk) of one file format."""
