"""Names of models in Ollama's requests and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.api.endpoint import LATEST
from inferencecenter.sessions.context import check_model

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Call


def tagged(name: str) -> str:
    """Return a name as Ollama shows it, which has a tag."""
    return name if ":" in name else name + LATEST


def allowed_model(call: Call, name: str | None) -> str:
    """Return the name of a model that the caller may use; ``None`` is the default.

    Raises:
        InferenceCenterError: ``forbidden``, or ``model_not_found``.
    """
    context, client = call.context, call.caller.client
    name = context.models.default if name is None else name
    check_model(name, context.limits_of(client.client_id, client.token_id))
    context.models.spec_of(name)
    return name
