"""Training conversations: determinism, held-out values and well-formed answers."""

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


def conversations(seed: str, amount: int, budget: int = 2000) -> Iterator[corpus.Conversation]:
    """Yields training conversations of about `budget` characters."""
    return islice(corpus.conversations(seed, budget, characters), amount)


def test_seed_determines_the_conversations() -> None:
    """A corpus can be generated again."""
    assert [c.messages for c in conversations("a", 20)] == [c.messages for c in conversations("a", 20)]


def test_other_seed_gives_other_conversations() -> None:
    """Seeds are independent."""
    assert [c.messages for c in conversations("a", 20)] != [c.messages for c in conversations("b", 20)]


def test_user_and_assistant_alternate() -> None:
    """After the system prompt every question has its answer."""
    for conversation in conversations("turns", 100):
        roles = [m.role for m in conversation.messages if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_conversation_fills_its_budget() -> None:
    """Windows are filled, so that long windows contain long distances."""
    assert all(sum(map(characters, c.messages)) >= 2000 for c in conversations("fill", 50))


def test_all_skills_appear() -> None:
    """No skill is missing from the mixture."""
    skills_found = {part.skill for c in conversations("skills", 300) for part in c.exchanges}
    assert skills_found == {
        "small talk", "counting", "long", "lists", "sums", "capitals", "stories", "json",
        "repeat", "unknown", "tools", "system", "recall", "untold",
    }  # fmt: skip


def test_tool_calls_parse_and_name_an_offered_function() -> None:
    """Calls are JSON between their marks, and the function is in the system prompt."""
    calls = 0
    for conversation in conversations("tools", 300):
        for message in conversation.messages:
            if message.role == "assistant" and "<tool_call>" in message.content:
                call = called(message.content)
                assert isinstance(call, dict)
                assert f'"name": "{call["name"]}"' in conversation.system
                calls += 1
    assert calls > 50


def test_json_answers_parse() -> None:
    """An answer to a request for JSON is an object."""
    draw = Draw(Random(4))
    for _ in range(300):
        assert isinstance(json.loads(skills.json_object(draw).messages[1].content), dict)


def test_tool_signatures_are_functions_in_any_key_order() -> None:
    """Both renderings of a signature contain the same function."""
    draw = Draw(Random(5))
    for tool in tools.offer(draw, 3):
        for _ in range(10):
            function = tool.schema(draw)["function"]
            assert isinstance(function, dict)
            assert function["name"] == tool.name


def test_recalled_value_equals_the_typed_one() -> None:
    """The answer has the value exactly as in the user's message."""
    draw = Draw(Random(6))
    for _ in range(300):
        stated, exchange = facts.statement(draw, (facts.any_kind(draw),))
        assert stated[0].value in exchange.messages[0].content
        assert stated[0].value in facts.question(draw, stated[0]).messages[1].content


def test_newer_value_replaces_the_older_one() -> None:
    """A fact stated twice is recalled with its last value."""
    plan = corpus.Plan()
    plan.add(facts.Fact(facts.NAME, "Ada"), due=5)
    plan.add(facts.Fact(facts.NAME, "Bob"), due=9)
    assert plan.take_due(5) is None
    assert plan.take_due(9) == facts.Fact(facts.NAME, "Bob")


def test_sums_never_show_a_held_out_pair() -> None:
    """Held-out pairs of numbers are in no training sum."""
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
    """ChatML has one frame a message, then the assistant's opening."""
    text = render([Message("user", "Hi")], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
