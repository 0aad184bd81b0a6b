"""The plainest addresses there are: text in, text out, and what tokens it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.api.plain import generate, tokens

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Operation

OPERATIONS: Final[tuple[Operation, ...]] = (generate.OPERATION, *tokens.OPERATIONS)
