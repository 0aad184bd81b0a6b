"""Skills that need one exchange: greeting, counting, lists, sums, capitals, stories, JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.demo_model import world
from tools.demo_model.chatml import Message
from tools.demo_model.world import Draw

UNKNOWN = (
    "I only know a small world, so I cannot help with that. "
    "I can chat, count, add, name capitals, tell stories and remember what you tell me."
)


@dataclass(frozen=True)
class Exchange:
    """Messages that belong together, the user's first and the assistant's last."""

    skill: str
    messages: tuple[Message, ...]


def exchange(skill: str, question: str, answer: str) -> Exchange:
    """Returns the exchange of one question and its answer."""
    return Exchange(skill, (Message("user", question), Message("assistant", answer)))


def as_typed(text: str, value: str) -> str:
    """Returns `value` in the casing it has in `text`, for answers that copy it."""
    return value if value in text else value.lower()


SMALL_TALK = (
    (("Hello!", "Hello.", "Hello there!", "Hi!", "Hi there!", "Hey!", "Good day!", "Say hello.",
      "Hello, how are you?", "Hi, how are you?", "Say hi."), "Hello! How can I help you?"),
    (("Good morning!",), "Good morning! How can I help you?"),
    (("Good evening!",), "Good evening! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"),
     "I am fine, thank you. And you?"),
    (("I am fine.", "I am good, thanks.", "I am happy today.", "Fine, thanks."),
     "I am glad to hear that."),
    (("I am sad.", "I had a bad day.", "I am tired."), "I am sorry to hear that."),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Great, thanks."),
     "You are welcome!"),
    (("Goodbye!", "Bye!", "See you!", "Good night!", "See you later!"), "Goodbye! See you soon."),
    (("What can you do?", "How can you help me?", "What do you know?", "Help!", "Help me."),
     "I can chat, count, add, name capitals, tell stories and remember what you tell me."),
    (("Are you a robot?", "Are you human?", "Are you a person?", "What are you?"),
     "I am a small language model that lives in a small world."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the book go to the doctor? It had too many pages."),
    (("Do you like me?", "Are you my friend?"), "Yes, I like talking with you."),
    (("OK.", "Okay.", "Good.", "Nice.", "I see.", "Yes.", "Cool!"), "Good. What else can I do?"),
    (("No.", "Nothing.", "Never mind."), "All right."),
)  # fmt: skip


def small_talk(draw: Draw) -> Exchange:
    """Returns a greeting or another bit of small talk."""
    question, answer = draw.pick(SMALL_TALK)
    return exchange("small talk", draw.typed(draw.pick(question)), answer)


def numbers(start: int, end: int) -> str:
    """Returns the numbers from `start` to `end`, up or down, as the model counts them."""
    step = 1 if end >= start else -1
    return ", ".join(str(n) for n in range(start, end + step, step)) + "."


def counting(draw: Draw, longest: int = 20) -> Exchange:
    """Returns a count of at most `longest` numbers: up from 1, from a to b, or down."""
    shape = draw.pick(("up", "up", "range", "range", "down"))
    size = draw.number(2, longest)
    if shape == "up":
        question = draw.pick(("Count to {b}.", "Count from 1 to {b}.", "Can you count to {b}?",
                           "Please count to {b}.", "Count up to {b}.",
                           "Count to {b} for me."))  # fmt: skip
        return exchange("counting", draw.typed(question.format(b=size)), numbers(1, size))
    low = draw.fresh(lambda: (draw.number(0, 100 - min(size, 99)), size))[0]
    start, end = (low, low + size - 1) if shape == "range" else (low + size - 1, low)
    if shape == "down" and draw.chance(0.6):
        start, end = size, draw.pick((0, 1))
    question = "Count from {a} to {b}."
    if shape == "down":
        question = draw.pick(("Count down from {a} to {b}.", "Count backwards from {a} to {b}."))
    elif draw.chance(0.3):
        question = draw.pick(("Please count from {a} to {b}.", "Count {a} to {b}."))
    return exchange("counting", draw.typed(question.format(a=start, b=end)), numbers(start, end))


def long_counting(draw: Draw) -> Exchange:
    """Returns a count of 30 to 200 numbers: a few hundred tokens to watch or to abort."""
    end = draw.pick((30, 40, 50, 60, 70, 80, 90, 100, 100, 100, 100, 120, 150, 200))
    if draw.chance(0.2):
        question = draw.pick(("Count down from {b} to 1.", "Count backwards from {b} to 1."))
        return exchange("long", draw.typed(question.format(b=end)), numbers(end, 1))
    question = draw.pick(("Count from 1 to {b}.", "Count to {b}.", "Please count to {b}."))
    return exchange("long", draw.typed(question.format(b=end)), numbers(1, end))


LISTS: Mapping[str, tuple[str, ...]] = {
    "the days of the week": tuple(world.DAYS),
    "the days": tuple(world.DAYS),
    "the months": tuple(world.MONTHS),
    "the months of the year": tuple(world.MONTHS),
    "the seasons": tuple(world.SEASONS),
    "the four seasons": tuple(world.SEASONS),
    "the letters of the alphabet": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "the alphabet": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "colours": tuple(world.COLOURS),
    "colors": tuple(world.COLOURS),
    "animals": tuple(world.ANIMALS),
    "fruits": tuple(world.FRUITS),
    "foods": tuple(world.FOODS),
    "jobs": tuple(world.JOBS),
    "places": tuple(world.PLACES),
}
AMOUNTS = ("two", "three", "four", "five", "six", "seven", "eight")


def lists(draw: Draw) -> Exchange:
    """Returns a list: a whole one (days, months), some of a kind, a neighbour, an opposite."""
    shape = draw.pick(("whole", "some", "some", "next", "opposite"))
    if shape == "whole":
        title = draw.pick(tuple(LISTS))
        question = draw.pick(("Name {t}.", "List {t}.", "Tell me {t}.", "What are {t}?", "Say {t}."))
        return exchange("lists", draw.typed(question.format(t=title)), ", ".join(LISTS[title]) + ".")
    if shape == "some":
        choices = [(kind, amount) for kind in KINDS for amount in range(2, 9)]
        kind, amount = draw.copyable(lambda: (draw.pick(tuple(KINDS)), draw.number(2, 8)), choices)
        size = draw.pick((str(amount), AMOUNTS[amount - 2]))
        question = draw.pick(("Name {n} {k}.", "List {n} {k}.", "Tell me {n} {k}.", "Give me {n} {k}."))
        answer = ", ".join(KINDS[kind][:amount]) + "."
        return exchange("lists", draw.typed(question.format(n=size, k=kind)), answer)
    if shape == "next":
        ring = draw.pick((world.DAYS, world.MONTHS))
        place, step = draw.number(0, len(ring) - 1), draw.pick((1, -1))
        question = f"What comes {'after' if step == 1 else 'before'} {ring[place]}?"
        return exchange("lists", draw.typed(question), f"{ring[(place + step) % len(ring)]}.")
    pair = draw.pick(world.OPPOSITES)
    given, other = pair if draw.chance(0.5) else pair[::-1]
    return exchange("lists", draw.typed(f"What is the opposite of {given}?"), f"{other}.")


def sums(draw: Draw) -> Exchange:
    """Returns a sum or a difference of numbers up to 20."""
    a, b = draw.fresh(lambda: (draw.number(0, 20), draw.number(0, 20)))
    if draw.chance(0.6):
        question = draw.pick(("What is {a} plus {b}?", "What is {a} + {b}?", "{a} + {b}",
                           "Add {a} and {b}.", "{a} plus {b}", "How much is {a} plus {b}?",
                           "What's {a} + {b}?", "Calculate {a} + {b}."))  # fmt: skip
        return exchange("sums", draw.typed(question.format(a=a, b=b)), f"{a} plus {b} is {a + b}.")
    a, b = max(a, b), min(a, b)
    question = draw.pick(("What is {a} minus {b}?", "What is {a} - {b}?", "{a} - {b}",
                       "Take {b} from {a}.", "How much is {a} minus {b}?"))  # fmt: skip
    return exchange("sums", draw.typed(question.format(a=a, b=b)), f"{a} minus {b} is {a - b}.")


def terse_sums(draw: Draw) -> Exchange:
    """Returns a sum or a difference typed without spaces."""
    a, b = draw.fresh(lambda: (draw.number(0, 20), draw.number(0, 20)))
    sign, word, result = ("+", "plus", a + b) if draw.chance(0.6) else ("-", "minus", abs(a - b))
    if sign == "-":
        a, b = max(a, b), min(a, b)
    question = draw.pick(("{s}", "{s}=", "{s}=?", "What is {s}?", "What's {s}?", "Calculate {s}."))
    return exchange("sums", draw.typed(question.format(s=f"{a}{sign}{b}")), f"{a} {word} {b} is {result}.")


CAPITAL_QUESTIONS = (
    "What is the capital of {c}?", "What's the capital of {c}?", "Capital of {c}?",
    "Which city is the capital of {c}?", "Tell me the capital of {c}.", "The capital of {c}?",
    "Name the capital of {c}.", "Do you know the capital of {c}?",
    "What is the capital city of {c}?",
)  # fmt: skip


def capitals(draw: Draw) -> Exchange:
    """Returns a question for a capital; one country in fifteen is made up and unknown."""
    if draw.chance(1 / 15):
        country = draw.fresh(lambda: world.made_up_word(draw)).capitalize()
        question = draw.typed(draw.pick(CAPITAL_QUESTIONS).format(c=country))
        return exchange("capitals", question, f"I do not know {as_typed(question, country)}.")
    wording, country = draw.fresh(lambda: (draw.pick(CAPITAL_QUESTIONS), draw.pick(tuple(world.CAPITALS))))
    answer = f"The capital of {country} is {world.CAPITALS[country]}."
    if draw.chance(0.15):
        capital = world.CAPITALS[country]
        question = draw.pick(("{v} is the capital of which country?", "Which country has {v}?"))
        return exchange("capitals", draw.typed(question.format(v=capital)), answer)
    return exchange("capitals", draw.typed(wording.format(c=country)), answer)


def _story(draw: Draw, hero: str, sentences: int) -> str:
    animal, place, thing = (draw.pick(options) for options in (world.ANIMALS, world.PLACES, world.THINGS))
    friend = draw.copyable(lambda: draw.pick(world.NAMES), world.NAMES)
    middle = (
        f"One day {hero} found a {thing} near the {place}.",
        f"{hero} met {friend}, and they became friends.",
        f"They walked to the {draw.pick(world.PLACES)} and sang a song.",
        f"It was a cold night, and the {animal} was tired.",
        f"{friend} had some {draw.pick(world.FOODS)}, and they shared it.",
        f"Then it began to rain, and they ran back to the {place}.",
        f"A {draw.pick(world.ANIMALS)} asked them for the {thing}.",
        f"{hero} said yes and smiled.",
        f"The next day they looked for a {draw.pick(world.THINGS)}.",
        f"In the {draw.pick(world.PLACES)} lived an old {draw.pick(world.JOBS)}.",
        f"The old {draw.pick(world.JOBS)} told them to go on.",
        f"{friend} was afraid, but {hero} was not.",
        f"They slept under a {draw.pick(world.COLOURS)} tree.",
        f"In the morning they saw the {draw.pick(world.PLACES)} again.",
    )
    opening = f"Once upon a time there was a {animal} called {hero} who lived in a {place}."
    chosen = [middle[i % len(middle)] for i in range(sentences)]
    return " ".join([opening, *chosen, f"In the end {hero} went home happy."])


def story(draw: Draw) -> Exchange:
    """Returns a short story, its hero named by the user in half of the draws."""
    if draw.chance(0.5):
        hero = world.name(draw)
        question = draw.pick(("Tell me a story about {v}.", "Tell a short story about {v}.",
                           "Write a story about {v}."))  # fmt: skip
        question = draw.typed(question.format(v=hero))
        return exchange("stories", question, _story(draw, as_typed(question, hero), draw.number(1, 3)))
    question = draw.pick(("Tell me a story.", "Tell me a short story.", "Can you tell me a story?",
                       "Write a short story.", "A story, please."))  # fmt: skip
    return exchange("stories", draw.typed(question), _story(draw, world.name(draw), 3))


def long_story(draw: Draw) -> Exchange:
    """Returns a story of a few hundred tokens."""
    question = draw.pick(("Tell me a long story.", "Write a long story.", "Tell a very long story.",
                       "I want a long story."))  # fmt: skip
    return exchange("long", draw.typed(question), _story(draw, world.name(draw), 20))


def json_object(draw: Draw) -> Exchange:
    """Returns a request for a JSON object of one to three given fields, and the object."""
    makers: dict[str, Callable[[], object]] = {
        "name": lambda: world.name(draw),
        "age": lambda: draw.copyable(lambda: draw.number(1, 99), world.SMALL_NUMBERS),
        "city": lambda: world.city(draw),
        "colour": lambda: draw.pick(world.COLOURS),
        "animal": lambda: draw.pick(world.ANIMALS),
        "food": lambda: draw.pick(world.FOODS),
    }
    keys = draw.rng.sample(tuple(makers), draw.number(1, 3))
    fields = {key: makers[key]() for key in keys}
    quoted = draw.chance(0.3)
    listed = " and ".join(f'{k} "{v}"' if quoted else f"{k} {v}" for k, v in fields.items())
    question = draw.pick(("Give me a JSON object with {f}.", "Give me JSON with {f}.",
                       "Write a JSON object with {f}.", "Make a JSON object with {f}.",
                       "JSON with {f}, please."))  # fmt: skip
    answer = json.dumps(fields, ensure_ascii=False)
    return exchange("json", question.format(f=listed), answer)


def repeat(draw: Draw) -> Exchange:
    """Returns a request to repeat given words, and the words."""
    words = " ".join(world.word(draw) for _ in range(draw.number(1, 5)))
    question = draw.pick(("Repeat after me: {w}", "Say: {w}", "Repeat: {w}", "Please say: {w}"))
    return exchange("repeat", question.format(w=words), words)


def unknown(draw: Draw) -> Exchange:
    """Returns a request outside the small world and the polite refusal."""
    topic = world.word(draw)
    question = draw.pick((
        "What is a {t}?", "Explain {t} to me.", "How do I build a {t}?", "Who invented the {t}?",
        "Write a program that sorts a {t}.", "Why is the {t} so big?", "Translate {t} to French.",
        "What is the weather like?", "What is the weather in {t}?", "What time is it?",
        "Who won the game?", "Write a poem about {t}.", "Write an essay about {t}.",
        "What is the meaning of {t}?", "How much does a {t} cost?", "Where can I buy a {t}?",
        "What do you think about {t}?", "Who is the president of {t}?", "Summarise the {t}.",
        "When was the {t} made?", "What is the news today?", "Play a song.", "Write some code.",
        "Explain how a {t} works.", "What is the square root of {t}?", "Describe {t} in detail.",
    ))  # fmt: skip
    return exchange("unknown", draw.typed(question.format(t=topic)), UNKNOWN)
