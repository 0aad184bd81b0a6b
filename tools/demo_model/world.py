"""The demo model's vocabulary of facts: word lists, invented words, and the held-out split.

Held out of training are the values whose CRC-32 is divisible by `HELD_OUT_ONE_IN`: made-up names
and words and long numbers that a user states, pairs of numbers in sums, start and length where
counting does not start at 1, and pairs of a question's wording and its country. `Draw.unseen`
picks the side of that split: evaluation uses the generators of training on unseen values.
"""

import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

HELD_OUT_ONE_IN = 8


def held_out(value: object) -> bool:
    """Returns whether training never shows `value` (its `repr` decides, case ignored)."""
    return crc32(repr(value).lower().encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Draw:
    """Random choices on one side of the held-out split."""

    rng: random.Random
    unseen: bool = False
    listed_held_out: bool = False

    def chance(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return self.rng.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """Returns one of `options`, whichever side of the split it is on."""
        return self.rng.choice(options)

    def number(self, low: int, high: int) -> int:
        """Returns a number in `low..high`, both included."""
        return self.rng.randint(low, high)

    def fresh(self, make: Callable[[], T]) -> T:
        """Returns the first value made that lies on this side of the split."""
        while True:
            value = make()
            if held_out(value) == self.unseen:
                return value

    def copyable(self, make: Callable[[], T], listed: Container[object]) -> T:
        """Returns a value to copy: a listed one, or a made-up one on this side of the split.

        With `listed_held_out` listed values obey the split too. A model trained like that all
        along never learns to write the held-out words, so the last stage is not.
        """
        while True:
            value = make()
            if held_out(value) == self.unseen or (value in listed and not self.listed_held_out):
                return value

    def typed(self, text: str) -> str:
        """Returns `text` the way a user may type it: other casing, no final mark."""
        roll = self.rng.random()
        if roll < 0.68:
            return text
        if roll < 0.8:
            return text.rstrip(".?!")
        if roll < 0.9:
            return text.lower()
        return text.lower().rstrip(".?!")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Alan Alice Amir Ana Anna Arthur Ben Bela Bob Boris Carla Carlos Carol Cem Clara Dana "
    "Daniel Dave David Diego Dora Edgar Elena Eli Ella Emil Emma Erik Eva Felix Finn Frank Fred "
    "Gina Grace Greta Hana Hans Harry Hugo Ida Igor Ines Ingrid Ivan Jack Jacob James Jane Jin "
    "Joe John Jonas Jorge Julia Kai Karl Kate Kenji Kim Lara Laura Lea Leo Lena Liam Lily Linus "
    "Lisa Louis Lucas Lucy Luna Marco Maria Mark Marta Mary Max Maya Mei Mia Mila Mike Milo Mona "
    "Nadia Nia Nico Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Pavel Peter Petra Pia Priya "
    "Rachel Rita Robert Rosa Ruth Sam Sara Sasha Simon Sofia Sonia Stella Sven Tara Theo Tim Tom "
    "Tina Uma Vera Victor Viola Walter Wanda Yara Yuki Yusuf Zara Zoe"
)
COLOURS = _words("red blue green yellow purple orange pink black white brown grey silver gold turquoise")
ANIMALS = _words(
    "dog cat bird fish horse rabbit hamster snake turtle parrot goat duck pig cow sheep frog "
    "mouse fox bear lion tiger monkey"
)
PETS = _words("dog cat bird fish horse rabbit hamster snake turtle parrot goat duck pig")
RELATIVES = _words("sister brother friend teacher mother father cousin neighbour boss partner")
FOODS = _words(
    "pizza soup rice bread cheese pasta salad cake fish curry noodles potatoes pancakes sushi "
    "tacos beans eggs chocolate"
)
FRUITS = _words("apple banana cherry grape lemon mango orange peach pear plum")
JOBS = _words(
    "baker doctor teacher farmer painter pilot nurse singer builder cook writer driver sailor gardener dancer lawyer"
)
PLACES = _words("forest garden village castle river mountain desert island harbour market")
THINGS = _words("key lamp book coin map stone boat hat bell box drum kite cup ring")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SEASONS = _words("spring summer autumn winter")
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("day", "night"),
    ("fast", "slow"),
    ("old", "new"),
    ("good", "bad"),
    ("high", "low"),
    ("happy", "sad"),
    ("light", "dark"),
    ("open", "closed"),
    ("left", "right"),
)
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "the Netherlands": "Amsterdam",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "the United Kingdom": "London",
    "the United States": "Washington",
    "Vietnam": "Hanoi",
}
SMALL_NUMBERS = (*range(101), *(str(n) for n in range(101)))
_ONSETS = _words("b br c ch d dr f g gr h j k kr l m n p pr qu r s sh st t th tr v w y z")
_VOWELS = _words("a e i o u a e i o ai ea ee ie oo ou")
_CODAS = ["", "", "", "", "l", "m", "n", "r", "s", "t", "x", "ck", "nd", "rt"]


def made_up_word(draw: Draw) -> str:
    """Returns a lower-case word of two or three syllables that no list holds."""
    syllables = draw.pick((2, 2, 2, 3))
    body = "".join(draw.pick(_ONSETS) + draw.pick(_VOWELS) for _ in range(syllables))
    return body + draw.pick(_CODAS)


def name(draw: Draw) -> str:
    """Returns a name: listed or made up, now and then with a family name."""

    def make() -> str:
        first = draw.pick(NAMES) if draw.chance(0.4) else made_up_word(draw).capitalize()
        return f"{first} {made_up_word(draw).capitalize()}" if draw.chance(0.08) else first

    return draw.copyable(make, () if draw.unseen else NAMES)


def city(draw: Draw) -> str:
    """Returns a city: a capital or a made-up one."""
    capitals = tuple(CAPITALS.values())
    return draw.copyable(lambda: draw.pick(capitals) if draw.chance(0.5) else made_up_word(draw).capitalize(), capitals)


def word(draw: Draw) -> str:
    """Returns a made-up word or a common noun."""
    nouns = (*THINGS, *ANIMALS, *FRUITS, *PLACES)
    return draw.copyable(lambda: made_up_word(draw) if draw.chance(0.6) else draw.pick(nouns), nouns)


def digits(draw: Draw) -> str:
    """Returns a number as text, from one to five digits."""
    return draw.copyable(lambda: str(draw.number(0, 10 ** draw.number(1, 5) - 1)), SMALL_NUMBERS)


def listed_or_made_up(draw: Draw, options: Sequence[str]) -> str:
    """Returns one of `options`, or in a quarter of the draws a made-up word."""
    return draw.copyable(lambda: made_up_word(draw) if draw.chance(0.25) else draw.pick(options), options)
