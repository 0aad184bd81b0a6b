"""What a way of writing calls has to say of itself."""

from __future__ import annotations

from typing import Protocol


class Style(Protocol):
    """One way in which models write calls of tools."""
