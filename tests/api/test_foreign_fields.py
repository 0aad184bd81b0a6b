"""Fields of foreign dialects that have no effect are named in warnings; strict dialects refuse them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from inferencecenter.api.foreign_fields import UNKNOWN, FieldReport
from inferencecenter.api.openai.chat_schemas import CHAT_FIELDS
from inferencecenter.api.operations import FIELD_TABLES
from inferencecenter.protocol.params import parse_params
from tests.api.http_client import post, request
from tests.api.responses.helpers import create_response, frames_of, receive, send, socket
from tests.api.streaming import CHAT, HI, next_turn, send_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from inferencecenter.api.foreign_fields import FieldTable
    from tests.server.harness import Running

ASKED: Any = [{"role": "user", "content": "Hi"}]


async def answered(server: Running, body: dict[str, Any], path: str = CHAT) -> Any:
    """Return the response to a request whose turn is answered."""
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(send_answer(server, "Hello"))
        answer = await post(server, path, body)
        assert answer.status == 200, answer.body
        await answering
    return answer


async def test_unknown_field_is_named_in_warnings(server: Running) -> None:
    """The answer and its header name the field, with a similar one that exists."""
    answer = await answered(server, {**HI, "temprature": 1, "max_completion": None})
    warning = "temprature has no effect: the field is unknown, did you mean temperature?"
    assert answer.json["warnings"] == [warning]
    assert answer.headers["x-warning"] == warning


async def test_stream_names_fields_in_its_header_and_last_chunk(server: Running) -> None:
    """The header is sent before the first chunk."""
    answer = await answered(server, {**HI, "stream": True, "store": True})
    warning = "store has no effect: chat completions are not stored, see /v1/responses"
    assert answer.headers["x-warning"] == warning
    assert f'"warnings":["{warning}"]'.encode() in answer.body


async def test_warnings_of_the_request_and_its_turn_are_merged(server: Running) -> None:
    """Each is named once."""
    answer = await answered(server, {**HI, "temperature": 0, "top_k": 5, "verbosity": "low"})
    assert answer.json["warnings"] == [
        "verbosity has no effect: the model decides on the length of its answer",
        "top_k has no effect: temperature 0 always takes the most probable token.",
    ]


async def test_request_without_such_fields_has_no_warnings(server: Running) -> None:
    """Neither the answer nor its header has one."""
    answer = await answered(server, {**HI, "store": False, "cache_prompt": True, "top_k": 5})
    assert "warnings" not in answer.json
    assert "x-warning" not in answer.headers


async def test_openai_package_sends_fields_without_effect(server: Running, ada: AsyncOpenAI) -> None:
    """Fields of the current API are accepted by their names."""
    options: dict[str, Any] = {
        "store": True,
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "name": "ada", "content": [{"type": "text", "text": "Hi"}]}],
    }
    answer, _ = await asyncio.gather(ada.chat.completions.create(model="stub", **options), send_answer(server, "Hello"))
    assert answer.choices[0].message.content == "Hello"
    assert answer.model_extra is not None
    fields = [warning.split(" has no effect: ")[0] for warning in answer.model_extra["warnings"]]
    assert sorted(fields) == [
        "messages[].name",
        "prediction",
        "store",
        "stream_options",
        "verbosity",
        "web_search_options",
    ]


async def test_tool_of_another_kind_is_not_offered(server: Running) -> None:
    """The warning names its position and type, and the functions beside it are offered."""
    function = {"type": "function", "function": {"name": "add"}}
    answer = await answered(server, {**HI, "tools": [{"type": "web_search"}, function]})
    assert answer.json["warnings"] == [
        "tools.0 (web_search) has no effect: the daemon cannot run tools of this type, so the model is not offered it"
    ]


SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
LEFT = "is enforced without uniqueItems at properties.a: this is left to the model"


@pytest.mark.parametrize(
    ("path", "body", "warning"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}, "the tool f"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema"),
        (CHAT, {"guided_json": SCHEMA}, "json_schema"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}, "the tool f"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            "json_schema",
        ),
        ("/v1/completions", {"prompt": "x", "json_schema": SCHEMA}, "json_schema"),
    ],
)
async def test_keyword_that_cannot_be_enforced_is_named(
    server: Running, path: str, body: dict[str, Any], warning: str
) -> None:
    """One keyword of a schema refuses no request."""
    asked = {CHAT: HI, "/v1/responses": {"input": "Hi"}}.get(path, {})
    answer = await answered(server, {**asked, **body}, path)
    (found,) = answer.json["warnings"]
    assert found.endswith(f"{warning} {LEFT}")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]},
            "tools.0.parameters",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            "response_format",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]},
            "tools.0.parameters",
        ),
        ("/generate", {"json_schema": SCHEMA}, "json_schema"),
    ],
)
async def test_strict_schema_is_refused_for_its_keyword(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    """So is one of the daemon's own API; the message names the keyword and its path."""
    asked = {CHAT: HI, "/v1/responses": {"input": "Hi"}, "/generate": {"prompt": "x"}}[path]
    answer = await post(server, path, {**asked, **body})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "has uniqueItems at properties.a, which cannot be enforced" in answer.error["message"]


async def test_tools_and_a_form_reach_the_engine_together(server: Running, ada: AsyncOpenAI) -> None:
    """The grammar has the calls and the form."""
    grammars: list[Any] = []

    async def answer() -> None:
        turn = await next_turn(server)
        grammars.append(server.engine.submission(turn).grammar)
        server.engine.begin(turn)
        server.engine.finish(turn)

    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    form: Any = {"type": "json_object"}
    await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, tools=tools, response_format=form), answer()
    )
    assert "calls: " in grammars[0].text
    assert "answer: %json" in grammars[0].text


async def test_choice_of_thinking_that_a_template_lacks_has_no_effect(server: Running) -> None:
    """The daemon's own API refuses it."""
    answer = await answered(server, {**HI, "reasoning_effort": "low"})
    warning = "thinking has no effect: the model's chat template does not support the choice of thinking"
    assert answer.json["warnings"] == [warning]
    refusal = await post(server, "/generate", {"prompt": "x", "thinking": True})
    assert (refusal.status, refusal.error["param"]) == (400, "thinking")


async def test_legacy_functions_are_called_as_function_call(server: Running, ada: AsyncOpenAI) -> None:
    """Clients from before ``tools`` get the call in the form they know."""
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, functions=[{"name": "add"}]),
        send_answer(server, called),
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("add", '{"a": 1}')


async def test_fields_are_counted_by_dialect(server: Running) -> None:
    """The metric's labels are the table's fields; all others are one label."""
    for name in ("nothing", "else"):
        await answered(server, {**HI, name: 1, "store": True})
    page = (await request(server, "GET", "/metrics", token=None)).body.decode()
    for field in (UNKNOWN, "store"):
        assert f'inferencecenter_foreign_fields_total{{dialect="chat",field="{field}"}} 2.0' in page


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nothing": 1}, "nothing"),
        ({"store": True}, "store"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "x", "nothing": 1}]}, "messages.0.nothing"),
        ({"tools": [{"type": "web_search"}]}, "tools[]"),
    ],
)
async def test_strict_dialects_refuse_fields_without_effect(
    serve: Callable[..., AbstractAsyncContextManager[Running]], body: dict[str, Any], field: str
) -> None:
    """``server.strict_dialects`` serves to test clients."""
    async with serve(strict_dialects=True) as server:
        answer = await post(server, CHAT, {**HI, **body})
    assert (answer.status, answer.error["param"]) == (400, field)


async def test_own_protocol_stays_strict(server: Running) -> None:
    """Unknown fields of the daemon's own API are refused."""
    answer = await post(server, "/generate", {"prompt": "x", "nothing": 1})
    assert (answer.status, answer.error["param"]) == (400, "nothing")


async def test_refused_field_names_its_reason(ada: AsyncOpenAI) -> None:
    """Fields whose effect the caller relies on are refused."""
    with pytest.raises(openai.BadRequestError, match="there is no beam search") as caught:
        await ada.completions.create(model="stub", prompt="x", extra_body={"use_beam_search": True})
    assert caught.value.param == "use_beam_search"


async def test_header_has_no_control_characters(server: Running) -> None:
    """A field's name cannot add a header, and is shortened."""
    answer = await answered(server, {**HI, "a\r\nset-cookie: b" + "x" * 200: 1})
    assert answer.headers["x-warning"].startswith("a??set-cookie: b")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("name", ["", " ", "x" * 2000 + " "])
async def test_any_name_is_a_valid_header(server: Running, name: str) -> None:
    """The value of a header neither begins nor ends with a space, and the answer arrives."""
    answer = await answered(server, {**HI, name: 1})
    assert "has no effect" in answer.headers["x-warning"]


CODEX: dict[str, Any] = {
    "model": "stub",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "x"},
}
CODEX_FIELDS = [
    "tools[].format",
    "input[].encrypted_content",
    "input.3 (web_search_call)",
    "tools.2 (web_search)",
    "include.0 (reasoning.encrypted_content)",
    "text.verbosity",
    "client_metadata",
    "thinking",
]


async def test_requests_of_codex_are_answered(server: Running) -> None:
    """Its fields without effect are named, and only tools that it runs itself are offered to the model."""
    answer = await answered(server, CODEX, "/v1/responses")
    final = frames_of(answer)[-1]["response"]
    assert final["status"] == "completed"
    assert sorted(warning.split(" has no effect: ")[0] for warning in final["warnings"]) == sorted(CODEX_FIELDS)
    assert [tool["name"] for tool in final["tools"]] == ["shell", "mcp", "apply_patch"]
    assert final["text"]["verbosity"] == "low"
    assert "client_metadata has no effect" in answer.headers["x-warning"]


async def test_requests_of_codex_are_answered_over_a_websocket(server: Running) -> None:
    """The response has the same warnings, and the metric counts them."""
    async with socket(server) as connection:
        await send(connection, **CODEX)
        await send_answer(server, "Hello")
        final = (await receive(connection, "response.completed"))["response"]
    assert sorted(warning.split(" has no effect: ")[0] for warning in final["warnings"]) == sorted(CODEX_FIELDS)
    page = (await request(server, "GET", "/metrics", token=None)).body.decode()
    assert 'inferencecenter_foreign_fields_total{dialect="responses",field="client_metadata"} 1.0' in page


async def test_response_that_is_retrieved_has_its_warnings(server: Running) -> None:
    """They are stored with the response; a query without effect is named in the header only."""
    made = await create_response(server, {"input": "Hi", "client_metadata": {}})
    found = await request(server, "GET", f"/v1/responses/{made.json['id']}?starting_after=3")
    assert found.json["warnings"] == made.json["warnings"] == ["client_metadata has no effect: it is about the client"]
    assert found.headers["x-warning"].startswith("starting_after has no effect")


async def test_sampling_fields_of_responses_reach_the_turn(server: Running, ada: AsyncOpenAI) -> None:
    """Plain fields are parameters, as in chat completions."""
    seen: list[Any] = []

    async def answer() -> None:
        turn = await next_turn(server)
        seen.append(parse_params(json.loads(server.engine.submission(turn).params_json)))
        server.engine.begin(turn)
        server.engine.finish(turn)

    extra = {"top_k": 7, "repetition_penalty": 1.5}
    await asyncio.gather(ada.responses.create(input="Hi", extra_body=extra), answer())
    assert (seen[0].top_k, seen[0].repeat_penalty) == (7, 1.5)


@pytest.mark.parametrize("field", ["conversation", "prompt"])
async def test_state_of_others_is_refused(server: Running, field: str) -> None:
    """The caller relies on it."""
    answer = await post(server, "/v1/responses", {"input": "Hi", field: "x"})
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(("name", "shown"), [("", '""'), (" ", ""), (" x ", "x ")])
async def test_header_has_no_white_space_around_it(server: Running, name: str, shown: str) -> None:
    """A field's name may be blank; a header's value may not begin so."""
    answer = await answered(server, {**HI, name: 1})
    assert answer.headers["x-warning"].startswith(f"{shown} has no effect".strip())


@pytest.mark.parametrize("table", FIELD_TABLES, ids=str)
def test_rules_belong_to_objects_of_the_dialect(table: FieldTable) -> None:
    """No rule is out of reach: the object that contains its field is described by a model."""
    prefixes = {table.prefix(model) for model in table._prefixes}
    for rule in table.rules:
        assert rule.field.removesuffix("[]").rpartition(".")[0] in {prefix.removesuffix(".") for prefix in prefixes}


def test_number_of_warnings_is_bounded() -> None:
    """Thousands of unknown fields are few warnings."""
    report = FieldReport(CHAT_FIELDS, strict=False)
    (model,) = CHAT_FIELDS.models
    assert report.select(model, {f"x{index}": 1 for index in range(5000)}) == {}
    assert len(report.warnings) < 20
    assert report.warnings[-1] == "Further fields have no effect"
