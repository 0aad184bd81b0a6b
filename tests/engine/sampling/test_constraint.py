"""Masks of grammars on a vocabulary of bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.echo import MESSAGE_END, MESSAGE_START, EchoBackend
from inferencecenter.engine.sampling.constraint import Constraint, compiled, names_of, tokenizer_of
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Grammar
from tests.engine.schemas import CASES, UNSUPPORTED, Case

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = EchoBackend(EngineOptions(backend="echo", parent_pid=0))
TOKENIZER = tokenizer_of(names_of(BACKEND), BACKEND.token_bytes, tokenize=lambda text: [*text.encode()])
N_VOCAB = BACKEND.model.n_vocab
# llguidance requires DEL to be escaped, JSON does not.
TEXTS = st.text(st.characters(exclude_characters="\x7f", codec="utf-8"))
MARKERS = {"<|im_start|>": MESSAGE_START}


def constraint(kind: str, text: str, *, clock: Callable[[], float] = lambda: 0.0) -> Constraint:
    """Return the constraint of a grammar."""
    matcher = compiled(TOKENIZER, Grammar(kind, text), MARKERS)
    return Constraint(matcher.deep_copy(), n_words=(TOKENIZER.vocab_size + 31) // 32, clock=clock)


def fits(kind: str, text: str, answer: str) -> bool:
    """Return whether a complete answer matches a grammar."""
    return constraint(kind, text).fits([*answer.encode(), MESSAGE_END])


def refusal(kind: str, text: str) -> str:
    """Return the error of a grammar."""
    with pytest.raises(InferenceCenterError) as refused:
        compiled(TOKENIZER, Grammar(kind, text), MARKERS)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR
    return refused.value.message


def fits_schema(schema: Any, value: Any) -> bool:
    """Return whether JSON, as Python writes it, matches a schema."""
    return fits("json_schema", json.dumps(schema), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_schema_accepts_exactly_the_valid_values(case: Case) -> None:
    """An independent validator agrees on each value."""
    validator = Draft202012Validator(case.schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for value in case.valid:
        assert validator.is_valid(value)
        assert fits_schema(case.schema, value), value
    for value in case.invalid:
        assert not fits_schema(case.schema, value), value


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=str)
def test_unsatisfiable_schema_is_refused(schema: dict[str, Any]) -> None:
    """A keyword that cannot be enforced is named instead of ignored, also inside of a larger schema."""
    assert refusal("json_schema", json.dumps(schema))
    assert refusal("json_schema", json.dumps({"type": "object", "properties": {"a": schema}, "required": ["a"]}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    )
)
def test_empty_schema_accepts_any_json(value: Any) -> None:
    """All that Python's encoder writes is accepted."""
    assert fits_schema({}, value)


def test_generated_json_is_canonical() -> None:
    """White space is where Python puts it and nowhere else, unless the schema allows it."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    text = json.dumps(schema)
    assert fits("json_schema", text, '{"a": 1, "b": 2}')
    for other in ('{"a":1,"b":2}', '{ "a": 1, "b": 2}', '{"a": 1,  "b": 2}', '{\n"a": 1, "b": 2}', ' {"a": 1}'):
        assert not fits("json_schema", text, other)
    compact = json.dumps({"x-guidance": {"item_separator": ",", "key_separator": ":"}, **schema})
    assert fits("json_schema", compact, '{"a":1,"b":2}')


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "(yes|no)!{0,2}", ["yes", "no!!"], ["", "maybe", "yes!!!"]),
        ("regex", "^a/b$", ["a/b"], ["a", "a\\/b"]),
        ("regex", "a\nb", ["a\nb"], ["a b"]),
        ("regex", "(?i)ü+", ["ü", "Üü"], ["u"]),
        ("regex", "", [""], ["a"]),
        ("lark", 'start: "a" B+\nB: /[0-9]/ // a comment', ["a1", "a12"], ["a", "1"]),
        ("lark", 'start: %json {"type": "integer"}', ["12"], ["x"]),
        ("gbnf", 'root ::= "a" rest*\nrest ::= [0-9] | "-"', ["a", "a1-2"], ["", "ab"]),
        ("gbnf", r'root ::= "\u0041\U0001F600" [\u00e4-\u00fc]', ["A😀ö"], ["a😀ö", "A😀o"]),
        ("gbnf", r'root ::= "\\u0041" "\x41" "\u005c"', ["\\u0041A\\"], ["AAA"]),
        ("gbnf", 'root ::= [^\\n]+ "\\n"', ["ab\n"], ["a\nb\n"]),
    ],
)
def test_every_grammar_kind_is_supported(kind: str, text: str, good: list[str], bad: list[str]) -> None:
    """A complete match is accepted, and nothing else."""
    for answer in good:
        assert fits(kind, text, answer), answer
    for answer in bad:
        assert not fits(kind, text, answer), answer


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", 'start: "a', "1(10): lexer error"),
        ("lark", 'start: "a"\n\nstart: "b"', "at 3(8): duplicate rule"),
        ("lark", "start: <|im_end|x>", "unknown special token"),
        ("lark", "", "no start rule"),
        ("gbnf", "root ::= (", "line 1"),
        ("gbnf", 'root ::= "\\', "GBNF"),
        ("gbnf", 'other ::= "a"', "root"),
        ("json_schema", '{"type": "unicorn"}', "unicorn"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[1]", "object or a boolean"),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", "false", "no text matches this grammar"),
        ("json_schema", '{"$ref": "#"}', "no text matches this grammar"),
        ("lark", 'start: s\ns: s "a"', "no text matches this grammar"),
        ("esperanto", "ne", "esperanto"),
    ],
)
def test_grammar_error_has_a_reason(kind: str, text: str, said: str) -> None:
    """It has the position in the client's source, and only text of the client."""
    reason = refusal(kind, text)
    assert said in reason
    assert "no_forcing" not in reason
    assert "x-guidance" not in reason
    assert len(reason) < 700


def test_end_token_is_allowed_where_the_grammar_ends() -> None:
    """It is allowed nowhere else, and it is the only one where nothing can follow."""
    held = constraint("regex", "ab*c?")
    allowed = []
    for token in b"abc":
        mask = held.allowed(N_VOCAB)
        allowed.append({int(each) for each in np.flatnonzero(mask)})
        held.accept(token)
    assert allowed == [{ord("a")}, {ord("b"), ord("c"), MESSAGE_END}, {ord("b"), ord("c"), MESSAGE_END}]
    assert list(np.flatnonzero(held.allowed(N_VOCAB))) == [MESSAGE_END]
    held.accept(MESSAGE_END)


def test_control_token_is_allowed_only_where_the_grammar_names_it() -> None:
    """It matches no text, and its name is no text."""
    assert not constraint("lark", r"start: /(.|\n)*/").fits([MESSAGE_START])
    named = constraint("lark", 'start: "a"? <[<|im_start|>]> "b"')
    assert named.fits([MESSAGE_START, ord("b"), MESSAGE_END])
    assert named.fits([ord("a"), MESSAGE_START])
    assert not named.fits([*b"<|im_start|>"])
    assert not named.fits([ord("b")])


def test_forced_text_is_tokenized_canonically() -> None:
    """A grammar's own option for forced tokens is overridden."""
    held = constraint("lark", '%llguidance {"no_forcing": false}\nstart: "<|im_start|>"')
    assert list(np.flatnonzero(held.allowed(N_VOCAB))) == [ord("<")]


def test_constraint_resumes_an_earlier_answer() -> None:
    """The answer is consumed without a check of each mask; one that violates the grammar is a defect."""
    held = constraint("regex", "abc")
    held.replay(list(b"ab"))
    assert list(np.flatnonzero(held.allowed(N_VOCAB))) == [ord("c")]
    with pytest.raises(ValueError, match="earlier answer"):
        constraint("regex", "abc").replay(list(b"ax"))


def test_slow_grammar_ends_its_turn() -> None:
    """A few slow tokens are tolerated, not many: all turns of a step wait for them."""
    seconds = iter(range(1000))
    held = constraint("regex", "a*", clock=lambda: next(seconds) * 0.3)
    failures: list[str] = []
    held._on_failed = lambda: failures.append("failed")
    for _ in range(2):
        held.allowed(N_VOCAB)
    assert failures == []
    held.accept(ord("a"))
    with pytest.raises(InferenceCenterError, match="too long"):
        held.accept(ord("a"))
    assert failures == ["failed"]


def test_grammar_without_spelling_tokens_ends_its_turn() -> None:
    """Only tokens beyond the model's vocabulary would match."""
    held = constraint("lark", 'start: "é"')
    with pytest.raises(InferenceCenterError, match="no token") as refused:
        held.allowed(100)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR


def test_disallowed_token_is_rejected() -> None:
    """The turn fails instead of continuing in violation of its grammar."""
    held = constraint("regex", "abc")
    with pytest.raises(InferenceCenterError):
        held.accept(ord("x"))


class PanicError(BaseException):
    """The exception that the binding raises when llguidance panics."""


class Panicking:
    """A matcher some of whose calls panic."""

    def __init__(self, *calls: str) -> None:
        for name in calls:
            setattr(self, name, self._panic)

    def is_error(self) -> bool:
        """Return no error."""
        return False

    def unsafe_compute_mask_ptr(self, address: int, n_bytes: int) -> None:
        """Allow nothing."""

    def _panic(self, *_: object) -> None:
        raise PanicError("index out of bounds")


@pytest.mark.parametrize("call", ["unsafe_compute_mask_ptr", "consume_token"])
def test_grammar_panic_fails_only_its_turn(call: str) -> None:
    """The caller gets an error that this grammar cannot be used."""
    held = Constraint(Panicking(call), n_words=9, clock=lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(InferenceCenterError) as refused:
        held.allowed(N_VOCAB) if call == "unsafe_compute_mask_ptr" else held.accept(1)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR


@pytest.mark.parametrize("error", [PanicError("unwrap on None"), MemoryError(), ValueError("?")])
def test_any_compilation_exception_is_a_grammar_error(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The sandbox must not report success, or the engine would compile the same grammar."""

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("inferencecenter.engine.sampling.constraint.LLMatcher", failing)
    assert type(error).__name__ in refusal("regex", "a")
