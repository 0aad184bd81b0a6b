"""Conversations of requests without images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.api.openai.chat import conversation_of, messages_of
from inferencecenter.sessions.history import plain_messages

if TYPE_CHECKING:
    from inferencecenter.api.openai.chat_schemas import ChatRequest
    from inferencecenter.api.session_match import ConversationRequest


def conversation(request: ChatRequest) -> ConversationRequest:
    """The conversation of a request."""
    return conversation_of(request, plain_messages(messages_of(request)))
