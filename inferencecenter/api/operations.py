"""The table of all HTTP operations, and their routes.

Its import takes a fifth of that of the daemon, which therefore listens first; see ``app.DeferredRoutes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.api import endpoint, ollama, openapi, plain, responses
from inferencecenter.api.anthropic import messages
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.api.ollama.errors import OLLAMA_ERRORS
from inferencecenter.api.openai import chat, completions, embeddings, fim, infill, llama_server, models

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from inferencecenter.server.context import ServerContext

OPERATIONS: Final[tuple[endpoint.Operation, ...]] = (
    *models.OPERATIONS,
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *infill.OPERATIONS,
    *fim.OPERATIONS,
    *embeddings.OPERATIONS,
    *responses.OPERATIONS,
    *llama_server.OPERATIONS,
    *messages.OPERATIONS,
    *ollama.OPERATIONS,
    *plain.OPERATIONS,
    openapi.operation(lambda: OPERATIONS),
)
"""All HTTP operations; routes and the OpenAPI document derive from it."""

FIELD_TABLES: Final = tuple(dict.fromkeys(row.fields for row in OPERATIONS if row.fields and row.body))
"""The tables of the fields of bodies, one for each foreign dialect."""


def api_routes(context: ServerContext) -> list[BaseRoute]:
    """Return the routes of all HTTP operations, of the Responses socket, and of other paths beside them."""
    base = context.settings.base_path
    others = [
        endpoint.NotFoundRoute(f"{base}/api/", errors=OLLAMA_ERRORS),
        endpoint.NotFoundRoute(f"{base}/shares/", errors=OWN_ERRORS),
    ]
    return [*endpoint.routes(context, OPERATIONS), *responses.socket_routes(context), *others]
