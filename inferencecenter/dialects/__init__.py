"""Other tongues for the same sessions: OpenAI's HTTP interface, and plain text.

They translate, and have no behaviour of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.dialects import endpoint, openapi, plain, responses
from inferencecenter.dialects.openai import chat, completions, models

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from inferencecenter.server.context import Context

OPERATIONS: Final[tuple[endpoint.Operation, ...]] = (
    *models.OPERATIONS,
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *responses.OPERATIONS,
    *plain.OPERATIONS,
    openapi.operation(lambda: OPERATIONS),
)
"""Every HTTP operation; routes and the OpenAPI document derive from it."""


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes of all dialects."""
    return [*endpoint.routes(context, OPERATIONS), responses.socket_route(context)]
