"""Conversations about pictures, for training the demo model's vision tower and for measuring it."""

from collections.abc import Sequence
from typing import Final

from tools.demo_model import facts, skills
from tools.demo_model.chatml import Message
from tools.demo_model.corpus import SYSTEM_PROMPTS
from tools.demo_model.facts import Fact
from tools.demo_model.skills import Exchange, exchange
from tools.demo_model.world import Draw

PICTURE_MARK: Final = "\ufffc"
"""Stands for a picture in a message's content: the character for an object in a text."""

QUESTIONS: Final = (
    "What is in the picture?", "What is in the picture?", "What is in the picture?", "What is in this picture?",
    "What's in the picture?", "What is in the image?", "What is in this image?", "What do you see?",
    "What can you see?", "What is this?", "What is that?", "Describe the picture.", "Describe this image.",
    "What does the picture show?", "What is shown here?", "What do you see in the picture?", "What is on the picture?",
)  # fmt: skip
RECALLS: Final = (
    "What was in the picture?", "What was in the picture?", "What was in the picture?", "What was in the image?",
    "What did you see?", "What did you see in the picture?", "What did the picture show?", "What was the picture?",
    "Do you remember the picture?", "What was in the picture again?", "What is in the picture?",
)  # fmt: skip
_LONGEST_COUNT: Final = 7


def shown(draw: Draw, sentence: str) -> Exchange:
    """Returns a question with a picture, at either end of it, and the answer."""
    question = draw.typed(draw.pick(QUESTIONS)) if draw.chance(0.96) else ""
    question = f"{PICTURE_MARK}{question}" if draw.chance(0.6) else f"{question}{PICTURE_MARK}"
    return exchange("picture", question, sentence)


def recalled(draw: Draw, sentence: str) -> Exchange:
    """Returns a later question for a picture and the answer."""
    return exchange("picture recalled", draw.typed(draw.pick(RECALLS)), sentence)


def small_turns(draw: Draw, amount: int) -> list[Exchange]:
    """Returns exchanges about other things."""
    makers = (skills.small_talk, skills.small_talk, skills.capitals, skills.sums, _count)
    return [draw.pick(makers)(draw) for _ in range(amount)]


def question_alone(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns the messages of one question, in a quarter of the draws after a system prompt."""
    return (*_system(draw), *shown(draw, sentences[0]).messages)


def conversation(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns messages with the picture of `sentences[0]`, and in some draws that of `sentences[1]` after it."""
    exchanges = small_turns(draw, draw.pick((0, 0, 0, 1, 2)))
    fact: Fact | None = None
    if draw.chance(0.15):
        stated, statement = facts.statement(draw, (facts.NAME,))
        fact = stated[0]
        exchanges.append(statement)
    exchanges.append(shown(draw, sentences[0]))
    if draw.chance(0.2):
        exchanges += [*small_turns(draw, draw.number(0, 1)), shown(draw, sentences[1])]
    else:
        exchanges += [*small_turns(draw, draw.number(0, 3)), recalled(draw, sentences[0])]
    if fact:
        exchanges.append(facts.question(draw, fact))
    return (*_system(draw), *(message for each in exchanges for message in each.messages))


def question_or_conversation(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns one or the other, as often."""
    return (question_alone if draw.chance(0.5) else conversation)(draw, sentences)


def conversation_with_recalls(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns messages that ask for the picture of `sentences[0]` up to three times, with other turns between."""
    exchanges = [*small_turns(draw, draw.pick((0, 0, 1))), shown(draw, sentences[0])]
    for _ in range(draw.number(1, 3)):
        exchanges += [*small_turns(draw, draw.pick((0, 1, 1, 2, 2, 3))), recalled(draw, sentences[0])]
    return (*_system(draw), *(message for each in exchanges for message in each.messages))


def several_pictures(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns messages that show one picture after the other, in some draws with other turns between."""
    exchanges: list[Exchange] = []
    for sentence in sentences:
        exchanges += [*small_turns(draw, draw.pick((0, 0, 1))), shown(draw, sentence)]
    return (*_system(draw), *(message for each in exchanges for message in each.messages))


def recalls_or_pictures(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns several pictures in half of the draws, and else one, which is asked for once or several times."""
    return draw.pick((question_alone, conversation_with_recalls, several_pictures, several_pictures))(draw, sentences)


def question_or_recalls(draw: Draw, sentences: Sequence[str]) -> tuple[Message, ...]:
    """Returns a question alone in a third of the draws, and else a conversation, half of these with several recalls."""
    return draw.pick((question_alone, conversation, conversation_with_recalls))(draw, sentences)


def _count(draw: Draw) -> Exchange:
    return skills.counting(draw, _LONGEST_COUNT)


def _system(draw: Draw) -> tuple[Message, ...]:
    return (Message("system", draw.pick(SYSTEM_PROMPTS)),) if draw.chance(0.25) else ()
