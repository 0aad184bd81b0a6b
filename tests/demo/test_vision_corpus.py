"""Conversations about pictures, as training and measuring use them."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from tools.demo_model.vision_corpus import PICTURE_MARK, conversation, question_alone, several_pictures
from tools.demo_model.vision_evaluate import KINDS, cases
from tools.demo_model.world import Draw


@pytest.mark.parametrize("kind", KINDS)
def test_case_ends_with_a_question_and_has_its_pictures(kind: str) -> None:
    """There is a mark for each picture, and an answer is expected."""
    for messages, pictures, expected in islice(cases(kind, 20), 20):
        assert messages[-1].role == "user"
        assert sum(message.content.count(PICTURE_MARK) for message in messages) == len(pictures)
        assert expected


def test_conversation_answers_with_the_sentence() -> None:
    """The picture's question, and a later one for it, have the same answer; another picture has its own."""
    draw = Draw(Random(1))
    for _ in range(50):
        assert question_alone(draw, ["A red circle."])[-1].content == "A red circle."
        answers = [message.content for message in conversation(draw, ["A red circle.", "A blue 7."])]
        assert answers.count("A red circle.") + answers.count("A blue 7.") == 2
        assert "A red circle." in answers


def test_each_of_several_pictures_is_named_in_turn() -> None:
    """Its sentence follows its mark, with other turns between or not."""
    draw = Draw(Random(1))
    sentences = ["A red circle.", "A blue 7.", "A green star."]
    for _ in range(50):
        messages = several_pictures(draw, sentences)
        shown = [number for number, message in enumerate(messages) if PICTURE_MARK in message.content]
        assert [messages[number + 1].content for number in shown] == sentences
