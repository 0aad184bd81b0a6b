"""Engines behind hosts on this machine, without Ray, which carries no tokens."""
