"""Fuzzed tool schemas in every call format: a grammar of bounded size or an error."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, Tool
from inferencecenter.sessions.output_parsing.detection import as_text
from inferencecenter.sessions.output_parsing.output_spec import (
    MAX_CALLS_CHARS,
    AnswerStart,
    calls_grammar,
    enforceable_schemas,
)
from inferencecenter.sessions.output_parsing.template_values import tool_values
from tests.sessions.output_parsing.speaking import ANSWERS, CONTROL
from tests.sessions.output_parsing.speaking import model as speaking_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import Grammar
    from inferencecenter.sessions.output_parsing.call_format import ToolCallFormat

T = TypeVar("T")
EXPECTED: Final = (ErrorCode.INVALID_GRAMMAR, ErrorCode.INVALID_REQUEST)

keys = st.sampled_from(["a", "b", "a/b", "~", "%20", "", "$ref", "<[1]>", '"', "\n", "k" * 300])
places = st.sampled_from(["$defs", "definitions"])
references = st.builds("#/{}/{}".format, places, keys) | st.sampled_from(["#", "#/$defs", "#anchor", "x.json", ""])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | keys
leaves = st.one_of(
    st.builds(lambda reference: {"$ref": reference}, references),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["string", "integer", "object", "array", "odd"])),
    st.builds(lambda values: {"type": "string", "enum": values}, st.lists(scalars, max_size=4)),
    scalars,
)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda values: {"type": "object", "properties": values}, st.dictionaries(keys, inner, max_size=4)),
        st.builds(lambda values: {"anyOf": values}, st.lists(inner, max_size=3)),
        st.builds(lambda value: {"type": "array", "items": value}, inner),
        st.dictionaries(st.sampled_from(["not", "if", "then", "const", "$ref", "$id"]), inner, max_size=2),
        st.lists(inner, max_size=3),
    )


schemas = st.recursive(leaves, _deeper, max_leaves=12)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a tool's schema, parts of which may be very wide, very deep or very long."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": draw(st.dictionaries(keys, schemas, max_size=4) | scalars),
        "required": draw(st.lists(keys | scalars, max_size=3) | scalars),
        **draw(st.dictionaries(places, st.dictionaries(keys, schemas, max_size=4) | scalars, max_size=2)),
    }
    grown = draw(st.sampled_from(["", "", "wide", "deep", "long", "chain"]))
    part = draw(leaves)
    if grown == "wide":
        schema["properties"] = {f"p{number}": part for number in range(3000)}
    elif grown == "deep":
        for _ in range(draw(st.sampled_from([90, 150, 2000]))):
            part = {"items": part}
        schema["properties"] = {"a": part}
    elif grown == "long":
        schema["$defs"] = {"a": {"description": "x" * 400_000}}
        schema["properties"] = {f"p{number}": part for number in range(10)}
    elif grown == "chain":
        schema["$defs"] = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(3000)} | {"a": {"$ref": "#/$defs/0"}}
        schema["properties"] = {f"p{number}": {"$ref": f"#/$defs/{number}"} for number in range(3000)}
    return schema


def outcome(work: Callable[[], T]) -> T | InferenceCenterError:
    """Return the grammar, or the error."""
    try:
        return work()
    except InferenceCenterError as error:
        return error


def wide(n_parameters: int, n_chars: int) -> dict[str, Any]:
    """Return parameters that each refer to a long definition."""
    properties = {f"p{number}": {"$ref": "#/$defs/a"} for number in range(n_parameters)}
    return {"properties": properties, "$defs": {"a": {"description": "x" * n_chars}}}


@pytest.mark.slow
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(given_parameters=parameters(), parallel=st.booleans(), required=st.booleans())
@example(given_parameters=wide(1000, 300_000), parallel=True, required=False)
@example(
    given_parameters={"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    parallel=True,
    required=True,
)
@example(
    given_parameters={"properties": {"k" * 90_000: {"type": "string", "enum": ["v"] * 3000}}},
    parallel=True,
    required=True,
)
def test_any_schema_makes_a_grammar_of_bounded_size(
    given_parameters: dict[str, Any], parallel: bool, required: bool
) -> None:
    """The grammar stays below its limit, or the tools are refused by name."""
    tools = [Tool(name="f", parameters=given_parameters), Tool(name="g")]
    for name in ANSWERS:
        call_format = speaking_model(name).capabilities.call_format
        assert call_format is not None

        def grammar(call_format: ToolCallFormat = call_format) -> Grammar:
            schemas = enforceable_schemas(Infer(op="infer", session_id="s", prompt="Hi", tools=tools))
            start = AnswerStart(control=frozenset(CONTROL))
            return calls_grammar(call_format, schemas.tools, start=start, required=required, parallel_calls=parallel)

        made = outcome(grammar)
        if isinstance(made, InferenceCenterError):
            assert made.code in EXPECTED
            assert made.field in ("tools", "tools.0.parameters")
        else:
            assert len(made.text) <= MAX_CALLS_CHARS


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(given_parameters=parameters())
def test_any_schema_is_rendered_or_refused(given_parameters: dict[str, Any]) -> None:
    """A schema is rendered unchanged, or refused as nested too deeply."""
    tool = Tool(name="f", parameters=given_parameters)
    values = outcome(partial(tool_values, [tool], mark=lambda text: text))
    if isinstance(values, InferenceCenterError):
        assert (values.code, values.field) == (ErrorCode.INVALID_REQUEST, "tools")
        return
    (value,) = values
    assert repr(value["function"]["parameters"]) == repr(given_parameters)
    (message,) = as_text([ChatMessage(role="user", content="Hi")], [tool], supports_system=False)
    assert message.content.endswith("Hi")
