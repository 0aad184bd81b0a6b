"""Seeded generator of the demo model's conversations, for training and for evaluation.

A conversation fills a budget of length with exchanges of all skills. Facts are mostly stated at the beginning and asked
for at a uniformly drawn later position, so that the distances are spread over the whole window. What is held out: see
`world`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from tools.demo_model import facts, skills, tools, world
from tools.demo_model.chatml import Message, tools_prompt
from tools.demo_model.facts import Fact
from tools.demo_model.skills import Exchange
from tools.demo_model.world import Draw

Measure = Callable[[Message], int]

Maker = Callable[[Draw], Exchange]


@dataclass(frozen=True)
class Mixture:
    """How conversations are composed.

    Attributes:
        fillers: How often each skill fills the time between facts.
        settings: Rising bounds in 0..1 that share conversations out among no system prompt, a
            plain one, one that names the assistant, one that names the user, and offered tools.
        unanswerable: Share of turns that ask for a fact that was not stated.
        listed_held_out: Whether listed words obey the held-out split too, see `Draw.copyable`.
    """

    fillers: Mapping[Maker, int]
    settings: tuple[float, float, float, float] = (0.45, 0.65, 0.78, 0.83)
    unanswerable: float = 0.04
    listed_held_out: bool = False


EVEN = Mixture(
    {
        skills.small_talk: 4,
        skills.counting: 5,
        skills.lists: 4,
        skills.sums: 7,
        skills.capitals: 6,
        skills.story: 2,
        skills.json_object: 4,
        skills.repeat: 3,
        skills.unknown: 3,
        skills.long_counting: 1,
        skills.long_story: 1,
    },
    listed_held_out=True,
)
# Arithmetic and copying are learned last, so this mixture shows more of them.
HARD = Mixture(
    {
        **EVEN.fillers,
        skills.small_talk: 3,
        skills.counting: 6,
        skills.sums: 14,
        skills.json_object: 5,
        skills.repeat: 5,
        skills.unknown: 2,
        skills.story: 1,
    },
    listed_held_out=True,
)
# Every listed word is stated and copied; tools and missing facts are more frequent.
COPYING = Mixture(HARD.fillers, settings=(0.4, 0.55, 0.68, 0.73), unanswerable=0.07)
FINAL = replace(COPYING, fillers={**COPYING.fillers, skills.terse_sums: 6})
# Fewer missing facts: at a large distance "not stated" is the tempting wrong answer.
FAR = replace(FINAL, unanswerable=0.03)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Be brief.",
    "Answer in short sentences.",
    "You are a helpful, honest assistant. Answer the user's questions.",
)
OWN_NAME_QUESTIONS = ("What is your name?", "Who are you?", "What's your name?", "Your name?")


@dataclass(frozen=True)
class Conversation:
    """Exchanges in order, after a system prompt that may be empty."""

    system: str
    exchanges: tuple[Exchange, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, the system prompt first if there is one."""
        lead = (Message("system", self.system),) if self.system else ()
        return lead + tuple(m for part in self.exchanges for m in part.messages)


@dataclass(frozen=True)
class Setting:
    """Properties of a conversation: its system prompt and the facts in it, the mixture."""

    system: str = ""
    assistant: str = ""
    offered: tuple[tools.Tool, ...] = ()
    known: tuple[Fact, ...] = ()
    mixture: Mixture = FINAL


@dataclass
class Plan:
    """The facts of a conversation under construction and the positions where they are due."""

    known: dict[str, Fact] = field(default_factory=dict)
    due: list[tuple[float, Fact]] = field(default_factory=list)

    def add(self, fact: Fact, due: float) -> None:
        """Adds a stated fact, to be asked for at position `due`; a newer value replaces it."""
        self.known[fact.kind.key] = fact
        self.due = [entry for entry in self.due if entry[1].kind.key != fact.kind.key]
        self.due.append((due, fact))

    def take_due(self, position: int) -> Fact | None:
        """Returns a fact that is due at `position`, taken off the plan, or None."""
        for entry in self.due:
            if entry[0] <= position:
                self.due.remove(entry)
                return entry[1]
        return None


def own_name(draw: Draw, assistant: str) -> Exchange:
    """Returns a question for the assistant's name."""
    question = draw.typed(draw.pick(OWN_NAME_QUESTIONS))
    answer = f"My name is {assistant}." if assistant else "I am the demo model."
    return skills.exchange("system", question, answer)


def named_assistant(draw: Draw) -> Setting:
    """Returns a setting whose system prompt names the assistant."""
    assistant = world.name(draw)
    text = draw.pick(("Your name is {v}.", "You are {v}, a helpful assistant.", "You are {v}.",
                      "You are an assistant called {v}.",
                      "You are an assistant named {v}."))  # fmt: skip
    return Setting(system=text.format(v=assistant), assistant=assistant)


def with_tools(draw: Draw, amount: int) -> Setting:
    """Returns a setting that offers `amount` tools."""
    offered = tools.offer(draw, amount)
    lead = draw.pick(("", "", "You are a helpful assistant."))
    schemas = [tool.schema(draw) for tool in offered]
    return Setting(system=tools_prompt(schemas, lead), offered=offered)


def any_setting(draw: Draw, budget: int, mixture: Mixture) -> Setting:
    """Returns one of the settings; no system prompt in almost half of the draws."""
    roll = draw.rng.random()
    bare, plain, named, known = mixture.settings
    if roll < bare:
        return Setting()
    if roll < plain:
        return Setting(system=draw.pick(SYSTEM_PROMPTS))
    if roll < named:
        return named_assistant(draw)
    if roll < known:
        fact = Fact(facts.NAME, world.name(draw))
        return Setting(system=f"The user's name is {fact.value}.", known=(fact,))
    return with_tools(draw, draw.number(1, 3 if budget > 600 else 1))


def filler(draw: Draw, setting: Setting | None = None) -> Exchange:
    """Returns an exchange of any skill that needs no earlier fact."""
    fillers = setting.mixture.fillers if setting else FINAL.fillers
    if setting and setting.offered and draw.chance(0.6):
        return tools.call(draw, draw.pick(setting.offered), answered=draw.chance(0.6))
    if setting and draw.chance(0.25 if setting.assistant else 0.03):
        return own_name(draw, setting.assistant)
    exchange = draw.rng.choices(tuple(fillers), tuple(fillers.values()))[0](draw)
    if setting and setting.offered and exchange.skill in {"sums", "unknown"}:
        return skills.small_talk(draw)  # an offered tool may serve these requests
    return exchange


def _statement(draw: Draw, plan: Plan, position: int, budget: int) -> Exchange:
    if draw.chance(0.08):
        fact, exchange = facts.statement_with_question(draw, facts.any_kind(draw))
        plan.add(fact, draw.rng.uniform(position, budget))
        return exchange
    kinds = {kind.key: kind for kind in (facts.any_kind(draw) for _ in range(draw.number(1, 2)))}
    stated, exchange = facts.statement(draw, tuple(kinds.values()))
    for fact in stated:
        plan.add(fact, draw.rng.uniform(position, budget))
    return exchange


def _unanswerable_question(draw: Draw, plan: Plan) -> Exchange:
    kinds = [k for k in facts.KINDS if k.key not in plan.known and k is not facts.PET]
    kind = facts.NAME if facts.NAME in kinds and draw.chance(0.4) else draw.pick(kinds)
    return facts.unanswerable_question(draw, kind)


def _next(draw: Draw, setting: Setting, plan: Plan, position: int, budget: int) -> Exchange:
    fact = plan.take_due(position)
    if fact:
        return facts.question(draw, fact)
    early = 0.75 if len(plan.known) < 1 + budget // 256 else 0.1
    if draw.chance(early if position < budget / 3 else 0.08):
        return _statement(draw, plan, position, budget)
    if plan.known and draw.chance(0.15):
        return facts.question(draw, draw.pick(tuple(plan.known.values())))
    if draw.chance(setting.mixture.unanswerable):
        return _unanswerable_question(draw, plan)
    return filler(draw, setting)


def conversation(draw: Draw, budget: int, measure: Measure, mixture: Mixture = FINAL) -> Conversation:
    """Returns a conversation whose messages measure at least `budget` together.

    Args:
        draw: The source of all choices.
        budget: The length to fill, in the unit of `measure` (tokens, in training).
        measure: Returns the length of a message, its ChatML frame included.
        mixture: How it is composed.
    """
    setting = any_setting(draw, budget, mixture) if draw.chance(0.97) else Setting()
    setting = replace(setting, mixture=mixture)
    plan = Plan({fact.kind.key: fact for fact in setting.known})
    chatty = draw.chance(0.2)  # no facts at all: the skills from the first turn on
    exchanges: list[Exchange] = []
    position = measure(Message("system", setting.system)) if setting.system else 0
    while position < budget:
        exchange = filler(draw, setting) if chatty else _next(draw, setting, plan, position, budget)
        exchanges.append(exchange)
        position += sum(measure(message) for message in exchange.messages)
    return Conversation(setting.system, tuple(exchanges))


def conversations(seed: str, budget: int, measure: Measure, mixture: Mixture = FINAL) -> Iterator[Conversation]:
    """Yields endless training conversations; the same seed gives the same ones."""
    draw = Draw(Random(seed), listed_held_out=mixture.listed_held_out)  # noqa: S311 (no secrets here)
    while True:
        yield conversation(draw, budget, measure, mixture)
