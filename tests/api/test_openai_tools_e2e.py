"""Tools, structured answers and reasoning as the openai package asks for them, of a daemon on the demo model."""

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
    """What a structured answer is read as."""

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
    """The package's client, with the administrator's token."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as connected:
        yield connected


def ask(client: OpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    """Have messages answered greedily by the default model."""
    model = client.models.list().data[0].id
    answered: ChatCompletion = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_completion_tokens=200, **options
    )
    return answered


def calls(message: ChatCompletionMessage) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of a message's calls."""
    found = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        assert call.id
        found.append((call.function.name, json.loads(call.function.arguments)))
    return found


def test_a_tool_is_called(client: OpenAI) -> None:
    """The call is no text; the finish reason says that it is to be answered."""
    choice = ask(client, ASKED, tools=[WEATHER]).choices[0]

    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert calls(choice.message) == [("get_weather", {"city": "Paris"})]


def test_a_call_streams(client: OpenAI) -> None:
    """Its id and name come once and first, its arguments in pieces, and no text beside it."""
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


def test_the_result_of_a_call_is_answered(client: OpenAI) -> None:
    """The loop of an agent: question, call, result, answer; the history is not read again."""
    first = ask(client, ASKED, tools=[WEATHER]).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"temperature": 21, "sky": "sunny"}'}
    messages = [*ASKED, first.model_dump(exclude_none=True), result]
    answered = ask(client, messages, tools=[WEATHER])

    assert answered.choices[0].finish_reason == "stop"
    assert "21" in (answered.choices[0].message.content or "")
    assert answered.usage is not None
    assert answered.usage.prompt_tokens_details is not None
    cached = answered.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > answered.usage.prompt_tokens / 2


def test_a_tool_that_is_required_is_called(client: OpenAI) -> None:
    """Whatever was said; arguments follow the tool's schema."""
    greeting = [{"role": "user", "content": "Hello!"}]
    choice = ask(client, greeting, tools=[ADD], tool_choice="required").choices[0]

    assert choice.finish_reason == "tool_calls"
    ((name, arguments),) = calls(choice.message)[:1]
    assert name == "add"
    assert {key: type(value) for key, value in arguments.items()} == {"a": int, "b": int}


def test_the_tool_that_is_named_is_called(client: OpenAI) -> None:
    """Not the one that the question asks for."""
    named = {"type": "function", "function": {"name": "get_time"}}
    choice = ask(client, ASKED, tools=[WEATHER, TIME], tool_choice=named).choices[0]

    assert {name for name, _ in calls(choice.message)} == {"get_time"}


def test_no_tool_is_called_when_none_may_be(client: OpenAI) -> None:
    """What the model says is text then."""
    choice = ask(client, ASKED, tools=[WEATHER], tool_choice="none").choices[0]

    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content


def test_one_call_alone_when_parallel_ones_are_not_wanted(client: OpenAI) -> None:
    """Also where calls are required."""
    choice = ask(client, ASKED, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False).choices[0]

    assert len(calls(choice.message)) == 1
    assert choice.finish_reason == "tool_calls"


def test_results_of_parallel_calls_are_read(client: OpenAI) -> None:
    """Two calls of one message, each with its result."""
    asked = [
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
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": asked}, *results]
    choice = ask(client, messages, tools=[WEATHER]).choices[0]

    assert choice.message.content
    assert choice.finish_reason == "stop"


def test_an_answer_is_parsed_as_a_model(client: OpenAI) -> None:
    """What the package's schema of a pydantic class wants is what comes."""
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


def test_a_structured_answer_streams(client: OpenAI) -> None:
    """The package's helper parses it when it is whole."""
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


def test_arguments_are_parsed_as_a_model(client: OpenAI) -> None:
    """A tool made of a pydantic class."""
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


def test_tools_and_a_schema_at_once_are_refused(client: OpenAI) -> None:
    """The error names a field."""
    with pytest.raises(BadRequestError) as refused:
        ask(client, ASKED, tools=[WEATHER], response_format={"type": "json_object"})

    assert refused.value.type == "invalid_request_error"
    assert refused.value.param


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[OpenAI]:
    """A client of a daemon on the demo model with another template, which opens a section of reasoning."""
    folder = tmp_path_factory.mktemp("thinker")
    write_thinker(demo_model_path, folder / "thinker.gguf")
    with (
        run_daemon(folder / "state", folder / "thinker.gguf") as running,
        OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=running.admin_token, max_retries=0) as connected,
    ):
        yield connected


def write_thinker(source: Path, path: Path) -> None:
    """Write a model with a template that has it think unless ``enable_thinking`` says no."""
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


def test_reasoning_is_no_text(thinker: OpenAI) -> None:
    """What comes in a section that the template has opened, and that the demo model never ends."""
    choice = ask(thinker, [{"role": "user", "content": "Hello!"}]).choices[0]

    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"]
    assert not choice.message.content


def test_reasoning_streams(thinker: OpenAI) -> None:
    """As deltas of its own."""
    model = thinker.models.list().data[0].id
    thought, said = "", ""
    stream: Iterable[ChatCompletionChunk] = thinker.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello!"}], max_completion_tokens=50, stream=True
    )
    for chunk in stream:
        delta = chunk.choices[0].delta
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        said += delta.content or ""

    assert thought
    assert not said


def test_no_effort_is_no_reasoning(thinker: OpenAI) -> None:
    """The template is told."""
    choice = ask(thinker, [{"role": "user", "content": "Hello!"}], reasoning_effort="none").choices[0]

    assert choice.message.content
    assert not (choice.message.model_extra or {}).get("reasoning_content")
