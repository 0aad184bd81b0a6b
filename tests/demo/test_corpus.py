"""Conversations: determinism, what they hold out, and that their answers are in form."""

import json
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from tools.demo_model import corpus, facts, skills, tools, world
from tools.demo_model.cases import called
from tools.demo_model.chatml import Message, render
from tools.demo_model.world import Draw


def characters(message: Message) -> int:
    """Measures a message in characters."""
    return len(message.content)


def made(seed: str, amount: int, budget: int = 2000) -> Iterator[corpus.Conversation]:
    """Yields training conversations of about `budget` characters."""
    return islice(corpus.conversations(seed, budget, characters), amount)


def test_the_same_seed_gives_the_same_conversations() -> None:
    """A corpus can be made again from its seed."""
    assert [c.messages for c in made("a", 20)] == [c.messages for c in made("a", 20)]


def test_another_seed_gives_other_conversations() -> None:
    """Seeds are independent."""
    assert [c.messages for c in made("a", 20)] != [c.messages for c in made("b", 20)]


def test_user_and_assistant_take_turns() -> None:
    """After the system prompt every question has its answer."""
    for conversation in made("turns", 100):
        roles = [m.role for m in conversation.messages if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_a_conversation_fills_its_budget() -> None:
    """Windows are filled, so that long windows hold long distances."""
    assert all(sum(map(characters, c.messages)) >= 2000 for c in made("fill", 50))


def test_all_skills_appear() -> None:
    """No skill is lost from the mixture."""
    seen = {part.skill for c in made("skills", 300) for part in c.exchanges}
    assert seen == {
        "small talk", "counting", "long", "lists", "sums", "capitals", "stories", "json",
        "repeat", "unknown", "tools", "system", "recall", "untold",
    }  # fmt: skip


def test_every_tool_call_parses_and_names_an_offered_function() -> None:
    """Calls are JSON between their marks, and the function is in the system prompt."""
    calls = 0
    for conversation in made("tools", 300):
        for message in conversation.messages:
            if message.role == "assistant" and "<tool_call>" in message.content:
                call = called(message.content)
                assert isinstance(call, dict)
                assert f'"name": "{call["name"]}"' in conversation.system
                calls += 1
    assert calls > 50


def test_every_json_answer_parses() -> None:
    """An answer to a request for JSON is an object."""
    draw = Draw(Random(4))
    for _ in range(300):
        assert isinstance(json.loads(skills.json_object(draw).messages[1].content), dict)


def test_tool_signatures_are_functions_whatever_their_key_order() -> None:
    """Both renderings of a signature hold the same function."""
    draw = Draw(Random(5))
    for tool in tools.offer(draw, 3):
        for _ in range(10):
            function = tool.schema(draw)["function"]
            assert isinstance(function, dict)
            assert function["name"] == tool.name


def test_a_told_value_can_be_copied_from_what_the_user_typed() -> None:
    """The answer holds the value exactly as it stands in the user's message."""
    draw = Draw(Random(6))
    for _ in range(300):
        told, exchange = facts.tell(draw, (facts.any_kind(draw),))
        assert told[0].value in exchange.messages[0].content
        assert told[0].value in facts.ask(draw, told[0]).messages[1].content


def test_a_newer_value_replaces_the_older_one() -> None:
    """A fact told twice is asked for once, with the value told last."""
    plan = corpus.Plan()
    plan.told(facts.Fact(facts.NAME, "Ada"), due=5)
    plan.told(facts.Fact(facts.NAME, "Bob"), due=9)
    assert plan.take_due(5) is None
    assert plan.take_due(9) == facts.Fact(facts.NAME, "Bob")


def test_sums_never_show_a_held_out_pair() -> None:
    """A pair of numbers held out of the sums is in no training sum."""
    draw = Draw(Random(7))
    for _ in range(1000):
        words = skills.sums(draw).messages[1].content.split()
        if words[1] == "plus":
            assert not world.held_out((int(words[0]), int(words[2])))


@pytest.mark.parametrize(("start", "end", "text"), [(1, 3, "1, 2, 3."), (3, 1, "3, 2, 1."), (7, 7, "7.")])
def test_numbers_count_both_ways(start: int, end: int, text: str) -> None:
    """Counting goes up or down and ends with a full stop."""
    assert skills.numbers(start, end) == text


def test_rendering_frames_each_message() -> None:
    """ChatML is one frame a message, then the assistant's opening."""
    text = render([Message("user", "Hi")], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
