"""Shared definitions of schemas are written where they are needed, and the grammar stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, Tool
from inferencecenter.sessions.output_parsing import grammar_builder
from inferencecenter.sessions.output_parsing.detection import as_text
from inferencecenter.sessions.output_parsing.output_spec import MAX_CALLS_CHARS, AnswerStart, calls_grammar
from inferencecenter.sessions.output_parsing.tagged_calls import SchemaDefinitions, TaggedCalls

if TYPE_CHECKING:
    from inferencecenter.protocol.values import Role

_NAMES: Final = ("a", "b/c", "d~e", "f g", "h")


def reference(name: str) -> dict[str, str]:
    """A reference to a definition by its pointer."""
    return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")}


def tool(*, n_parameters: int, part: dict[str, Any], n_defs: int) -> Tool:
    """A tool with many parameters of one schema and a chain of definitions."""
    defs: dict[str, Any] = {str(n): {"items": reference(str(n + 1)), "title": "x" * 90} for n in range(n_defs)}
    properties = {f"p{n}": part for n in range(n_parameters)}
    return Tool(name="many", parameters={"type": "object", "properties": properties, "$defs": defs | {str(n_defs): {}}})


def grammar_of(one: Tool) -> str:
    """The grammar of calls with tagged arguments."""
    return calls_grammar(TaggedCalls(), [one], start=AnswerStart(), required=False, parallel_calls=True).text


@given(st.dictionaries(st.sampled_from(_NAMES), st.lists(st.sampled_from(_NAMES))), st.lists(st.sampled_from(_NAMES)))
def test_part_includes_exactly_its_definitions(links: dict[str, list[str]], part: list[str]) -> None:
    """A part gets exactly the definitions reachable from it, cycles included."""
    defs = {name: {"anyOf": [reference(other) for other in others]} for name, others in links.items()}
    reached: set[str] = set()
    waiting = [*part]
    while waiting:
        name = waiting.pop()
        if name in links and name not in reached:
            reached.add(name)
            waiting += links[name]
    standing = SchemaDefinitions({"$defs": defs}).resolve({"items": [reference(name) for name in part]})
    assert standing.pop("$defs", {}) == {name: defs[name] for name in reached}
    assert standing == {"items": [reference(name) for name in part]}


@pytest.mark.parametrize("other", ["#", "#anchor", "else.json", "#/properties/p"])
def test_unresolved_reference_keeps_all_definitions(other: str) -> None:
    """A reference that is not a pointer to a definition keeps all of them."""
    schema = {"$defs": {"a": {"$id": "else.json"}}, "definitions": {"b": {"$anchor": "anchor"}}}
    assert SchemaDefinitions(schema).resolve({"$ref": other}) == {**schema, "$ref": other}


def test_definitions_that_no_parameter_refers_to_are_left_out() -> None:
    """The grammar grows with the referenced definitions, not with all of them per parameter."""
    unused = grammar_of(tool(n_parameters=500, part={"type": "integer"}, n_defs=3000))
    assert '"title"' not in unused
    used = grammar_of(tool(n_parameters=3, part=reference("2990"), n_defs=3000))
    assert used.count('"title"') == 3 * 10


def test_oversized_grammar_stops_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """Construction stops at about the size limit."""
    spelled_chars = 0
    literal = grammar_builder._literal

    def counted(value: Any) -> str:
        nonlocal spelled_chars
        text = literal(value)
        spelled_chars += len(text)
        return text

    monkeypatch.setattr(grammar_builder, "_literal", counted)
    huge = tool(n_parameters=5000, part=reference("0"), n_defs=1000)
    with pytest.raises(InferenceCenterError, match=str(MAX_CALLS_CHARS)) as caught:
        grammar_of(huge)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_GRAMMAR, "tools")
    assert spelled_chars < 2 * MAX_CALLS_CHARS


def test_grammar_of_an_enum_spells_its_key_once() -> None:
    """The grammar of an ``enum`` does not repeat the key for each value."""
    choice = Tool(
        name="paint",
        parameters={"properties": {"k" * 50_000: {"type": "string", "enum": [str(n) for n in range(999)]}}},
    )
    grammar = calls_grammar(TaggedCalls(), [choice], start=AnswerStart(), required=False, parallel_calls=True)
    assert len(grammar.text) < 150_000


def test_results_and_the_following_text_are_one_message() -> None:
    """As text, consecutive results and the following user message are one user message."""
    roles: tuple[Role, ...] = ("user", "tool", "tool", "user", "user", "tool", "assistant", "tool")
    ids = {"tool": "call_a"}
    messages = [ChatMessage(role=role, content=str(n), tool_call_id=ids.get(role)) for n, role in enumerate(roles)]
    text = as_text(messages, (), supports_system=True)

    def result(n: int) -> str:
        return f"<tool_response>\n{n}\n</tool_response>"

    assert [(message.role, message.content) for message in text] == [
        ("user", "0"),
        ("user", f"{result(1)}\n{result(2)}\n3"),
        ("user", "4"),
        ("user", result(5)),
        ("assistant", "6"),
        ("user", result(7)),
    ]
