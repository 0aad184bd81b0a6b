"""Lark grammars become regular expressions where they are regular; others are left to the model."""

from __future__ import annotations

import re
from typing import Final

import pytest

from inferencecenter.api.custom_tools import MAX_CHARS, function_of, is_left_to_model, pattern_of

PATCH: Final = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk // no others here
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
"""A grammar of patches, as coding agents send it."""


def matches(grammar: str, text: str) -> bool:
    """Return whether the expression of a grammar matches a whole text."""
    pattern = pattern_of(grammar)
    assert pattern is not None
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*** Begin Patch\n*** Update File: a.txt\n@@\n-wrld\n+world\n*** End Patch\n", True),
        ('*** Begin Patch\n*** Add File: a "b".txt\n+x\\y\n+\n*** End Patch', True),
        ("*** Begin Patch\n*** Add File: a.txt\nx\n*** End Patch", False),
        ("*** Begin Patch\n*** End Patch", False),
    ],
)
def test_grammar_of_patches_is_regular(text: str, expected: bool) -> None:
    """Its rules refer to each other, and none to itself."""
    assert matches(PATCH, text) == expected


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" | "b" "c"', ["a", "bc"], ["ac", "b"]),
        ('?start: (A "-")* A\n# a comment\nA: /[0-9]{2}/', ["12", "12-34"], ["1", "12-"]),
        ('start: ["x"] "y"~2 "z"~1..3', ["yyz", "xyyzzz"], ["xy", "yyzzzz"]),
        ('start: "a".."f"+', ["abf"], ["g", "-"]),
        ('start: "Ja"i /b/i /./s', ["jAB\n"], ["jac"]),
        (r'start: "a.\"\\\n" /\/(x|y)+/', ['a."\\\n/xy'], ['ab"\\\n/x', 'a."\\\n']),
        ('start: x\n  | "c"\n!x: "a"\n\n   | "b"', ["a", "b", "c"], ["d"]),
        ("%import common (INT, WS_INLINE)\nstart: INT WS_INLINE INT", ["1 22"], ["1", "a b"]),
        ("%import common.CNAME -> NAME\nstart: NAME", ["a_1"], ["1a"]),
        ('start: "" | "a"', ["", "a"], ["b"]),
        ("start: /[$^]/", ["$"], [""]),
        ('start: "a" b+\nb: "-" C\nC: "c" "d"\n%ignore " "', ["a-cd", " a  - cd -cd "], ["a-c d", "a -"]),
        ("%import common.WS\n%import common.INT\n%ignore WS\n%ignore /#.*/\nstart: INT*", ["", " 1 # x\n2"], ["a"]),
    ],
)
def test_operators_are_those_of_regular_expressions(grammar: str, right: list[str], wrong: list[str]) -> None:
    """This holds for rules and for terminals."""
    assert [text for text in right if not matches(grammar, text)] == []
    assert [text for text in wrong if matches(grammar, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'begin: "a"',
        'start: "(" start ")" | "a"',
        'start: a\na: "x" b?\nb: a',
        "start: missing",
        'start: "a"\nstart: "b"',
        'start: ("a"',
        'start: "a" )',
        'start: "a" -> ',
        'start: "a"\n%ignore a\na: "x" a',
        'start: "a"\n%ignore',
        'start: "a" B\n%import common.B',
        'start: "a"\n%import other.B',
        'start.2: "a"',
        'start: _list{"a"}\n_list{x}: x',
        "start: <|end|>",
        'start: %json {"type": "string"}',
        "start: /a$/",
        "start: /a/x",
        "start: /(a/",
        'start: "\\x"',
        'start: "aa".."b"',
        'stray\nstart: "a"',
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
        "\n".join(['start: r0 "a"', *(f"r{n}: r{n + 1}" for n in range(300)), 'r300: "b"']),
        "\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(30)), 'r30: "b"']),
        "start: " + '"a"' * MAX_CHARS,
    ],
)
def test_other_grammars_have_no_expression(grammar: str) -> None:
    """Recursive, unknown, malformed and too long grammars have none; their tool is offered all the same."""
    assert pattern_of(grammar) is None
    assert is_left_to_model({"type": "grammar", "syntax": "lark", "definition": grammar})
    tool = function_of("note", None, syntax="lark", definition=grammar)
    assert tool.parameters is not None
    assert tool.parameters["properties"] == {"input": {"type": "string"}}


def test_expression_is_part_of_the_schema() -> None:
    """It is treated as a regular expression, and the description tells the model the grammar."""
    tool = function_of("note", None, syntax="lark", definition='start: "a"+')
    assert tool.parameters is not None
    assert tool.parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:(?:a)+)$"}}
    assert (tool.description or "").endswith('start: "a"+')
    assert not is_left_to_model({"syntax": "lark", "definition": 'start: "a"+'})
    assert not is_left_to_model({"syntax": "regex", "definition": "("})
