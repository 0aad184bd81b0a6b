"""Incremental parsing of answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.sessions.output_parsing.parts import ArgumentsDelta, Part, ReasoningDelta, TextDelta, ToolCallStart
from tests.sessions.output_parsing.speaking import ANSWERS, CONTROL, SECOND, called, read, speech

FIRST = called(0, "get_weather", '{"city": "Oslo", "days": 2}')
NEXT = called(1, "get_weather_clock", "{}")
HERMES_CALL = ANSWERS["HERMES"]


@pytest.mark.parametrize("name", ANSWERS)
def test_tool_call_is_parsed_in_every_format(name: str) -> None:
    """The parts are the same in every format."""
    assert read(speech(name), ANSWERS[name]) == FIRST


@pytest.mark.parametrize("name", SECOND)
def test_several_calls_are_counted(name: str) -> None:
    """Separators between calls are not text."""
    assert read(speech(name), ANSWERS[name] + SECOND[name]) == FIRST + NEXT


def test_calls_in_an_array_are_counted() -> None:
    """Mistral's array format has all calls in one array."""
    text = ANSWERS["MISTRAL3"][:-1] + ', {"name": "get_weather_clock", "arguments": {}}]'
    assert read(speech("MISTRAL3"), text) == FIRST + NEXT


EXAMPLES = [
    *((name, text) for name, text in ANSWERS.items() if name not in ("QWEN25", "HERMES", "GEMMA")),
    *((name, ANSWERS[name] + text) for name, text in SECOND.items() if name not in ("QWEN25", "HERMES", "GEMMA")),
    ("HERMES", f"Wait < I [do] <tool_calm> \n\n{HERMES_CALL} \n  Done.\n{HERMES_CALL}\n"),
    ("HERMES", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> and so on'),
    ("HERMES", '<tool_call> {"name": "get_weather", "arguments": "{\\"a\\": \\"\\u00e9\\ud83d\\ude00"}</tool_call>'),
    ("HERMES", '<tool_call>{"id": "x", "name": "get_weather", "arguments": {"a": [{"b": "}]\\"{"}]}, "z": [1]}'),
    ("QWEN3", f"<think>\nShall I <tool_call>?\n</think>\n\nYes.\n{HERMES_CALL}"),
    ("QWEN3", " <thinking is hard"),
    ("LLAMA31", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "a"}}'),
    ("LLAMA31", ' {"city": "Oslo"} is JSON'),
    ("FUNCTIONARY32", 'all\nLet me see. >>get_weather>>>get_weather\n{"city": "Oslo"}'),
    ("QWEN_CODER", ANSWERS["QWEN_CODER"].replace("Oslo", "a\n</b>\n\"'\n").replace("\n2\n", "\n[1, \n2]\n")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_chunking_does_not_change_the_parts(name: str, text: str) -> None:
    """Split at every position, and into single characters, an answer has the same parts."""
    spoken = speech(name)
    whole = read(spoken, text)
    assert read(spoken, *text) == whole
    for place in range(1, len(text)):
        assert read(spoken, text[:place], text[place:]) == whole


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "\n", " ", '{"name": "get_weather"', ', "arguments": ', "{", "}", '"', "\\",
         "[", "]", "<", "a", "\\u12", "<think>", "</think>", ":", ",", "null", HERMES_CALL]
    ),
    max_size=12,
)  # fmt: skip


@given(fragments=FRAGMENTS, data=st.data())
def test_chunking_does_not_change_malformed_text(fragments: list[str], data: st.DataObject) -> None:
    """Malformed answers parse the same however they are split, and never raise."""
    text = "".join(fragments)
    spoken = speech("QWEN3")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(spoken, *pieces) == read(spoken, text)


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    ">>>",
    '{"name": "',
    '", "arguments": {',
    "{",
    "}",
    "[",
    '"',
    "<",
    ">",
    "\n",
    " ",
    "x",
    "é",
]


@pytest.mark.parametrize("name", ["HERMES", "LLAMA31", "MISTRAL3", "MISTRAL11", "FUNCTIONARY31", "QWEN_CODER"])
@given(fragments=st.lists(st.sampled_from(MARKS), max_size=10))
@settings(max_examples=40)
def test_text_without_calls_is_unchanged(name: str, fragments: list[str]) -> None:
    """No plain text is lost or duplicated, whatever tags it contains."""
    text = "".join(fragments)
    assert read(speech(name), *text) == ([TextDelta(text)] if text else [])


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (["Hello ", "world"], ["Hello", " world"]),
        (["a <to", "ol_call", "x"], ["a", "", " <tool_callx"]),
        (["a\n\n", "b"], ["a", "\n\nb"]),
        (["<", "b"], ["", "<b"]),
    ],
)
def test_only_possible_markers_are_held_back(pieces: list[str], told: list[str]) -> None:
    """Text is emitted at once except for a possible tag and the white space before it."""
    reader = speech("HERMES").new_parser()
    assert [
        "".join(part.text for part in reader.feed(piece) if isinstance(part, TextDelta)) for piece in pieces
    ] == told


def test_arguments_come_as_they_are_written() -> None:
    """A call starts with its name, and its arguments are emitted as they arrive."""
    reader = speech("HERMES").new_parser()
    assert reader.feed('<tool_call>\n{"name": "get_weather", "argum') == ()
    assert reader.feed('ents": {"ci') == (ToolCallStart(0, "get_weather"), ArgumentsDelta(0, '{"ci'))
    assert reader.feed('ty": "O') == (ArgumentsDelta(0, 'ty": "O'),)
    assert reader.feed('slo"}}\n</tool_call>') == (ArgumentsDelta(0, 'slo"}'),)
    assert reader.finish() == ()


def test_malformed_call_is_text() -> None:
    """A call of an unknown tool, or invalid JSON, is text."""
    for text in (
        'Take <tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call> this',
        "<tool_call> is how I call",
        '<tool_call>{"arguments": {}, "name": "get_weather"}</tool_call>',
        '<tool_call>{"name": "get_weather" oops',
        '<tool_call>\n{"name": "get_wea',
    ):
        assert read(speech("HERMES"), *text) == [TextDelta(text)]


def test_truncated_call_keeps_its_published_part() -> None:
    """Truncated arguments are invalid JSON, which shows that the call is incomplete."""
    assert read(speech("HERMES"), '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os') == [
        ToolCallStart(0, "get_weather"),
        ArgumentsDelta(0, '{"city": "Os'),
    ]


def test_unknown_call_after_a_known_one() -> None:
    """The valid call stands, the other one is text."""
    text = ANSWERS["MISTRAL3"][:-1] + ', {"name": "rm", "arguments": {}}]'
    assert read(speech("MISTRAL3"), *text) == [*FIRST, TextDelta('{"name": "rm", "arguments": {}}]')]


def test_string_encoded_arguments_are_decoded() -> None:
    """Arguments written as a JSON string are unwrapped."""
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\ud83d\\ude00\\n\\ud800\\"}"}</tool_call>'
    assert read(speech("HERMES"), *text) == called(0, "get_weather", '{"city": "😀\n\ufffd"}')


def test_tool_call_without_arguments_has_an_empty_object() -> None:
    """A call with a name alone has an empty object."""
    assert read(speech("HERMES"), '<tool_call>{"name": "get_weather"}</tool_call>') == called(0, "get_weather", "{}")


def test_parameters_in_tags_become_an_object() -> None:
    """Text is quoted as JSON, other values are kept, and invalid JSON becomes text."""
    text = (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\n"A"\n\\\n</parameter>\n<parameter=days>\n[1, {}]'
        "\n</parameter>\n<parameter=x>\nnot JSON\n</parameter>\n</function>\n</tool_call>"
    )
    parts = read(speech("QWEN_CODER"), *text)
    assert parts[0] == ToolCallStart(0, "get_weather")
    assert isinstance(parts[1], ArgumentsDelta)
    assert json.loads(parts[1].text) == {"city": '"A"\n\\', "days": [1, {}], "x": "not JSON"}


def test_reasoning_is_separate_from_the_answer() -> None:
    """Text between the reasoning tags is reasoning, without the white space around it."""
    text = "<think>\nHm, 3 < 4.\n</think>\n\nFour."
    expected: list[Part] = [ReasoningDelta("Hm, 3 < 4."), TextDelta("Four.")]
    assert read(speech("QWEN3"), *text) == expected
    assert read(speech("QWEN3", tools=None), *text) == expected


def test_prompt_may_open_the_reasoning() -> None:
    """If the template opens the reasoning, the answer starts as reasoning."""
    spoken = speech("R1", tools=None)
    assert read(spoken, *"Hm.\n</think>\n\nYes </think>") == [ReasoningDelta("Hm."), TextDelta("Yes </think>")]
    assert read(spoken, "Never done ") == [ReasoningDelta("Never done")]


def test_reasoning_markers_in_the_middle_are_text() -> None:
    """Reasoning comes first or not at all."""
    text = "Use <think> tags</think>"
    assert read(speech("QWEN3", tools=None), *text) == [TextDelta(text)]


def test_channel_header_is_removed_from_text() -> None:
    """Functionary addresses its text, with and without tools."""
    assert read(speech("FUNCTIONARY32", tools=None), *"all\nHello >> there.") == [TextDelta("Hello >> there.")]
    text = 'all\nLet me see.\n>>>get_weather\n{"city": "Oslo", "days": 2}'
    assert read(speech("FUNCTIONARY32"), *text) == [TextDelta("Let me see."), *FIRST]


def test_forbidden_calls_are_text() -> None:
    """Without tools, or with the choice `none`, what looks like a call is text."""
    for wants in ({"tools": None}, {"tool_choice": "none"}):
        spoken = speech("HERMES", **wants)
        assert spoken.plain
        assert read(spoken, *HERMES_CALL) == [TextDelta(HERMES_CALL)]


def test_control_tokens_of_calls_are_rendered() -> None:
    """A turn with tools requests their text, others do not."""
    assert speech("MISTRAL3").markers == ("[TOOL_CALLS]",)
    assert speech("MISTRAL11").markers == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    assert speech("LLAMA31").markers == ("<|python_tag|>",)
    assert speech("MISTRAL3", tools=None).markers == ()
    thinks = (*CONTROL, "<think>", "</think>")
    assert speech("QWEN3", control=thinks, tools=None).markers == ("<think>", "</think>")


def test_parsing_time_is_linear() -> None:
    """White space, partial tags and endless call heads are each scanned a bounded number of times."""
    for text in (" " * 60_000, "<" * 60_000, "<tool_call>" * 5_000, "<tool_call>{" + " " * 60_000):
        assert read(speech("HERMES"), text) == [TextDelta(text)]
