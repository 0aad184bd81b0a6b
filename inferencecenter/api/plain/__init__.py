"""A minimal HTTP API: text in, text out, and tokenization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.api.plain import generate, images, shares, tokens

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Operation

OPERATIONS: Final[tuple[Operation, ...]] = (
    generate.OPERATION,
    *tokens.OPERATIONS,
    *shares.OPERATIONS,
    images.OPERATION,
)
