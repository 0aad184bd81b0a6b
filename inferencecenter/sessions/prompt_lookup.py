"""Prompts of conversations that start no turn: clients ask for their text, or for the number of their tokens.

A conversation is rendered and tokenized as that of a turn without a history: in the model's template process, and by
the workers of its engine, both of which serve clients round-robin. It is refused where a turn would be, so it costs at
most what the turn costs before its first token. Cancelling a future, or setting its exception, withdraws the work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.sessions.context import check_model
from inferencecenter.sessions.history import History, HistoryView
from inferencecenter.sessions.prompt.plan import PromptPlan, check_fits, check_sees, prompt_of
from inferencecenter.sessions.prompt.renderer import RenderInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import TokensCounted
    from inferencecenter.protocol.values import ChatMessage, Tool
    from inferencecenter.sessions.context import Principal, SessionServices
    from inferencecenter.sessions.model_router import ServedModel
    from inferencecenter.sessions.prompt.plan import Prompt
    from inferencecenter.sessions.prompt.renderer import RenderResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQuery:
    """A whole conversation for a model, ``None`` for the default; ``thinking`` ``None`` leaves that to the template.

    ``prefix`` is the start of the answer.
    """

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    tools: Sequence[Tool] = ()
    thinking: bool | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A rendered prompt and the model that would get it."""

    prompt: Prompt
    _serving: ServedModel
    _client_id: str

    def count_tokens(self) -> asyncio.Future[TokensCounted]:
        """Request the number of tokens of the prompt; see ``EnginePort.count_tokens``."""
        return self._serving.engine.count_tokens(self.prompt.pieces, first=True, client_id=self._client_id)


def render_query(client: Principal, query: PromptQuery, services: SessionServices) -> asyncio.Future[PromptText]:
    """Request the prompt of a conversation; the future raises the errors of the template.

    Raises:
        InferenceCenterError: ``overloaded``, ``model_not_found``, ``forbidden``, ``model_loading``,
            ``engine_unavailable``, ``invalid_request`` for a model that generates no text, ``prompt_too_long``.
    """
    services.admit()
    serving = services.models.resolve(query.model)
    check_model(serving.name, services.quota_of(client.client_id, client.token_id).limits)
    loaded = serving.loaded(client.client_id)
    plan = PromptPlan(query.messages, HistoryView())
    conversation = RenderInput(query.messages, services.local_time(), tools=tuple(query.tools), thinking=query.thinking)
    check_sees(conversation, loaded.info, seeing=services.models.seeing)
    check_fits(conversation, loaded.info)
    renderer = loaded.renderer("chat")
    found: asyncio.Future[PromptText] = asyncio.get_running_loop().create_future()

    def finish(result: RenderResult) -> None:
        if found.done():
            return
        if isinstance(result, InferenceCenterError):
            found.set_exception(result)
        else:
            prompt = prompt_of(History(), plan, result, implied_bos=renderer.implied_bos, prefix=query.prefix)
            found.set_result(PromptText(prompt, serving, client.client_id))

    withdraw = renderer.render(conversation, client_id=client.client_id, done=finish)
    found.add_done_callback(lambda _: withdraw())
    return found
