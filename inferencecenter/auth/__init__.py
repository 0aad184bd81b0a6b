"""Accounts and tokens: who may come in, and how much each may use."""
