"""Custom tools as functions: the input of a call is unescaped in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.api.custom_tools import InputReader, arguments_of, function_of, input_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATCH = '*** Begin Patch\n+ say("hé\\n\t😀 \\u0041/")\n*** End Patch\n'


def read_in_pieces(pieces: Sequence[str]) -> str:
    """Return the input read from pieces of arguments."""
    reader = InputReader()
    return "".join(reader.feed(piece) for piece in pieces)


@pytest.mark.parametrize("arguments", [arguments_of(PATCH), json.dumps({"input": PATCH}, indent=1)])
def test_input_is_read_from_any_two_pieces(arguments: str) -> None:
    """The result is the same wherever the arguments are cut, also within escapes, and for single characters."""
    cuts = [[arguments[:cut], arguments[cut:]] for cut in range(len(arguments) + 1)]
    for pieces in (*cuts, list(arguments)):
        assert read_in_pieces(pieces) == PATCH


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200)))
def test_input_of_any_text_is_that_text(text: str, ascii_only: bool, cuts: list[int]) -> None:
    """The result does not depend on how the text is escaped and split."""
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = [0, *sorted(cuts), len(arguments)]
    assert read_in_pieces([arguments[a:b] for a, b in pairwise(places)]) == text
    assert input_of(arguments_of(text)) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (r'{"input": "\ud83d"}', "\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "\ud83dx"}', "\N{REPLACEMENT CHARACTER}x"),
        (r'{"input": "\ud83d\ud83d\ude00\ude00"}', "\N{REPLACEMENT CHARACTER}😀\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "a\qb\u12xc"}', r"a\qb\u12xc"),
        (r'{"input": "a\u00', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "a", "input": "b"} x', "a"),
        ('{"input": ""}', ""),
        ('{"inp', ""),
        ("", ""),
        ("{}", "{}"),
        ('{"in put": "a"}', '{"in put": "a"}'),
        ('{"patch": "a\\n"}', '{"patch": "a\\n"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("*** Begin Patch", "*** Begin Patch"),
    ],
)
def test_arguments_of_another_form_are_read_too(arguments: str, expected: str) -> None:
    """Incomplete input is read up to its last whole character; arguments that have no input are used as they are."""
    assert input_of(arguments) == expected
    assert read_in_pieces(list(arguments)) == expected


class CountedText(str):
    """Text that counts how many characters of it, and of texts made with it, are looked at or copied."""

    __slots__ = ()
    n_chars = 0

    def __iter__(self) -> Iterator[str]:
        CountedText.n_chars += len(self)
        return super().__iter__()

    def __radd__(self, before: str) -> CountedText:
        CountedText.n_chars += len(before) + len(self)
        return CountedText(str(before) + str(self))


def test_white_space_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may generate any amount of it before an argument; the work grows with it, and not with its square."""
    monkeypatch.setattr(CountedText, "n_chars", 0)
    n_blanks = 1000
    pieces = [CountedText("{"), *[CountedText(" ")] * n_blanks, CountedText('"input": "a"}')]
    assert read_in_pieces(pieces) == "a"
    assert n_blanks <= CountedText.n_chars < 2 * n_blanks


def test_description_has_the_grammar() -> None:
    """The grammar follows the tool's own description."""
    tool = function_of("patch", "Edit files.", syntax="lark", definition='start: start "x"')
    assert tool.description == 'Edit files.\n\nThe input is text that matches this Lark grammar:\n\nstart: start "x"'
    assert function_of("patch", None, syntax=None, definition="").description == "The input is plain text."
    assert tool.parameters is not None
    assert tool.parameters["properties"] == {"input": {"type": "string"}}


def test_regular_expression_is_part_of_the_schema() -> None:
    """The whole input has to match it; one that cannot be enforced refuses no request."""
    tool = function_of("number", None, syntax="regex", definition="one|[0-9]+")
    assert tool.description == "The input is text that matches this regular expression:\n\none|[0-9]+"
    assert tool.parameters is not None
    assert tool.parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:one|[0-9]+)$"}}
    assert not tool.strict
