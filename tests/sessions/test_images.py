"""Images in a session: what the engine is given, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.ipc.images import ImageRef
from inferencecenter.protocol.requests import GetSession
from inferencecenter.protocol.values import ChatMessage, MessageImage, Tool
from inferencecenter.sessions.output_parsing.detection import as_text
from inferencecenter.sessions.prefix_match import ArgumentComparison, same_message
from inferencecenter.sessions.prompt.special_tokens import RenderedText, SpecialTokenEscaper, mark_image
from tests.sessions.conftest import FakeEngine, SessionHarness, make_model, one_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import Submit

SUN = MessageImage(digest="5" * 64, width=4, height=3, media_type="image/png")
MOON = MessageImage(digest="a" * 64, width=4, height=3, media_type="image/png")


def ref(image: MessageImage) -> ImageRef:
    """An image as the engine knows it."""
    return ImageRef(image.digest, image.width, image.height)


def asks(text: str, *images: MessageImage) -> list[ChatMessage]:
    """A question about images, which stand before its text."""
    return [ChatMessage(role="user", content="\ufffc" * len(images) + text, images=images or None)]


def shown(submit: Submit) -> list[str | ImageRef]:
    """The pieces of a submission: joined text, and images."""
    joined: list[str | ImageRef] = [""]
    for piece in submit.pieces:
        if piece.image is not None:
            joined += [piece.image, ""]
        else:
            joined[-1] = f"{joined[-1]}{piece.text}"
    return joined


@pytest.fixture
def world() -> SessionHarness:
    """Sessions of a model that sees."""
    return SessionHarness(
        engines=one_model(FakeEngine(status=replace(FakeEngine().status, model=make_model(projector="eyes.gguf"))))
    )


def turn(world: SessionHarness, session_id: str, messages: Sequence[ChatMessage], answer: str) -> Submit:
    """A turn's submission; the turn has ended."""
    world.infer(session_id, messages=list(messages))
    submitted = world.engine.submitted[-1]
    world.engine.answer(answer)
    return submitted


def test_image_takes_its_place_in_the_prompt(world: SessionHarness) -> None:
    """It is a piece of its own, and is named beside the tokens."""
    submitted = turn(world, world.create(), asks("What is it?", SUN, MOON), "Both")
    before, first, between, second, after = shown(submitted)
    assert str(before).endswith("user\n")
    assert (first, between, second) == (ref(SUN), "", ref(MOON))
    assert str(after).startswith("What is it?")
    assert submitted.images == (ref(SUN), ref(MOON))


def test_later_turn_adds_only_what_is_new(world: SessionHarness) -> None:
    """The image is in the tokens of the first turn, and stays among the images of the second."""
    session_id = world.create()
    turn(world, session_id, asks("What is it?", SUN), "The sun")
    submitted = turn(world, session_id, asks("Sure?"), "Yes")
    assert submitted.tokens
    assert all(piece.image is None for piece in submitted.pieces)
    assert submitted.images == (ref(SUN),)


def test_image_is_in_the_transcript(world: SessionHarness) -> None:
    """As it was sent."""
    session_id = world.create()
    turn(world, session_id, asks("What is it?", SUN), "The sun")
    transcript = world.sessions.get(world.client, GetSession(op="get_session", session_id=session_id)).transcript
    assert transcript[0].model_dump(exclude_none=True) == {
        "role": "user",
        "content": "\ufffcWhat is it?",
        "images": (SUN.model_dump(exclude_none=True),),
    }


def test_blind_model_refuses_with_names_of_those_that_see() -> None:
    """Or says how the operator can add one."""
    world = SessionHarness()
    session_id = world.create()
    with pytest.raises(InferenceCenterError, match="the model toy does not take images") as caught:
        world.infer(session_id, messages=asks("What is it?", SUN))
    assert caught.value.field == "messages"
    assert "mmproj" in str(caught.value.hint)


def test_raw_session_refuses_images(world: SessionHarness) -> None:
    """It has no messages that an image could belong to."""
    session_id = world.create(mode="raw")
    with pytest.raises(InferenceCenterError, match="do not support images"):
        world.infer(session_id, messages=asks("What is it?", SUN))


def test_images_belong_to_users_and_tools() -> None:
    """And each has one mark in the content."""
    with pytest.raises(ValueError, match="role user or tool"):
        ChatMessage(role="assistant", content="\ufffc", images=(SUN,))
    with pytest.raises(ValueError, match="one character U\\+FFFC for each"):
        ChatMessage(role="user", content="\ufffc", images=(SUN, MOON))


def test_messages_with_other_images_differ() -> None:
    """So the conversation of one is not taken for that of the other."""
    one, same, other = (*asks("What?", SUN), *asks("What?", SUN), *asks("What?", MOON))
    assert same_message(one, same, ArgumentComparison())
    assert not same_message(one, other, ArgumentComparison())


def test_rendered_texts_with_other_images_differ() -> None:
    """Offsets after images are right, and special tokens beside them are still broken."""
    escaper = SpecialTokenEscaper(["<s>"])
    typed = escaper.mark("<s>\ufffc<s>").replace("\ufffc", mark_image(SUN))
    sun, moon = (RenderedText.of_marked(f"<s>{typed.replace(SUN.digest, each.digest)}<s>") for each in (SUN, MOON))
    assert sun.text != moon.text
    assert [piece.image for piece in sun.pieces() if piece.image] == [ref(SUN)]
    assert all(one <= other for one, other in pairwise(sun.cuts))
    assert [piece.text for piece in sun.pieces()] == ["<s><", "s>", "", "<", "s><s>"]


def test_results_of_tools_keep_their_images_as_text() -> None:
    """A mark that a tool's text or description has is not taken for an image."""
    result = ChatMessage(role="tool", content="drawn \ufffc", tool_call_id="c1", images=(SUN,))
    plain = ChatMessage(role="tool", content="fake \ufffc", tool_call_id="c2")
    (merged,) = as_text([plain, result, *asks("And this?", MOON)], (), supports_system=True)
    assert merged.images == (SUN, MOON)
    assert merged.content.count("\ufffc") == 2
    assert merged.content.index("\ufffd") < merged.content.index("\ufffc")
    tool = Tool(name="t", description="\ufffc")
    first, *_ = as_text(asks("And this?", MOON), (tool,), supports_system=False)
    assert first.images == (MOON,)
    assert first.content.count("\ufffc") == 1
