"""Accounts, tokens, external authentication, quotas and rate limits, and the audit log."""
