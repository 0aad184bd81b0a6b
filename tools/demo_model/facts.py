"""Facts that a user states and later asks for: the main skill of the demo model."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import world
from tools.demo_model.skills import Exchange, as_typed, exchange
from tools.demo_model.world import Draw


@dataclass(frozen=True)
class FactKind:
    """A kind of fact: statements with `{v}` for the value, and questions for it."""

    key: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    value: Callable[[Draw], str]
    ack: str = "I will remember that."
    missing: str = "You have not told me that yet."


@dataclass(frozen=True)
class Fact:
    """A stated value, in the user's casing."""

    kind: FactKind
    value: str

    @property
    def answer(self) -> str:
        """The sentence that answers a question for this fact."""
        return self.kind.answer.format(v=self.value)


def _foods(draw: Draw) -> str:
    return world.listed_or_made_up(draw, world.FOODS)


def _colours(draw: Draw) -> str:
    return world.listed_or_made_up(draw, world.COLOURS)


def _animals(draw: Draw) -> str:
    return world.listed_or_made_up(draw, world.ANIMALS)


def _jobs(draw: Draw) -> str:
    return world.listed_or_made_up(draw, world.JOBS)


def _age(draw: Draw) -> str:
    return draw.copyable(lambda: str(draw.number(2, 99)), world.SMALL_NUMBERS)


NAME = FactKind(
    "name",
    (
        "My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hi, my name is {v}!",
        "Hello, I am {v}.", "You can call me {v}.", "Hi! I'm {v}.", "Hello! My name is {v}.",
        "The name is {v}.", "My name's {v}.",
    ),
    (
        "What is my name?", "What's my name?", "Do you remember my name?", "Tell me my name.",
        "What am I called?", "Can you tell me my name?", "Who am I?", "Do you know my name?",
        "What was my name again?", "Say my name.", "What is my name again?",
    ),
    "Your name is {v}.",
    world.name,
    ack="Nice to meet you, {v}!",
    missing="I do not know your name yet.",
)  # fmt: skip
CITY = FactKind(
    "city",
    ("I live in {v}.", "My home is in {v}.", "I am living in {v}.", "My home town is {v}.",
     "I come from {v}.", "I am from {v}."),
    ("Where do I live?", "Which city do I live in?", "Where is my home?", "Where am I from?",
     "What city do I live in?", "Do you remember where I live?"),
    "You live in {v}.",
    world.city,
    ack="{v} sounds like a nice place.",
)  # fmt: skip
AGE = FactKind(
    "age",
    ("I am {v} years old.", "I'm {v} years old.", "My age is {v}."),
    ("How old am I?", "What is my age?", "What's my age?", "Do you remember how old I am?"),
    "You are {v} years old.",
    _age,
)
JOB = FactKind(
    "job",
    ("I work as a {v}.", "My job is {v}.", "I am a {v}.", "I'm a {v}."),
    ("What is my job?", "What do I work as?", "What's my job?", "Do you remember my job?"),
    "You work as a {v}.",
    _jobs,
)
PET = FactKind(
    "pet",
    ("My pet is a {v}.", "I have a pet {v}.", "As a pet I have a {v}."),
    ("What pet do I have?", "Which pet do I have?", "What kind of pet do I have?"),
    "You have a {v}.",
    _animals,
)

_OWN_NOUNS: tuple[tuple[str, Callable[[Draw], str]], ...] = (
    ("favourite colour", _colours), ("favorite color", _colours), ("favourite color", _colours),
    ("favourite food", _foods), ("favorite food", _foods), ("favourite animal", _animals),
    ("favorite animal", _animals), ("favourite number", world.digits),
    ("favourite word", world.word),
    ("favourite city", world.city), ("favourite book", world.word), ("favourite song", world.word),
    ("favourite drink", world.word), ("favourite game", world.word), ("lucky number", world.digits),
    ("phone number", world.digits), ("room number", world.digits), ("hobby", world.word),
    ("street", world.word), ("school", world.word), ("team", world.word), ("car", world.word),
    ("favourite fruit", world.word), ("favourite place", world.word), ("nickname", world.name),
)  # fmt: skip
_SHARED_NOUNS: tuple[tuple[str, Callable[[Draw], str]], ...] = (
    ("secret word", world.word), ("password", world.word), ("code", world.digits),
    ("magic word", world.word), ("code word", world.word), ("secret number", world.digits),
    ("name of the ship", world.name), ("door code", world.digits), ("secret code", world.digits),
)  # fmt: skip


def _called(who: str) -> FactKind:
    return FactKind(
        who,
        (f"My {who} is called {{v}}.", f"My {who}'s name is {{v}}.",
         f"I have a {who} called {{v}}.", f"I have a {who} named {{v}}.",
         f"The name of my {who} is {{v}}."),
        (f"What is my {who} called?", f"What is my {who}'s name?", f"What's my {who}'s name?",
         f"What is the name of my {who}?", f"Do you remember the name of my {who}?"),
        f"Your {who} is called {{v}}.",
        world.name,
        ack="{v} is a nice name.",
    )  # fmt: skip


def _own(noun: str, value: Callable[[Draw], str]) -> FactKind:
    return FactKind(
        noun.replace("favorite", "favourite").replace("color", "colour"),
        (f"My {noun} is {{v}}.", f"Remember that my {noun} is {{v}}.", f"My {noun}: {{v}}.",
         f"By the way, my {noun} is {{v}}.", f"Please remember: my {noun} is {{v}}."),
        (f"What is my {noun}?", f"What's my {noun}?", f"Do you remember my {noun}?",
         f"Tell me my {noun}.", f"Can you tell me my {noun}?"),
        f"Your {noun} is {{v}}.",
        value,
    )  # fmt: skip


def _shared(noun: str, value: Callable[[Draw], str]) -> FactKind:
    return FactKind(
        noun,
        (f"The {noun} is {{v}}.", f"Remember the {noun}: {{v}}.",
         f"Remember that the {noun} is {{v}}."),
        (f"What is the {noun}?", f"What's the {noun}?", f"Do you remember the {noun}?",
         f"Tell me the {noun}.", f"What was the {noun}?"),
        f"The {noun} is {{v}}.",
        value,
    )  # fmt: skip


CALLED = tuple(_called(who) for who in (*world.PETS, *world.RELATIVES))
OWN = tuple(_own(noun, value) for noun, value in _OWN_NOUNS)
SHARED = tuple(_shared(noun, value) for noun, value in _SHARED_NOUNS)
_GROUPS = ((NAME,), (NAME,), (NAME,), (CITY,), (AGE,), (JOB,), (PET,), CALLED, CALLED, OWN, OWN,
           OWN, SHARED, SHARED)  # fmt: skip
KINDS = (NAME, CITY, AGE, JOB, PET, *CALLED, *OWN, *SHARED)


def any_kind(draw: Draw) -> FactKind:
    """Returns a kind of fact, names most often."""
    return draw.pick(draw.pick(_GROUPS))


def _joined(draw: Draw, wordings: list[str]) -> str:
    if len(wordings) == 1 or draw.chance(0.6):
        return " ".join(wordings)
    first, *rest = (wording.rstrip(".!") for wording in wordings)
    lowered = (w.replace("My", "my", 1) if w.startswith("My") else w for w in rest)
    return " and ".join([first, *lowered]) + "."


def statement(draw: Draw, kinds: tuple[FactKind, ...]) -> tuple[tuple[Fact, ...], Exchange]:
    """Returns the facts of one user message, and that message with its answer."""
    values = [kind.value(draw) for kind in kinds]
    wordings = [draw.pick(kind.statements).format(v=value) for kind, value in zip(kinds, values, strict=True)]
    text = draw.typed(_joined(draw, wordings))
    stated = tuple(Fact(kind, as_typed(text, value)) for kind, value in zip(kinds, values, strict=True))
    return stated, exchange("recall", text, kinds[0].ack.format(v=stated[0].value))


def question(draw: Draw, fact: Fact) -> Exchange:
    """Returns a question for a stated fact and its answer."""
    return exchange("recall", draw.typed(draw.pick(fact.kind.questions)), fact.answer)


def unanswerable_question(draw: Draw, kind: FactKind) -> Exchange:
    """Returns a question for a fact that was not stated; the answer says so."""
    return exchange("untold", draw.typed(draw.pick(kind.questions)), kind.missing)


def statement_with_question(draw: Draw, kind: FactKind) -> tuple[Fact, Exchange]:
    """Returns a fact that is stated and asked for in the same message."""
    value = kind.value(draw)
    text = draw.typed(f"{draw.pick(kind.statements).format(v=value)} {draw.pick(kind.questions)}")
    fact = Fact(kind, as_typed(text, value))
    return fact, exchange("recall", text, fact.answer)
