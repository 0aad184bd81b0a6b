"""Prompts: rendering of conversations with chat templates, and what a turn submits of them."""
