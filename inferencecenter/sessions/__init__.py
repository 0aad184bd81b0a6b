"""Conversations: who owns them, what was said, and the turn that is being answered."""
