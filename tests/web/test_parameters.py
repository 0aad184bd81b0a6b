"""The parameters panel and the daemon accept the same values."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.params import PARAM_DOCS, parse_params
from tests.web import node

IMPORTS: Final = """
import { readingOf, textOf } from "JS/params/fields.js";
import { PARAMS } from "JS/wire/params.js";
"""
READ: Final = """
  const specs = new Map(PARAMS.map((each) => [each.name, each]));
  return input.map(([name, text]) => readingOf(specs.get(name), text));
"""
NUMBERS: Final = (
    "0",
    "1",
    "2",
    "-1",
    "-2",
    "0.5",
    "1.5",
    "100",
    "1e3",
    "1000001",
    "4294967294",
    "4294967295",
    "99999999999",
)
TEXTS: Final = ("a", "a\nb", "\\n", "\\\\", "é" * 20, "é" * 21, "x" * 256, "x" * 257, "\n".join("abcdefghijklmnopq"))
BIASES: Final = ("1: 2", "1: -100\n2: false", "1: 101", "1: 2\n1: 3", "x: 2", "-1: 2")
NONSENSE: Final = ("abc", "1x", "0x10", "NaN", "Infinity", "--1", "1 2")


def read(questions: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the panel's result for texts in the fields."""
    told: list[dict[str, Any]] = node.run(IMPORTS, READ, given=questions)
    return told


def refusal(name: str, value: object) -> str:
    """Return the daemon's error for a value, if any."""
    try:
        parse_params({name: value})
    except InferenceCenterError as error:
        return str(error)
    return ""


def test_panel_refuses_what_the_daemon_refuses() -> None:
    """For any input, accepted values are accepted by the daemon, and refused numbers refused."""
    texts = {"number": NUMBERS, "integer": NUMBERS, "object": BIASES}
    questions = [(doc.name, text) for doc in PARAM_DOCS for text in (*texts.get(doc.kind, TEXTS), *NONSENSE)]
    questions = [(name, text) for name, text in questions if name not in ("samplers", "ignore_eos", "stop_regex")]
    for (name, text), reading in zip(questions, read(questions), strict=True):
        if "value" in reading:
            assert refusal(name, reading["value"]) == "", (name, text)
        else:
            assert "must be" in reading["fault"] or "is not understood" in reading["fault"], (name, text)
            if text in NUMBERS:
                value = float(text) if "." in text or "e" in text else int(text)
                assert refusal(name, value), (name, text)


def test_numbers_near_each_bound() -> None:
    """The panel and the daemon have the same bounds."""
    rng = random.Random(9)
    questions = []
    for doc in PARAM_DOCS:
        if doc.kind in ("number", "integer"):
            words = doc.allowed.replace(",", " ").split()
            bounds = [float(word) for word in words if word.lstrip("-").replace(".", "", 1).isdigit()]
            step = 1 if doc.kind == "integer" else rng.uniform(0.001, 0.1)
            questions += [(doc.name, f"{bound + side * step:.10g}") for bound in bounds for side in (-1, 0, 1)]
    assert len(questions) > 150
    for (name, text), reading in zip(questions, read(questions), strict=True):
        value = float(text) if "." in text or "e" in text else int(text)
        assert ("value" in reading) == (not refusal(name, value)), (name, text)


def test_defaults_can_be_typed() -> None:
    """The text of a default means the default."""
    known = {doc.name: doc.default for doc in PARAM_DOCS if doc.default is not None and doc.default != ()}
    texts = node.run(IMPORTS, "return PARAMS.map((each) => [each.name, textOf(each, each.default)]);")
    asked = [(name, text) for name, text in texts if name in known]
    asked = [(name, text) for name, text in asked if name not in ("samplers", "ignore_eos")]
    for (name, _), reading in zip(asked, read(asked), strict=True):
        value = reading["value"]
        assert (tuple(value) if isinstance(value, list) else value) == known[name]


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_empty_field_is_the_default(text: str) -> None:
    """Nothing is sent, and there is no error."""
    questions = [(doc.name, text) for doc in PARAM_DOCS if not (doc.kind.endswith("array") and text == "  ")]
    assert all(reading == {} for reading in read(questions))
