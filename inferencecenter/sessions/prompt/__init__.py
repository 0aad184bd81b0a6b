"""Prompt construction: chat template rendering and planning of the tokens that a turn submits."""
