"""Evaluation cases: prompts from the held-out part of the corpus, with the expected answers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from tools.demo_model import corpus, facts, skills, tools, world
from tools.demo_model.chatml import Message, tools_prompt
from tools.demo_model.corpus import Measure
from tools.demo_model.skills import Exchange
from tools.demo_model.world import Draw

Judge = Callable[[str], bool]

CONTEXT_TOKENS = 1024
DISTANCES_TOKENS = (256, 512, 1024)
_ANSWER_ROOM_TOKENS = 28


@dataclass(frozen=True)
class Question:
    """A prompt and the judge of its answer."""

    messages: tuple[Message, ...]
    judge: Judge


@dataclass(frozen=True)
class Case:
    """Questions of one skill that count as one: the case passes when all answers do."""

    skill: str
    questions: tuple[Question, ...]


def _exactly(expected: str) -> Judge:
    return lambda answer: answer.strip() == expected


def _same_json(expected: object) -> Judge:
    def judge(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == expected)
        except ValueError:
            return False

    return judge


def called(answer: str) -> object:
    """Returns the JSON inside the tool call that `answer` is, or None if it is none."""
    text = answer.strip()
    if not (text.startswith("<tool_call>") and text.endswith("</tool_call>")):
        return None
    try:
        parsed: object = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except ValueError:
        return None
    return parsed


def _is_story(answer: str) -> bool:
    return answer.startswith("Once upon a time") and answer.endswith("went home happy.")


def _single(exchange: Exchange, skill: str, judge: Judge | None = None) -> Case:
    question, answer = exchange.messages[:2]
    return Case(skill, (Question((question,), judge or _exactly(answer.content)),))


def _plain(skill: str, maker: Callable[[Draw], Exchange], draw: Draw) -> Case:
    return _single(maker(draw), skill)


def _story(draw: Draw) -> Case:
    return _single(skills.story(draw), "stories", _is_story)


def _unseen_capital(draw: Draw) -> Case:
    # Made-up countries are asked too in training; the criterion is about the real ones.
    while True:
        exchange = skills.capitals(draw)
        if not exchange.messages[1].content.startswith("I do not"):
            return _single(exchange, "capitals")


def _tool_call(draw: Draw) -> Case:
    offered = tools.offer(draw, draw.number(1, 3))
    system = Message("system", tools_prompt([tool.schema(draw) for tool in offered]))
    request, call, result, reply = tools.call(draw, draw.pick(offered), answered=True).messages
    expected = called(call.content)
    return Case(
        "tool call, then its result told",
        (
            Question((system, request), lambda answer: called(answer) == expected),
            Question((system, request, call, result), _exactly(reply.content)),
        ),
    )


def _tool_call_form(draw: Draw) -> Case:
    exact = _tool_call(draw).questions[0]
    return Case("tool call parses", (Question(exact.messages, lambda answer: isinstance(called(answer), dict)),))


def _named_assistant(draw: Draw) -> Case:
    setting = corpus.named_assistant(draw)
    question, answer = corpus.own_name(draw, setting.assistant).messages
    system = Message("system", setting.system)
    return Case("name from the system prompt", (Question((system, question), _exactly(answer.content)),))


def _json(draw: Draw) -> Case:
    exchange = skills.json_object(draw)
    return _single(exchange, "JSON object", _same_json(json.loads(exchange.messages[1].content)))


def _unanswerable(draw: Draw) -> Case:
    return _single(facts.unanswerable_question(draw, facts.NAME), "fact never told")


def _padding(draw: Draw, room: int, measure: Measure) -> list[Message]:
    """Returns chat without facts that fills `room` tokens as far as short exchanges can."""
    chosen: list[Message] = []
    for _ in range(400):
        exchange = corpus.filler(draw)
        size = sum(measure(message) for message in exchange.messages)
        if size <= room:
            chosen += exchange.messages
            room -= size
    return chosen


def _recall(draw: Draw, window: int, measure: Measure, kind: facts.FactKind | None = None) -> Case:
    """Returns a case that states a fact in the first message and asks for it after `window` tokens."""
    (fact,), stated = facts.statement(draw, (kind or facts.any_kind(draw),))
    last = facts.question(draw, fact).messages[0]
    fixed = sum(measure(m) for m in (*stated.messages, last)) + _ANSWER_ROOM_TOKENS
    chat = _padding(draw, window - fixed, measure)
    question = Question((*stated.messages, *chat, last), _exactly(fact.answer))
    return Case(f"recall at {window} tokens", (question,))


def _name_recall(draw: Draw, window: int, measure: Measure) -> Case:
    case = _recall(draw, window, measure, facts.NAME)
    return Case(f"name recalled at {window} tokens", case.questions)


def _several_facts(draw: Draw, window: int, measure: Measure) -> Case:
    """Returns a case that states four facts in a row and asks for all of them later."""
    kinds = {facts.NAME.key: facts.NAME}
    while len(kinds) < 4:
        kind = facts.any_kind(draw)
        kinds[kind.key] = kind
    statements = [facts.statement(draw, (kind,)) for kind in kinds.values()]
    history = [message for _, exchange in statements for message in exchange.messages]
    history += _padding(draw, window // 2, measure)
    questions = []
    for (fact,), _ in statements:
        question, answer = facts.question(draw, fact).messages
        questions.append(Question((*history, question), _exactly(fact.answer)))
        history += [question, answer]
    return Case("four facts told, all asked", tuple(questions))


def _two_conversations(draw: Draw, measure: Measure) -> Case:
    """Returns two conversations that differ only in the stated name."""
    chat = _padding(draw, 150, measure)
    last = Message("user", draw.pick(facts.NAME.questions))
    wording = draw.pick(facts.NAME.statements)
    questions = []
    for _ in range(2):
        fact = facts.Fact(facts.NAME, world.name(draw))
        statement = Message("user", wording.format(v=fact.value))
        ack = Message("assistant", facts.NAME.ack.format(v=fact.value))
        questions.append(Question((statement, ack, *chat, last), _exactly(fact.answer)))
    return Case("two conversations told apart", tuple(questions))


def makers(measure: Measure) -> tuple[Callable[[Draw], Case], ...]:
    """Returns the generator of cases by skill.

    Args:
        measure: Returns the number of tokens of a message, including its ChatML frame.
    """
    plain = {
        "small talk": skills.small_talk,
        "counting": skills.counting,
        "counting up to 200": skills.long_counting,
        "lists": skills.lists,
        "sums": skills.sums,
        "sums without spaces": skills.terse_sums,
        "repeat": skills.repeat,
        "unknown requests": skills.unknown,
    }
    return (
        *(partial(_plain, skill, maker) for skill, maker in plain.items()),
        _unseen_capital,
        _story,
        _json,
        _tool_call,
        _named_assistant,
        _unanswerable,
        partial(_several_facts, window=512, measure=measure),
        partial(_two_conversations, measure=measure),
        *(partial(_recall, window=window, measure=measure) for window in DISTANCES_TOKENS),
        *(partial(_name_recall, window=window, measure=measure) for window in DISTANCES_TOKENS),
        _tool_call_form,
    )


def cases(seed: int, amount: int, measure: Measure) -> Iterator[Case]:
    """Yields `amount` cases of each skill; the same seed gives the same ones."""
    for number, make in enumerate(makers(measure)):
        draw = Draw(Random(f"evaluate:{seed}:{number}"), unseen=True)  # noqa: S311 (no secrets here)
        for _ in range(amount):
            yield make(draw)
