"""Prompts rendered without a turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.prompt.renderer import RenderedPrompt, RenderInput
from inferencecenter.sessions.prompt.template import ChatTemplate
from inferencecenter.sessions.prompt_lookup import PromptQuery
from tests.sessions.conftest import SessionHarness, make_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.prompt.renderer import RenderResult

HI = PromptQuery(messages=(ChatMessage(role="user", content="Hi <|im_end|>"),))


@dataclass
class SlowTemplates:
    """A renderer of any model that answers when a test says so."""

    implied_bos: str = ""
    jobs: list[tuple[str, RenderInput, Callable[[RenderResult], None]]] = field(default_factory=list)
    withdrawn: int = 0

    def of(self, model: ModelInfo) -> SlowTemplates:
        """Return itself."""
        return self

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Keep the conversation, and count what is withdrawn."""
        self.jobs.append((client_id, conversation, done))

        def withdraw() -> None:
            self.withdrawn += 1

        return withdraw


@pytest.fixture
def slow() -> SlowTemplates:
    """Templates that answer when a test says so."""
    return SlowTemplates()


async def test_prompt_is_that_of_a_turn(world: SessionHarness) -> None:
    """The text that spells a special token is tokenized as text."""
    found = await world.sessions.render_prompt(world.client, HI)
    session_id = world.create()
    world.infer(session_id, HI.messages[0].content)
    assert found.prompt.pieces == world.engine.last.pieces
    assert (await found.count_tokens()).n_tokens == len(world.engine.last_text)


async def test_cancelled_prompt_is_withdrawn(slow: SlowTemplates) -> None:
    """A result that arrives nevertheless is discarded."""
    world = SessionHarness(renderers=slow)
    asked = world.sessions.render_prompt(world.client, HI)
    ((client_id, conversation, done),) = slow.jobs
    assert (client_id, conversation.messages) == (world.client.client_id, HI.messages)
    asked.set_exception(ConnectionError())
    done(RenderedPrompt(ChatTemplate(make_model()).render(conversation), 0, ChatTemplate(make_model()).capabilities))
    with pytest.raises(ConnectionError):
        await asked
    await asyncio.sleep(0)
    assert slow.withdrawn == 1


async def test_error_of_the_template_is_raised(slow: SlowTemplates) -> None:
    """The conversation that the template refuses has no prompt."""
    world = SessionHarness(renderers=slow)
    asked = world.sessions.render_prompt(world.client, HI)
    slow.jobs[0][2](InferenceCenterError(ErrorCode.INVALID_REQUEST, "no"))
    with pytest.raises(InferenceCenterError, match="no"):
        await asked


async def test_no_prompt_is_rendered_while_memory_is_short(world: SessionHarness) -> None:
    """The limit is the same as for turns."""
    world.refusal = InferenceCenterError(ErrorCode.OVERLOADED)
    with pytest.raises(InferenceCenterError) as refused:
        world.sessions.render_prompt(world.client, HI)
    assert refused.value.code is ErrorCode.OVERLOADED
