"""Turns whose prompts are rendered asynchronously: they wait for the result, fail with it, and block nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol.events import Queued
from inferencecenter.sessions.journal import TurnFailed, TurnQueued
from inferencecenter.sessions.prompt.renderer import render_prompt
from inferencecenter.sessions.prompt.template import ChatTemplate
from tests.sessions.conftest import BRACKETS, FakeEngine, SessionHarness, make_model
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.prompt.renderer import RenderInput, RenderResult


@dataclass
class HeldRequest:
    """A rendering that a test completes."""

    template: ChatTemplate
    conversation: RenderInput
    client_id: str
    done: Callable[[RenderResult], None] | None

    def render(self) -> None:
        """Complete the rendering."""
        assert self.done is not None
        self.done(render_prompt(self.template, self.conversation))

    def fail(self, message: str = "takes too much") -> None:
        """Fail the rendering."""
        assert self.done is not None
        self.done(InferenceCenterError(ErrorCode.INTERNAL, message))

    def withdraw(self) -> None:
        """Record the cancellation."""
        self.done = None


@dataclass
class HeldTemplates:
    """Templates whose renderings a test completes. Implements ``renderer.PromptRenderers``."""

    requests: list[HeldRequest] = field(default_factory=list)

    def of(self, model: ModelInfo) -> HeldRenderer:
        """Return the renderer of a model's template."""
        return HeldRenderer(ChatTemplate(model), self.requests)

    @staticmethod
    def turn_of(world: SessionHarness) -> str:
        """The oldest acknowledged turn."""
        return next(event.turn_id for event in world.sink.events if isinstance(event, Queued))

    @property
    def last(self) -> HeldRequest:
        """The latest rendering."""
        return self.requests[-1]


@dataclass
class HeldRenderer:
    """Implements ``renderer.PromptRenderer``."""

    template: ChatTemplate
    requests: list[HeldRequest]
    implied_bos: str = ""

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Record the conversation."""
        self.requests.append(HeldRequest(self.template, conversation, client_id, done))
        return self.requests[-1].withdraw


@pytest.fixture
def held() -> HeldTemplates:
    """The requested renderings."""
    return HeldTemplates()


@pytest.fixture
def world(held: HeldTemplates) -> SessionHarness:
    """Sessions whose renderings a test completes."""
    return SessionHarness(renderers=held)


def test_turn_is_acknowledged_and_recorded_before_rendering(world: SessionHarness, held: HeldTemplates) -> None:
    """A turn waits for its prompt as for a slot and is submitted once the prompt is ready."""
    session_id = world.create()
    world.infer(session_id)
    assert world.journal is not None
    assert (world.sink.ops, len(world.journal.of(TurnQueued)), world.engine.submitted) == (["queued"], 1, [])
    assert (world.sink.last.position, held.last.client_id) == (0, "ada")
    held.last.render()
    world.engine.answer("Hello")
    assert world.sink.ops == ["queued", "token", "end"]
    assert len(held.requests) == 1


def test_turns_that_are_rendered_first_are_submitted_first(world: SessionHarness, held: HeldTemplates) -> None:
    """A slow rendering blocks no other session."""
    first, second = world.create(), world.create()
    world.infer(first)
    world.infer(second)
    held.requests[1].render()
    assert [submit.session_id for submit in world.engine.submitted] == [second]
    held.requests[0].render()
    assert [submit.session_id for submit in world.engine.submitted] == [second, first]


def test_template_failure_ends_the_turn_with_an_error(world: SessionHarness, held: HeldTemplates) -> None:
    """The turn fails with the error and leaves nothing behind, and the session continues."""
    session_id = world.create()
    world.infer(session_id, id="r1")
    held.last.fail()
    error = world.sink.last
    assert (error.op, error.code, error.id, error.turn_id) == ("error", "internal", "r1", held.turn_of(world))
    assert world.transcript(session_id) == []
    world.infer(session_id)
    held.last.render()
    world.engine.answer("Hello")
    assert world.sink.last.op == "end"


def test_aborted_turn_is_not_rendered(world: SessionHarness, held: HeldTemplates) -> None:
    """It ends as a queued turn does, and its rendering is cancelled."""
    session_id = world.create()
    world.infer(session_id)
    world.abort(session_id)
    world.engine.withdraw(held.turn_of(world))
    assert held.last.done is None
    assert (world.sink.last.op, world.sink.last.finish_reason) == ("end", "aborted")


def test_closed_session_is_not_rendered(world: SessionHarness, held: HeldTemplates) -> None:
    """Closing cancels the rendering."""
    session_id = world.create()
    world.infer(session_id)
    world.close(session_id)
    assert held.last.done is None


def test_refused_turn_is_not_rendered(world: SessionHarness, held: HeldTemplates) -> None:
    """If the engine accepts no more turns, the early rendering is cancelled."""
    session_id = world.create()
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL)
    with pytest.raises(InferenceCenterError):
        world.infer(session_id)
    assert held.last.done is None


def test_turn_is_rendered_without_an_engine(world: SessionHarness, held: HeldTemplates) -> None:
    """The prompt is ready when the engine is, and is not rendered again for the same model."""
    session_id = world.create()
    world.engine.lose()
    world.infer(session_id)
    held.last.render()
    world.engine.ready()
    assert (len(world.engine.submitted), len(held.requests)) == (1, 1)


def test_turn_is_rendered_again_for_another_model(world: SessionHarness, held: HeldTemplates) -> None:
    """The earlier rendering is cancelled."""
    session_id = world.create()
    world.engine.lose()
    world.infer(session_id)
    world.engine.ready(make_model(chat_template=BRACKETS))
    assert [request.done is None for request in held.requests] == [True, False]
    held.last.render()
    assert world.engine.last_text == "[user]Hi[assistant]"


def test_stored_turn_whose_template_fails_is_set_aside(world: SessionHarness, held: HeldTemplates) -> None:
    """The next daemon ends it with an error, once, and continues the other turns."""
    bad, good = world.create(), world.create()
    world.infer(bad)
    world.infer(good)
    assert world.journal is not None
    stored = kept(world.journal.records)
    held.requests.clear()
    world.engine = type(world.engine)()
    world.reopen().restore(stored, clean=True)
    first, second = held.requests
    first.fail()
    second.render()
    assert [submit.session_id for submit in world.engine.submitted] == [good]
    assert [record.session_id for record in world.journal.of(TurnFailed)] == [bad]
    assert all(each.pending_turn is None for each in kept(world.journal.records) if each.config.session_id == bad)


@pytest.mark.parametrize("said", [None, "So far"])
def test_context_shift_renders_the_shorter_prompt(world: SessionHarness, held: HeldTemplates, said: str | None) -> None:
    """A context shift waits for its new prompt; if that fails, the output so far is kept."""
    session_id = world.create(system="s")
    world.append(session_id, *(("user", "long ago"), ("assistant", "yes")) * 5)
    world.infer(session_id)
    held.last.render()
    if said is not None:
        world.engine.start()
        world.engine.generate(said)
    world.engine.overflow(2000, said=said)
    assert (len(held.requests), world.sink.last.op) == (2, "context_shifted")
    assert len(world.engine.submitted) == 1
    held.last.fail("no such luck")
    end = world.sink.last
    if said is None:
        assert (end.op, end.code, end.message) == ("error", "internal", "no such luck")
    else:
        assert (end.op, end.finish_reason) == ("end", "context_full")
        assert "no such luck" in end.warnings[-1]
        assert world.transcript(session_id)[-1] == ("assistant", said)


def test_interrupted_turn_reuses_its_prompt(world: SessionHarness, held: HeldTemplates) -> None:
    """The next engine of the same model gets the existing prompt."""
    session_id = world.create()
    world.infer(session_id)
    held.last.render()
    world.engine.start()
    world.engine.generate("So ")
    world.engine.lose()
    world.engine.ready()
    assert (len(world.engine.submitted), len(held.requests)) == (2, 1)


def test_unrenderable_turn_is_refused_at_once(world: SessionHarness) -> None:
    """A raw session refuses tools without a template."""
    session_id = world.create(mode="raw")
    with pytest.raises(InferenceCenterError, match="do not support tools"):
        world.infer(session_id, tools=[{"name": "f"}])


def test_oversized_prompt_is_not_rendered(world: SessionHarness, held: HeldTemplates) -> None:
    """It is refused by its characters; surrounding white space and the model's answers do not count."""
    world.engine = FakeEngine(status=EngineStatus(EngineState.READY, model=make_model(n_ctx=100, max_token_bytes=8)))
    world.reopen()
    session_id = world.create(on_full="stop")
    for prompt, fits in ((" " * 900 + "x" * 792, True), ("x" * 793, False)):
        if fits:
            world.infer(session_id, prompt)
            held.last.render()
            world.engine.answer("y" * 900)
            world.rewind(session_id, "start")
        else:
            with pytest.raises(InferenceCenterError, match="at least 100 tokens") as caught:
                world.infer(session_id, prompt)
            assert caught.value.code is ErrorCode.PROMPT_TOO_LONG
    assert len(held.requests) == 1


def test_droppable_messages_are_not_counted(world: SessionHarness, held: HeldTemplates) -> None:
    """Old turns that a context shift can drop do not count; the text of the turn itself does."""
    world.engine = FakeEngine(status=EngineStatus(EngineState.READY, model=make_model(n_ctx=100, max_token_bytes=8)))
    world.reopen()
    session_id = world.create(system="s" * 400)
    world.append(session_id, ("user", "x" * 2000), ("assistant", "y"))
    world.infer(session_id, "z" * 300)
    assert len(held.requests) == 1
    world.abort(session_id)
    world.engine.withdraw(held.turn_of(world))
    with pytest.raises(InferenceCenterError, match="at least"):
        world.infer(session_id, "z" * 401)


def test_stored_turn_too_long_for_a_smaller_context_fails(world: SessionHarness, held: HeldTemplates) -> None:
    """After a restart a model with a smaller context ends it with an error and renders nothing."""
    session_id = world.create()
    world.infer(session_id, "x" * 1000)
    assert world.journal is not None
    stored = kept(world.journal.records)
    held.requests.clear()
    world.engine = FakeEngine(status=EngineStatus(EngineState.READY, model=make_model(n_ctx=100, max_token_bytes=8)))
    world.reopen().restore(stored, clean=True)
    assert (held.requests, [record.session_id for record in world.journal.of(TurnFailed)]) == ([], [session_id])
