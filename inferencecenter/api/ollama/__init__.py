"""Ollama's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.api.ollama import chat, embed, library, models

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Operation

OPERATIONS: Final[tuple[Operation, ...]] = (
    *chat.OPERATIONS,
    *embed.OPERATIONS,
    *models.OPERATIONS,
    *library.OPERATIONS,
)
