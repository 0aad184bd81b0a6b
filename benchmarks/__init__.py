"""Benchmarks: run the same work on this daemon and on other servers, side by side."""
