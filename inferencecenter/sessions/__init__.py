"""Conversations: their owners, histories, prompts and events, and the turn that is being answered."""
