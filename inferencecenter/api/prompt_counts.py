"""The number of tokens of a prompt, for dialects with an endpoint that counts them without a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode

if TYPE_CHECKING:
    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.server.context import ServerContext
    from inferencecenter.sessions.prompt_lookup import PromptQuery

COUNT_ERRORS: Final = (
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.MODEL_LOADING,
    ErrorCode.OVERLOADED,
    ErrorCode.PROMPT_TOO_LONG,
)
"""Errors of every operation that counts tokens."""


async def count_prompt_tokens(context: ServerContext, request_context: RequestContext, query: PromptQuery) -> int:
    """Return the number of tokens of a conversation's prompt; the work is withdrawn when the client disconnects.

    Raises:
        InferenceCenterError: See ``render_query`` and ``EnginePort.count_tokens``.
    """
    rendered = await request_context.wait_for(context.sessions.render_prompt(request_context.client, query))
    return (await request_context.wait_for(rendered.count_tokens())).n_tokens
