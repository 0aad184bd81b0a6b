"""Conversations: their owners, histories, prompts and events, and the running turn."""
