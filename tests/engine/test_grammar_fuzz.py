"""Random grammars of every kind, made of meaningful parts, on the path of a turn.

Whatever a client sends is a usable grammar, or ``invalid_grammar``.
"""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.echo import MESSAGE_END, EchoBackend
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MARKERS = ("<|im_start|>",)
N_TOKENS = 258
fuzzed = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))

# JSON Schemas: keywords with values that fit them, and with any.

_NAMES = st.sampled_from(["a", "b", "$ref", "", "é", "\U0001f600", "\0", '"', "\\", "a" * 200])
_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, 1e308, 5e-324, 0.1]),
)
_PATTERNS = st.sampled_from(
    [
        "",
        "a*",
        "^a$",
        "(",
        "[",
        "\\d{1,9}",
        "(?=a)b",
        "(?i)x",
        "\\p{L}+",
        "a{1000}",
        "(a{99}){99}",
        "\\",
        "[^\\n]*",
        "\0",
        "(?<n>a)\\1",
        "\\b",
        "^\\w+@\\w+$",
    ]
)
_REFS = st.sampled_from(
    ["#", "#/", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://x/y", "", "#/$defs/~1", "%", "#a"]
)
_FORMATS = st.sampled_from(["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "x", ""])
_TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "any", ""])
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(max_size=5) | _PATTERNS | _REFS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of ``inner`` parts, in which each keyword may have an arbitrary value."""
    fitting: dict[str, st.SearchStrategy[Any]] = {
        "type": _TYPES | st.lists(_TYPES, max_size=3),
        "properties": st.dictionaries(_NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(_PATTERNS, inner, max_size=2),
        "additionalProperties": inner | st.booleans(),
        "required": st.lists(_NAMES, max_size=3),
        "items": inner,
        "prefixItems": st.lists(inner, max_size=3),
        "additionalItems": inner,
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=3),
        "not": inner,
        "enum": st.lists(_JSON, max_size=3),
        "const": _JSON,
        "pattern": _PATTERNS,
        "format": _FORMATS,
        "multipleOf": _NUMBERS,
        "$ref": _REFS,
        "$defs": st.dictionaries(_NAMES, inner, max_size=3),
        "definitions": st.dictionaries(_NAMES, inner, max_size=2),
        "x-guidance": st.dictionaries(
            st.sampled_from(
                ["whitespace_flexible", "item_separator", "key_separator", "coerce_one_of", "lenient", "x"]
            ),
            _JSON,
            max_size=3,
        ),
        "$schema": st.sampled_from(["http://json-schema.org/draft-04/schema#", "x"]),
        "$id": _REFS,
        "title": st.text(max_size=3),
    }
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        fitting[name] = _NUMBERS
    for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        fitting[name] = st.integers(0, 20) | _NUMBERS
    any_of = {name: st.one_of(value, value, value, _JSON) for name, value in fitting.items()}
    names = st.lists(st.sampled_from(sorted(any_of)), max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: any_of[name] for name in chosen}))


SCHEMAS: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), _schemas, max_leaves=8)
SCHEMA_TEXTS = SCHEMAS.map(json.dumps) | _JSON.map(json.dumps) | st.text(max_size=40)

# The others are texts of tokens of their languages.


def _made_of(parts: list[str]) -> st.SearchStrategy[str]:
    """Return texts of some of the parts, with arbitrary text in between."""
    part = st.one_of(st.sampled_from(parts), st.sampled_from(parts), st.sampled_from(parts), st.text(max_size=2))
    return st.lists(part, max_size=25).map("".join)


def _rules(head: str, names: list[str], atoms: list[str], suffixes: list[str]) -> st.SearchStrategy[str]:
    """Return well-formed rules of all names, the first of which is the start."""
    expressions = st.recursive(
        st.sampled_from([*atoms, *names[1:]]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(" ".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
            st.tuples(inner, st.sampled_from(suffixes)).map(lambda parts: f"({parts[0]}){parts[1]}"),
        ),
        max_leaves=6,
    )
    rules = st.lists(expressions, min_size=len(names), max_size=len(names))
    return rules.map(lambda said: "".join(head.format(name, each) for name, each in zip(names, said, strict=True)))


REGEXES = _made_of(
    [
        *"abz019.*+?|()[]{}^$\\-,:&~ \n\0é",
        "(?:",
        "(?i)",
        "(?=",
        "(?!",
        "(?<=",
        "(?P<n>",
        "(?P=n)",
        "\\1",
        "\\d",
        "\\w",
        "\\s",
        "\\b",
        "\\x41",
        "\\x{1F600}",
        "\\u0041",
        "\\p{L}",
        "\\p{Greek}",
        "[a-z]",
        "[^a]",
        "[[:alpha:]]",
        "[a&&b]",
        "{3}",
        "{2,}",
        "{0,9}",
        "{1000}",
        "{99999}",
        "{4,2}",
        "{-1}",
        "*?",
        "++",
        "\U0001f600",
    ]
)
LARKS = _made_of(
    [
        "start: ",
        "start",
        "a",
        "b",
        "A",
        "B",
        ": ",
        "::",
        "\n",
        "\n| ",
        " ",
        '"a"',
        '"ab"i',
        '""',
        "/a/",
        "/[a-z]+/",
        "/(/",
        "/a/s",
        "//",
        "|",
        "(",
        ")",
        "[",
        "]",
        "*",
        "+",
        "?",
        "{1,3}",
        "{0,100000}",
        "~3",
        "~1..2",
        "&",
        "~",
        '"a".."z"',
        '"z".."a"',
        "%json {}",
        '%json {"type": "integer"}',
        "%json",
        "%json {",
        "%regex {",
        '%regex {"substring_words": "a b c"}',
        '%regex {"substring_chars": "abc"}',
        "}",
        "%lark {\nstart: a\n}",
        "%ignore /x/\n",
        "%import common.INT\n",
        "%declare A\n",
        "%override a: b\n",
        '%llguidance {"no_forcing": true}\n',
        "%llguidance {}\n",
        "%llguidance",
        "<[0]>",
        "<[1-9]>",
        "<[257]>",
        "<[258]>",
        "<[99999999999]>",
        "<[*]>",
        "<[^1]>",
        "<[<|im_start|>]>",
        "<|im_end|>",
        "<|nothing|>",
        "<>",
        "[capture]",
        "[stop=/x/]",
        '[lazy, max_tokens=3, suffix="a"]',
        "[temperature=0.5]",
        "// comment\n",
        "# comment\n",
        "a.1: ",
        "@",
        "->",
        "!",
        "_",
    ]
)
GBNFS = _made_of(
    [
        "root ::= ",
        "root",
        "a",
        "a-b",
        " ::= ",
        "::=",
        "\n",
        "\n  ",
        " ",
        '"a"',
        '"\\n"',
        '"\\x41"',
        '"\\u0041"',
        '"\\U0001F600"',
        '"\\"',
        '""',
        '"',
        "[a-z]",
        "[^a]",
        "[",
        "]",
        "[\\]]",
        "[z-a]",
        "|",
        "(",
        ")",
        "*",
        "+",
        "?",
        "{2}",
        "{2,}",
        "{,2}",
        "{2,1}",
        "{100000}",
        "# comment\n",
        ".",
        "<[257]>",
        "!",
        "é",
    ]
)
LARK_RULES = _rules(
    "{0}: {1}\n",
    ["start", "a", "b", "c"],
    [
        '"x"',
        '"é"i',
        '""',
        "/[a-z]+/",
        "/(y|z){2,5}/",
        '%json {"type": "integer"}',
        "<[257]>",
        "<[<|im_start|>]>",
        "<|im_end|>",
    ],
    ["*", "+", "?", "{2}", "{0,3}", "{50,100}"],
)
GBNF_RULES = _rules(
    "{0} ::= {1}\n",
    ["root", "a", "b-c", "d"],
    ['"x"', '"\\n"', "[a-z]", "[^\\n]", '""', '"\\u00e9"', "."],
    ["*", "+", "?", "{2}", "{,3}", "{2,}"],
)
FRAMES = st.just("") | _made_of(
    ["start: ", '"a" ', "/x*/ ", "answer", "answer: ", "\n", "<[<|im_start|>]>", "|", "%json {}"]
)

HEADED = {"lark": st.sampled_from(["", "start: ", "start: a b\n"]), "gbnf": st.sampled_from(["", "root ::= "])}
GRAMMARS = {
    "json_schema": st.builds(Grammar, st.just("json_schema"), SCHEMA_TEXTS),
    "regex": st.builds(Grammar, st.just("regex"), REGEXES),
    "lark": st.builds(lambda head, text: Grammar("lark", head + text), HEADED["lark"], LARKS | LARK_RULES),
    "gbnf": st.builds(
        lambda head, *rest: Grammar("gbnf", head + rest[0], rest[1]), HEADED["gbnf"], GBNFS | GBNF_RULES, FRAMES
    ),
    "else": st.builds(Grammar, st.text(max_size=8), st.text(max_size=20), FRAMES),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCache]:
    """The grammars of an echo backend, compiled as in an engine, for at most a second."""
    grammars = GrammarCache(
        EchoBackend(EngineOptions(backend="echo", parent_pid=0)), sandbox=GrammarSandbox(timeout_s=1.0)
    )
    yield grammars
    grammars.close()


@contextmanager
def refused_for_the_grammar() -> Iterator[None]:
    """Allow an error, but only ``invalid_grammar`` with a reason."""
    refusal: InferenceCenterError | None = None
    try:
        yield
    except InferenceCenterError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.code, bool(refusal.message)) == (ErrorCode.INVALID_GRAMMAR, True), refusal


def run(grammars: GrammarCache, grammar: Grammar) -> None:
    """Compile a grammar as for a turn, and accept some of the tokens it allows."""
    draw = random.Random(0)
    with refused_for_the_grammar():
        constraint = grammars.constraint(grammars.compile(grammar, MARKERS))
        for _ in range(20):
            allowed = np.flatnonzero(constraint.allowed(N_TOKENS))
            assert len(allowed)
            token = int(draw.choice(allowed))
            constraint.accept(token)
            if token == MESSAGE_END:
                break


@fuzzed
@given(grammar=GRAMMARS["json_schema"])
def test_any_json_schema_compiles_or_is_refused(grammars: GrammarCache, grammar: Grammar) -> None:
    """The schemas have valid keywords, and keywords with arbitrary values."""
    run(grammars, grammar)


@fuzzed
@given(grammar=GRAMMARS["regex"])
def test_any_expression_compiles_or_is_refused(grammars: GrammarCache, grammar: Grammar) -> None:
    """Incomplete expressions and the syntax of other dialects are included."""
    run(grammars, grammar)


@fuzzed
@given(grammar=GRAMMARS["lark"])
def test_any_lark_compiles_or_is_refused(grammars: GrammarCache, grammar: Grammar) -> None:
    """The extensions of llguidance are included."""
    run(grammars, grammar)


@fuzzed
@given(grammar=GRAMMARS["gbnf"])
def test_any_gbnf_compiles_or_is_refused(grammars: GrammarCache, grammar: Grammar) -> None:
    """The grammar may or may not have a frame."""
    run(grammars, grammar)


@fuzzed
@given(grammar=GRAMMARS["else"])
@example(grammar=Grammar("json_schema", "[" * 100_000))
def test_any_grammar_kind_compiles_or_is_refused(grammars: GrammarCache, grammar: Grammar) -> None:
    """Grammars of any other kind, also of unknown ones, are compiled or refused."""
    run(grammars, grammar)
