"""Responses through the openai package, over HTTP and WebSockets, on the demo model."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai.resources.responses.responses import AsyncResponsesConnection
    from openai.types.responses import Response

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
WEATHER: Final[Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ENDLESS: Final[Any] = {"params": {"ignore_eos": True}, "temperature": 0}


class Person(BaseModel):
    """The class of a structured answer."""

    name: str = Field(max_length=20)
    age: int


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model."""
    with run_daemon(tmp_path_factory.mktemp("responses") / "state", demo_model_path) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    """The openai client, without retries."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as openai:
        yield openai


@pytest.fixture
def model(client: OpenAI) -> str:
    """The model's name."""
    return client.models.list().data[0].id


def async_client(daemon: Daemon) -> AsyncOpenAI:
    """Return the openai client that supports WebSockets."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0)


async def wait_ended(connection: AsyncResponsesConnection, *, stream_id: str | None = None) -> Any:
    """Return the last event of a response."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            event: Any = await connection.recv()
            if event.type in ENDS and (stream_id is None or event.stream_id == stream_id):
                return event


def wait_completed(client: OpenAI, name: str) -> Response:
    """Return a response once it has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while (response := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.02)
    return response


def test_response_is_created_retrieved_and_deleted(client: OpenAI, model: str) -> None:
    """The calls are those of the package's documentation."""
    response = client.responses.create(model=model, input="What is 2+2?", temperature=0, metadata={"a": "b"})
    assert (response.status, response.metadata) == ("completed", {"a": "b"})
    assert "4" in response.output_text
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    found = client.responses.retrieve(response.id)
    assert (found.output_text, found.usage) == (response.output_text, response.usage)
    (item,) = client.responses.input_items.list(response.id).data
    assert item.type == "message"
    client.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)


def test_chain_prefills_only_new_input(client: OpenAI, model: str) -> None:
    """The earlier conversation is already in the KV cache."""
    first = client.responses.create(model=model, input="My name is Ada.", temperature=0)
    second = client.responses.create(model=model, input="And?", previous_response_id=first.id, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_counted_input_tokens_are_those_of_the_response(client: OpenAI, model: str) -> None:
    """Instructions, tools and an earlier response are part of the prompt."""
    first = client.responses.create(model=model, input="My name is Ada.", temperature=0)
    fields: Any = {"model": model, "instructions": "Be brief.", "input": "And?", "previous_response_id": first.id}
    fields["tools"] = [WEATHER]
    counted = client.responses.input_tokens.count(**fields)
    answered = client.responses.create(**fields, temperature=0)
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens


def test_accumulated_stream_equals_the_final_response(client: OpenAI, model: str) -> None:
    """The package's own accumulation of events agrees with the final object."""
    with client.responses.stream(model=model, input="What is 2+2?", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    assert final.output_text == client.responses.retrieve(final.id).output_text


def test_structured_answer_is_parsed(client: OpenAI, model: str) -> None:
    """The answer follows the schema of a pydantic model."""
    parsed = client.responses.parse(
        model=model, input="Tell me of a person.", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)


def test_function_call_and_its_output(client: OpenAI, model: str) -> None:
    """The output continues the response; the arguments follow the function's schema."""
    first = client.responses.create(
        model=model, input="What is the weather in Paris?", tools=[WEATHER], tool_choice="required", temperature=0
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    answered: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(
        model=model, input=answered, previous_response_id=first.id, tools=[WEATHER], temperature=0
    )
    assert second.status == "completed"
    assert second.output_text


def test_background_response_is_polled_and_cancelled(client: OpenAI, model: str) -> None:
    """One completes, the other is cancelled."""
    response = client.responses.create(model=model, input="What is 2+2?", background=True, temperature=0)
    assert response.status == "queued"
    assert "4" in wait_completed(client, response.id).output_text
    endless = client.responses.create(model=model, input="Go on.", background=True, extra_body=ENDLESS)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert wait_completed(client, endless.id).status == "cancelled"


def test_unknown_previous_response_has_openai_code(client: OpenAI, model: str) -> None:
    """Programs resend the whole conversation on this code."""
    with pytest.raises(BadRequestError) as refusal:
        client.responses.create(model=model, input="x", previous_response_id="resp_" + "a" * 44)
    assert refusal.value.code == "previous_response_not_found"


async def test_streams_of_one_socket_are_independent(daemon: Daemon, model: str) -> None:
    """Each response ends in its stream, with the answer to its own input."""
    async with async_client(daemon) as client, client.responses.connect() as connection:
        for stream_id in ("a", "b", "c", "a"):
            await connection.response.create(
                model=model, input="What is 2+2?", stream_id=stream_id, temperature=0, store=False
            )
        stream_ids = []
        for _ in range(4):
            event = await wait_ended(connection)
            assert "4" in event.response.output_text
            stream_ids.append(event.stream_id)
        assert sorted(stream_ids) == ["a", "a", "b", "c"]


async def test_cancelled_response_is_continued_over_another_socket(daemon: Daemon, model: str) -> None:
    """The cancelled response has kept its text."""
    async with async_client(daemon) as client:
        async with client.responses.connect() as connection:
            create: Any = {"type": "response.create", "model": model, "input": "Go on.", **ENDLESS}
            await connection.send(create)
            async with asyncio.timeout(TIMEOUT_S):
                while (await connection.recv()).type != "response.output_text.delta":
                    pass
            cancel: Any = {"type": "response.cancel"}
            await connection.send(cancel)
            cancelled = (await wait_ended(connection)).response
        assert cancelled.status == "cancelled"
        assert cancelled.output_text
        async with client.responses.connect() as connection:
            await connection.response.create(
                model=model, input="What is 2+2?", previous_response_id=cancelled.id, temperature=0
            )
            assert (await wait_ended(connection)).type == "response.completed"


async def test_socket_error_has_its_code(daemon: Daemon, model: str) -> None:
    """The next request on the socket is answered."""
    async with async_client(daemon) as client, client.responses.connect() as connection:
        await connection.response.create(model=model, input="x", previous_response_id="resp_" + "a" * 44)
        error = await wait_ended(connection)
        assert (error.type, error.status, error.error.code) == ("error", 400, "previous_response_not_found")
        await connection.response.create(model=model, input="What is 2+2?", temperature=0)
        assert (await wait_ended(connection)).type == "response.completed"


async def test_response_survives_its_socket_and_a_restart(tmp_path: Path, demo_model_path: Path) -> None:
    """It completes without the socket, is retrievable after a restart, and can be continued."""
    state_dir = tmp_path / "state"
    with run_daemon(state_dir, demo_model_path) as daemon:
        async with async_client(daemon) as client, client.responses.connect() as connection:
            await connection.response.create(
                input="Tell me about yourself.", instructions="Be kind.", metadata={"a": "b"}, temperature=0
            )
            async with asyncio.timeout(TIMEOUT_S):
                created: Any = await connection.recv()
        name = created.response.id
    with run_daemon(state_dir, demo_model_path) as daemon:
        base_url = f"http://127.0.0.1:{daemon.port}/v1"
        with OpenAI(base_url=base_url, api_key=daemon.admin_token, max_retries=0) as other:
            found = wait_completed(other, name)
            assert (found.status, found.instructions, found.metadata) == ("completed", "Be kind.", {"a": "b"})
            assert found.output_text
            later = other.responses.create(
                input="And?", instructions="Be kind.", previous_response_id=name, temperature=0
            )
            assert later.status == "completed"
            assert later.usage is not None
            assert found.usage is not None
            assert later.usage.input_tokens > found.usage.input_tokens


def test_conversation_survives_a_restart(tmp_path: Path, demo_model_path: Path) -> None:
    """Its items and responses do, and the next response has its history; it is compacted and deleted."""
    state_dir = tmp_path / "state"
    with (
        run_daemon(state_dir, demo_model_path) as daemon,
        OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as openai,
    ):
        made = openai.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "I am Ada."}])
        first = openai.responses.create(input="Hi", conversation=made.id, instructions="Be kind.", temperature=0)
        items = [item.id for item in openai.conversations.items.list(made.id, order="asc")]
        assert len(items) == 3
    with (
        run_daemon(state_dir, demo_model_path) as daemon,
        OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as openai,
    ):
        assert openai.conversations.retrieve(made.id) == made
        assert [item.id for item in openai.conversations.items.list(made.id, order="asc")] == items
        second = openai.responses.create(input="And?", conversation=made.id, instructions="Be kind.", temperature=0)
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        model = openai.models.list().data[0].id
        compacted = openai.responses.compact(model=model, previous_response_id=second.id)
        following: Any = [
            *(item.to_dict(warnings=False) for item in compacted.output),
            {"role": "user", "content": "Hi"},
        ]
        assert openai.responses.create(input=following, store=False).status in ("completed", "incomplete")
        openai.conversations.delete(made.id)
        with pytest.raises(NotFoundError):
            openai.conversations.items.list(made.id)
