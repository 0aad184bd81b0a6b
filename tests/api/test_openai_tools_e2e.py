"""Tools, structured output and reasoning through the openai package, on the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import gguf
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

pytestmark = pytest.mark.slow

WEATHER: Final[Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Final[Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the local time",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: Final[Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED: Final[list[Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(BaseModel):
    """The class of a structured answer."""

    name: str = Field(max_length=20)
    age: int


class GetWeather(BaseModel):
    """Get the current weather."""

    city: str


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model, shared by the module's tests."""
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[OpenAI]:
    """The openai client with the administrator's token."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as connected:
        yield connected


def complete(client: OpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    """Answer messages greedily with the default model."""
    model = client.models.list().data[0].id
    answered: ChatCompletion = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_completion_tokens=200, **options
    )
    return answered


def calls(message: ChatCompletionMessage) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of a message's calls."""
    found = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        assert call.id
        found.append((call.function.name, json.loads(call.function.arguments)))
    return found


def test_tool_is_called(client: OpenAI) -> None:
    """The call is not in the text, and the finish reason is ``tool_calls``."""
    choice = complete(client, ASKED, tools=[WEATHER]).choices[0]

    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert calls(choice.message) == [("get_weather", {"city": "Paris"})]


def test_tool_call_streams(client: OpenAI) -> None:
    """Its id and name come once and first, its arguments in pieces, without text."""
    model = client.models.list().data[0].id
    pieces: list[str] = []
    ids, names, text, reasons = [], [], "", []
    stream: Iterable[ChatCompletionChunk] = client.chat.completions.create(
        model=model, messages=ASKED, temperature=0, max_completion_tokens=200, tools=[WEATHER], stream=True
    )
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            ids += [call.id] if call.id else []
            names += [call.function.name] if call.function.name else []
            assert names, "arguments come after the name"
            pieces.append(call.function.arguments or "")

    assert (len(ids), names, text, reasons) == (1, ["get_weather"], "", ["tool_calls"])
    assert len(pieces) > 2
    assert json.loads("".join(pieces)) == {"city": "Paris"}


def test_tool_result_is_answered(client: OpenAI) -> None:
    """The answer uses the result, and the question and call before it are not prefilled again."""
    first = complete(client, ASKED, tools=[WEATHER]).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"temperature": 21, "sky": "sunny"}'}
    messages = [*ASKED, first.model_dump(exclude_none=True), result]
    answered = complete(client, messages, tools=[WEATHER])

    assert answered.choices[0].finish_reason == "stop"
    assert "21" in (answered.choices[0].message.content or "")
    assert answered.usage is not None
    assert answered.usage.prompt_tokens_details is not None
    cached = answered.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > answered.usage.prompt_tokens / 2


def test_required_tool_choice_forces_a_call(client: OpenAI) -> None:
    """The arguments follow the tool's schema."""
    greeting = [{"role": "user", "content": "Hello!"}]
    choice = complete(client, greeting, tools=[ADD], tool_choice="required").choices[0]

    assert choice.finish_reason == "tool_calls"
    ((name, arguments),) = calls(choice.message)[:1]
    assert name == "add"
    assert {key: type(value) for key, value in arguments.items()} == {"a": int, "b": int}


def test_named_tool_is_called(client: OpenAI) -> None:
    """The model calls it although the question suggests another tool."""
    named = {"type": "function", "function": {"name": "get_time"}}
    choice = complete(client, ASKED, tools=[WEATHER, TIME], tool_choice=named).choices[0]

    assert {name for name, _ in calls(choice.message)} == {"get_time"}


def test_tool_choice_none_gives_text(client: OpenAI) -> None:
    """The model answers in text."""
    choice = complete(client, ASKED, tools=[WEATHER], tool_choice="none").choices[0]

    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content


def test_parallel_tool_calls_false_gives_one_call(client: OpenAI) -> None:
    """A required call does not change this."""
    choice = complete(client, ASKED, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False).choices[
        0
    ]

    assert len(calls(choice.message)) == 1
    assert choice.finish_reason == "tool_calls"


def test_results_of_parallel_calls_are_read(client: OpenAI) -> None:
    """The model answers a message with two calls and their results."""
    tool_calls = [
        {
            "id": f"call_{city}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for city in ("Paris", "Rome")
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{city}", "content": '{"temperature": 12, "sky": "cloudy"}'}
        for city in ("Paris", "Rome")
    ]
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": tool_calls}, *results]
    choice = complete(client, messages, tools=[WEATHER]).choices[0]

    assert choice.message.content
    assert choice.finish_reason == "stop"


def test_answer_is_parsed_into_a_pydantic_class(client: OpenAI) -> None:
    """The answer follows the schema that the package derives."""
    model = client.models.list().data[0].id
    answered = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Give me a JSON object with name Ada and age 36."}],
        response_format=Person,
        temperature=0,
        max_completion_tokens=200,
    )

    person = answered.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.name == "Ada"


def test_structured_answer_streams(client: OpenAI) -> None:
    """The package's helper parses the final answer."""
    model = client.models.list().data[0].id
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "Hello!"}],
        response_format=Person,
        temperature=0,
        max_completion_tokens=200,
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert len(deltas) > 2
    assert isinstance(final.choices[0].message.parsed, Person)


def test_arguments_are_parsed_into_a_pydantic_class(client: OpenAI) -> None:
    """The tool is derived from a class."""
    model = client.models.list().data[0].id
    answered = client.chat.completions.parse(
        model=model,
        messages=ASKED,
        tools=[pydantic_function_tool(GetWeather, name="get_weather")],
        temperature=0,
        max_completion_tokens=200,
    )

    (call,) = answered.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_tools_with_a_schema_give_a_call_or_the_schema(client: OpenAI) -> None:
    """Text that is no call keeps to the form, and a call is still possible."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    asked: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]

    said = complete(client, asked, tools=[WEATHER], response_format=form).choices[0].message
    called = complete(client, ASKED, tools=[WEATHER], tool_choice="required", response_format=form).choices[0].message

    assert said.tool_calls or json.loads(said.content or "")["city"] in ("Paris", "Rome")
    assert called.tool_calls


def test_schema_keywords_that_cannot_be_enforced_are_named(client: OpenAI) -> None:
    """They are left to the model unless the schema is strict."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "format": "uri-reference"}}}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}

    answer = complete(client, ASKED, tools=[tool])
    tool["function"]["strict"] = True
    with pytest.raises(BadRequestError) as refused:
        complete(client, ASKED, tools=[tool])

    named = "the schema of the tool get_weather"
    assert (answer.model_extra or {})["warnings"] == [
        f"{named} is enforced without format uri-reference at properties.city: this is left to the model"
    ]
    assert refused.value.param == "tools.0.parameters"
    assert f"{named} has format uri-reference at properties.city, which cannot be enforced" in refused.value.message


@pytest.fixture(scope="module")
def reasoning_client(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[OpenAI]:
    """A client of a daemon whose demo model has a template that opens a reasoning section."""
    folder = tmp_path_factory.mktemp("thinker")
    write_reasoning_model(demo_model_path, folder / "thinker.gguf")
    with (
        run_daemon(folder / "state", folder / "thinker.gguf") as running,
        OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=running.admin_token, max_retries=0) as connected,
    ):
        yield connected


def write_reasoning_model(source: Path, path: Path) -> None:
    """Write a model whose template opens a reasoning section unless ``enable_thinking`` is false."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == "tokenizer.chat_template":
            thinks = "'<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n'"
            opened = f"'<|im_start|>assistant\\n' + ({thinks})"
            value = value.replace("'<|im_start|>assistant\\n'", opened)
            assert opened in value
        writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_reasoning_is_separate_from_text(reasoning_client: OpenAI) -> None:
    """The template opens the section, and the demo model never closes it."""
    choice = complete(reasoning_client, [{"role": "user", "content": "Hello!"}]).choices[0]

    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"]
    assert not choice.message.content


def test_reasoning_streams(reasoning_client: OpenAI) -> None:
    """It arrives in deltas of its own."""
    model = reasoning_client.models.list().data[0].id
    reasoning, text = "", ""
    stream: Iterable[ChatCompletionChunk] = reasoning_client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello!"}], max_completion_tokens=50, stream=True
    )
    for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        text += delta.content or ""

    assert reasoning
    assert not text


def test_reasoning_effort_none_disables_reasoning(reasoning_client: OpenAI) -> None:
    """The template receives ``enable_thinking``."""
    choice = complete(reasoning_client, [{"role": "user", "content": "Hello!"}], reasoning_effort="none").choices[0]

    assert choice.message.content
    assert not (choice.message.model_extra or {}).get("reasoning_content")
