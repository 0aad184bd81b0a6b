"""Settings: what can be set, where it comes from, and how it is read again."""
