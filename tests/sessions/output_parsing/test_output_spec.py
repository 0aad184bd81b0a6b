"""Grammars constrain answers to calls and structured output; llguidance is the oracle."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from inferencecenter.api.custom_tools import function_of
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.sampling.constraint import compiled
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import Tool
from inferencecenter.sessions.output_parsing import output_spec as output_spec_module
from inferencecenter.sessions.output_parsing.output_spec import (
    MAX_SCHEMA_VALUES,
    SchemaCache,
    enforceable_schemas,
    output_spec,
)
from inferencecenter.sessions.output_parsing.parts import ArgumentsDelta, ToolCallStart
from tests.api.test_lark_patterns import PATCH
from tests.sessions.output_parsing.speaking import ANSWERS, CONTROL, SECOND, WEATHER, called, model, read, speech

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from inferencecenter.sessions.output_parsing.output_spec import OutputSpec

_BYTES: Final = LLTokenizer("byte")
_STAND_INS: Final = {
    "[TOOL_CALLS]": 256,
    "[ARGS]": 257,
    "[CALL_ID]": 258,
    "<|python_tag|>": 256,
    "<think>": 256,
    "</think>": 257,
}
"""Control tokens that the tokenizer of bytes has, for those of models."""


def matcher(spoken: OutputSpec) -> LLMatcher:
    """The matcher of the grammar that constrains an answer."""
    assert spoken.grammar is not None
    return compiled(_BYTES, spoken.grammar, {mark: _STAND_INS[mark] for mark in spoken.markers})


def fits(spoken: OutputSpec, text: str, *, control: tuple[str, ...] = ()) -> bool:
    """Return whether an answer is accepted and complete; its markers and ``control`` are tokens."""
    marks = "|".join(map(re.escape, {*spoken.markers, *control})) or "(?!)"
    tokens: list[int] = []
    for piece in re.split(f"({marks})", text):
        tokens += [_STAND_INS[piece]] if re.fullmatch(marks, piece) else piece.encode()
    held = matcher(spoken)
    return held.try_consume_tokens(tokens) == len(tokens) and held.is_accepting()


@pytest.mark.parametrize("name", ANSWERS)
def test_grammar_accepts_calls_and_text(name: str) -> None:
    """The model's trained format is accepted, and so is plain text."""
    spoken = speech(name)
    assert fits(spoken, ANSWERS[name])
    assert fits(spoken, "all\nHello {x} [y]." if name == "FUNCTIONARY32" else "Hello {x} [y].")
    assert not fits(spoken, ANSWERS[name][:-1]) or name == "LLAMA31"


@pytest.mark.parametrize("name", ANSWERS)
def test_arguments_follow_the_schema(name: str) -> None:
    """A call of an unknown tool, or with unknown arguments, is rejected."""
    for right, wrong in (("get_weather", "get_whether"), ("days", "dais"), ("2", '"2"')):
        assert not fits(speech(name), ANSWERS[name].replace(right, wrong))


@pytest.mark.parametrize("name", SECOND)
def test_parallel_calls_can_be_disabled(name: str) -> None:
    """Without parallel calls one call ends the answer."""
    both = ANSWERS[name] + SECOND[name]
    assert fits(speech(name), both)
    alone = speech(name, parallel_tool_calls=False)
    assert fits(alone, ANSWERS[name])
    assert not fits(alone, both)


@pytest.mark.parametrize("name", SECOND)
def test_call_can_be_required(name: str) -> None:
    """With `required` an answer begins with a call; a named tool is called exactly once."""
    for choice in ("required", {"name": "get_weather"}):
        demanding = speech(name, tool_choice=choice)
        assert fits(demanding, ANSWERS[name])
        assert not fits(demanding, "Hello." if name != "FUNCTIONARY32" else "all\nHello.")
        assert fits(demanding, ANSWERS[name] + SECOND[name]) is (choice == "required")
    assert not fits(speech(name, tool_choice={"name": "get_weather_clock"}), ANSWERS[name])


def test_single_call_model_makes_one_call() -> None:
    """Llama's template supports one call per answer, so a second one is rejected."""
    assert not fits(speech("LLAMA31"), ANSWERS["LLAMA31"] + "; " + ANSWERS["LLAMA31"])
    assert fits(speech("LLAMA31"), "<|python_tag|>" + ANSWERS["LLAMA31"])
    assert not fits(speech("LLAMA31"), ' {"any": "object"}')


def test_calls_in_an_array_are_counted_by_the_grammar() -> None:
    """Mistral's array format accepts several calls in one array, or one."""
    both = ANSWERS["MISTRAL3"][:-1] + ', {"name": "get_weather_clock", "arguments": {}}]'
    assert fits(speech("MISTRAL3"), "Let me see." + both)
    assert not fits(speech("MISTRAL3", parallel_tool_calls=False), both)


@pytest.mark.parametrize("name", ["HERMES", "LLAMA31", "MISTRAL3", "FUNCTIONARY31", "FUNCTIONARY32"])
def test_calls_can_be_forbidden(name: str) -> None:
    """With `none` only text is accepted."""
    spoken = speech(name, tool_choice="none")
    assert fits(spoken, "all\nHello" if name == "FUNCTIONARY32" else "Hello")
    assert not fits(spoken, ANSWERS[name], control=("[TOOL_CALLS]",))


def test_text_before_calls_is_unconstrained() -> None:
    """The constraint starts at a complete trigger."""
    spoken = speech("HERMES")
    assert fits(spoken, "I <tool> <tool_cal l\n" + ANSWERS["HERMES"])
    assert fits(spoken, "<tool_call")
    assert not fits(spoken, "<tool_call> is how")
    assert not fits(spoken, ANSWERS["HERMES"] + "\nSo.")


@pytest.mark.parametrize("control", [CONTROL, (*CONTROL, "<think>", "</think>")])
def test_reasoning_is_unconstrained(control: tuple[str, ...]) -> None:
    """Reasoning is unconstrained, with tags that are tokens or text."""
    thought = "<think>\nShall I <tool_call>? {\n</think>\n\n"
    auto = speech("QWEN3", control=control)
    assert fits(auto, thought + "Yes.")
    assert fits(auto, thought + ANSWERS["QWEN3"])
    assert fits(auto, "Yes <b>.")
    assert not fits(auto, thought + "<tool_call>\nno")
    required = speech("QWEN3", control=control, tool_choice="required")
    assert fits(required, thought + ANSWERS["QWEN3"])
    assert fits(required, ANSWERS["QWEN3"])
    assert not fits(required, thought + "No.")


FORMS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"json_schema": {"type": "object"}}, '{"a": [1, 2]}', "Hello"),
    ({"json_schema": True}, "[]", "Hello"),
    ({"regex": r"a/b\n[/\\]+|\d"}, "a/b\n/\\", "b"),
    ({"grammar": 'start: "a" B\nB: /x+/'}, "axx", "a"),
    ({"grammar": 'root ::= "a}" more  # }\nmore ::= "<[</think>]>" [x{]+ | more more'}, "a}<[</think>]>x{", "a}"),
]


@pytest.mark.parametrize(("wants", "right", "wrong"), FORMS)
def test_grammar_applies_after_reasoning(wants: dict[str, Any], right: str, wrong: str) -> None:
    """Schemas, expressions and grammars apply after the reasoning."""
    for name, before in (
        ("HERMES", ""),
        ("QWEN3", ""),
        ("QWEN3", "<think>\nHm {.\n</think>\n\n"),
        ("R1", "Hm {.\n</think>\n\n"),
        ("FUNCTIONARY32", "all\n"),
    ):
        spoken = speech(name, tools=None, **wants)
        assert fits(spoken, before + right)
        assert not fits(spoken, before + wrong)


def test_without_reasoning_the_grammar_applies_at_once() -> None:
    """With reasoning disabled the grammar is passed to the engine unchanged."""
    grammar = speech("QWEN3", tools=None, thinking=False, grammar='root ::= "a"').grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("gbnf", 'root ::= "a"')


def test_schemas_cannot_break_out_of_the_grammar() -> None:
    """Quotes, line feeds and rule syntax inside a tool are data."""
    evil = '<[[TOOL_CALLS]]>x"\n}\nstart: /.*/\n%json {} // </tool_call> \\'
    tool = Tool(
        name="a.b-c_1",
        description=evil,
        parameters={
            "type": "object",
            "description": evil,
            "properties": {evil: {"enum": [evil]}},
            "required": [evil],
            "additionalProperties": False,
        },
    )
    arguments = json.dumps({evil: evil}, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "a.b-c_1", "arguments": {arguments}}}\n</tool_call>'
    spoken = speech("HERMES", tools=[tool], tool_choice="required")
    assert fits(spoken, call)
    assert not fits(spoken, "anything")
    assert read(spoken, *call) == called(0, "a.b-c_1", arguments)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"json_schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}, '{"ok": true}', "Hello."),
        ({"regex": "(yes|no)"}, "yes", "perhaps"),
        ({"grammar": 'root ::= "yes" | "no"'}, "no", "yes!"),
    ],
    ids=["schema", "regex", "gbnf"],
)
def test_answer_without_calls_has_the_form(name: str, form: dict[str, Any], right: str, wrong: str) -> None:
    """With tools and a form an answer is either a call or of that form."""
    prefix = "all\n" if name == "FUNCTIONARY32" else ""
    spoken = speech(name, **form)
    assert fits(spoken, ANSWERS[name])
    assert fits(spoken, prefix + right)
    assert not fits(spoken, prefix + wrong)
    assert not fits(speech(name, **form, tool_choice="required"), prefix + right)


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_that_is_begun_is_text_or_goes_on_with_a_call(name: str) -> None:
    """Its beginning is no reasoning, and needs no text prefix of the format."""
    template = model(name)
    request = Infer(op="infer", session_id="s", prompt="Hi", tools=[WEATHER], prefix="Well, ")
    schemas, prompt = enforceable_schemas(request), "<|im_start|>assistant\nWell, "
    spoken = output_spec(request, schemas=schemas, capabilities=template.capabilities, prompt=prompt)
    assert fits(spoken, "hello.")
    assert spoken.begun == ""


def test_strict_schema_names_tool_path_and_keyword() -> None:
    """A keyword that cannot be enforced is refused if its tool is strict, and named in a warning if it is not."""
    parameters = {"type": "object", "properties": {"headers": {"type": "object", "propertyNames": {"minLength": 1}}}}
    for strict in (True, False):
        tools = [WEATHER, Tool(name="fetch", parameters=parameters, strict=strict)]
        request = Infer(op="infer", session_id="s", prompt="Hi", tools=tools)
        if strict:
            with pytest.raises(InferenceCenterError) as caught:
                enforceable_schemas(request)
            assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_GRAMMAR, "tools.1.parameters")
            named = "the schema of the tool fetch has propertyNames at properties.headers, which cannot be enforced"
            assert caught.value.message == named
        else:
            (warning,) = enforceable_schemas(request).warnings
            assert "the tool fetch is enforced without propertyNames at properties.headers" in warning
            assert fits(speech("HERMES", tools=tools), ANSWERS["HERMES"])


def test_schema_references_are_resolved() -> None:
    """References within a tool's own schema resolve, in objects and in tags."""
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
        "additionalProperties": False,
    }
    tools = [Tool(name="go", parameters=parameters)]
    json_call = '<tool_call>\n{"name": "go", "arguments": {"at": [1, 2]}}\n</tool_call>'
    tag_call = "<tool_call>\n<function=go>\n<parameter=at>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    for name, call in (("HERMES", json_call), ("QWEN_CODER", tag_call)):
        spoken = speech(name, tools=tools)
        assert fits(spoken, call)
        assert not fits(spoken, call.replace("2", '"2"'))


@pytest.mark.parametrize("name", ["HERMES", "QWEN_CODER", "LLAMA31"])
def test_input_of_a_custom_tool_matches_its_regular_expression(name: str) -> None:
    """Calls in JSON escape the input, others have it verbatim."""
    tools = [function_of("note", None, syntax="regex", definition=r'(/\w+ "[a-z\n]+"\n?)+|[$^]')]
    spoken = speech(name, tools=tools, tool_choice="required")
    calls = {
        "HERMES": "<tool_call>\n%s\n</tool_call>",
        "QWEN_CODER": "<tool_call>\n<function=note>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
        "LLAMA31": "%s",
    }
    for text, matches in (('/a "b"', True), ('/a "b\nc"\n/d "e"', True), ("$", True), ('/a "B"', False), ("", False)):
        escaped = json.dumps({"name": "note", "arguments" if name == "HERMES" else "parameters": {"input": text}})
        call = calls[name] % (text if name == "QWEN_CODER" else escaped)
        assert fits(spoken, call) == matches, text
        if matches:
            start, arguments = read(spoken, call)
            assert start == ToolCallStart(0, "note")
            assert isinstance(arguments, ArgumentsDelta)
            assert json.loads(arguments.text) == {"input": text}


@pytest.mark.parametrize("name", ["HERMES", "QWEN_CODER", "LLAMA31"])
def test_input_of_a_custom_tool_matches_its_grammar(name: str) -> None:
    """The grammar holds for the text, however the format of calls escapes it."""
    tools = [function_of("note", None, syntax="lark", definition=PATCH)]
    spoken = speech(name, tools=tools, tool_choice="required")
    patch = '*** Begin Patch\n*** Add File: a\n+say("hé\\n")\t{}\n%s*** End Patch\n'
    for line, matches in (("+\n", True), ("*** Update File: é\n", True), ("+", False), ("x\n", False)):
        text = patch % line
        if name == "QWEN_CODER":
            call = f"<tool_call>\n<function=note>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
        else:
            key = "arguments" if name == "HERMES" else "parameters"
            call = json.dumps({"name": "note", key: {"input": text}}, ensure_ascii=False)
            call = f"<tool_call>\n{call}\n</tool_call>" if name == "HERMES" else call
        assert fits(spoken, call) == matches, line


@pytest.mark.parametrize("pattern", ["^(?:a)|(?:b)$", "^(?:a$|^b)$", "a", "^(?:" + "a" * 9000 + ")$"])
def test_tagged_text_with_another_pattern_is_free(pattern: str) -> None:
    """A pattern that cannot stand between other expressions is left to the model."""
    parameters = {"type": "object", "properties": {"at": {"type": "string", "pattern": pattern}}, "required": ["at"]}
    spoken = speech("QWEN_CODER", tools=[Tool(name="go", parameters=parameters)])
    assert fits(spoken, "<tool_call>\n<function=go>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>")


def test_tagged_values_can_be_enumerated() -> None:
    """A parameter with an `enum` accepts only its values; one without properties accepts anything."""
    choice = Tool(
        name="paint",
        parameters={"type": "object", "properties": {"with": {"type": "string", "enum": ["red", "blue"]}}},
    )
    free = Tool(name="free", parameters={"type": "object"})
    spoken = speech("QWEN_CODER", tools=[choice, free])
    call = "<tool_call>\n<function=paint>\n<parameter=with>\nred\n</parameter>\n</function>\n</tool_call>"
    assert fits(spoken, call)
    assert fits(spoken, call.replace("paint", "free").replace("with", "x").replace("red", "any\nthing"))
    assert fits(spoken, "<tool_call>\n<function=paint>\n</function>\n</tool_call>")
    assert not fits(spoken, call.replace("red", "green"))


@settings(max_examples=25)
@given(st.lists(st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True), min_size=1, max_size=4, unique=True))
def test_any_valid_tool_names_make_a_grammar(names: list[str]) -> None:
    """Names that share prefixes, or differ only in case, are distinguished in every format."""
    tools = [Tool(name=name) for name in names]
    for form, text in (
        ("HERMES", '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'),
        ("FUNCTIONARY32", "{}\n{{}}"),
        ("MISTRAL11", "[TOOL_CALLS]{}[CALL_ID]abcdefghi[ARGS]{{}}"),
        ("QWEN_CODER", "<tool_call>\n<function={}>\n</function>\n</tool_call>"),
    ):
        spoken = speech(form, tools=tools)
        for name in names:
            if name != "all":
                assert fits(spoken, text.format(name))
                assert read(spoken, text.format(name)) == called(0, name, "{}")


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth // 2):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("name", "wants", "code", "field"),
    [
        ("HERMES", {"tools": [Tool(name="deep", parameters=nested(400))]}, ErrorCode.INVALID_REQUEST, "tools"),
        ("GEMMA", {"tools": [Tool(name="deep", parameters=nested(400))]}, ErrorCode.INVALID_REQUEST, "tools"),
        ("HERMES", {"tools": None, "json_schema": nested(400)}, ErrorCode.INVALID_REQUEST, "json_schema"),
        ("HERMES", {"tools": None, "json_schema": {"enum": ["x" * 300_000]}}, ErrorCode.INVALID_GRAMMAR, "json_schema"),
        (
            "HERMES",
            {"tools": [Tool(name="long", parameters={"enum": ["x" * 1_100_000]})]},
            ErrorCode.INVALID_GRAMMAR,
            "tools",
        ),
        ("FUNCTIONARY32", {"tools": [Tool(name="all")]}, ErrorCode.INVALID_REQUEST, "tools"),
    ],
)
def test_oversized_tools_are_refused_by_name(name: str, wants: dict[str, Any], code: ErrorCode, field: str) -> None:
    """Schemas that are too deep or too long, and a tool named like the broadcast recipient, are refused."""
    with pytest.raises(InferenceCenterError) as caught:
        speech(name, **wants)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("name", "parameters", "code"),
    [
        ("HERMES", {"properties": {"a": 5}, "required": 7}, ErrorCode.INVALID_GRAMMAR),
        ("HERMES", {"properties": []}, ErrorCode.INVALID_GRAMMAR),
        ("HERMES", {"type": "string", "enum": {}}, ErrorCode.INVALID_GRAMMAR),
        ("QWEN_CODER", {"properties": {"a": 5}, "required": 7}, ErrorCode.INVALID_GRAMMAR),
        ("QWEN_CODER", {"properties": []}, ErrorCode.INVALID_REQUEST),  # its template wants to go through them
    ],
)
def test_invalid_schemas_are_refused(name: str, parameters: dict[str, Any], code: ErrorCode) -> None:
    """An invalid keyword is reported to the client as an error in its schema."""
    with pytest.raises(InferenceCenterError) as caught:
        matcher(speech(name, tools=[Tool(name="odd", parameters=parameters)]))
    assert caught.value.code is code


def test_schemas_used_last_are_cached_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema used least recently is dropped; strict ones are cached apart, those with huge numbers not at all."""
    monkeypatch.setattr(output_spec_module, "MAX_CACHED_BYTES", 50)
    cache, first, second = SchemaCache(), {"const": "x" * 10}, {"const": "y" * 10}
    found = cache.enforceable(first, strict=True)
    assert cache.enforceable(dict(first), strict=True) is found
    lenient = cache.enforceable(first, strict=False)
    assert lenient is not found
    cache.enforceable(first, strict=True)
    cache.enforceable(second, strict=True)
    assert cache.enforceable(first, strict=True) is found
    assert cache.enforceable(first, strict=False) is not lenient
    assert cache.enforceable({"maximum": 2**70}, strict=True)[0] == {"maximum": 2**70}


def test_values_of_all_schemas_are_bounded() -> None:
    """They are searched on the event loop, so that a turn with too many is refused."""
    many = {"enum": [1] * (MAX_SCHEMA_VALUES // 2)}
    tool = {"name": "a", "parameters": many}
    request = {"op": "infer", "session_id": "s", "prompt": "?", "tools": [tool]}
    enforceable_schemas(Infer.model_validate(request))
    for more in ({"tools": [tool, {**tool, "name": "b"}]}, {"json_schema": many}):
        with pytest.raises(InferenceCenterError, match="too many values"):
            enforceable_schemas(Infer.model_validate(request | more))
