"""Responses as the openai package asks for them, over HTTP and over WebSockets, of a daemon on the demo model."""

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

PATIENCE_S = 60.0
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
    """What a structured answer is read as."""

    name: str = Field(max_length=20)
    age: int


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model."""
    with run_daemon(tmp_path_factory.mktemp("responses") / "state", demo_model_path) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    """The openai package's client; nothing is asked twice."""
    with OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as made:
        yield made


@pytest.fixture
def model(client: OpenAI) -> str:
    """The model's name."""
    return client.models.list().data[0].id


def asking(daemon: Daemon) -> AsyncOpenAI:
    """Return the client that has sockets."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0)


async def ended(connection: AsyncResponsesConnection, *, lane: str | None = None) -> Any:
    """Return the last event of a response."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event: Any = await connection.recv()
            if event.type in ENDS and (lane is None or event.stream_id == lane):
                return event


def settled(client: OpenAI, name: str) -> Response:
    """Return a response when it goes on no more."""
    deadline = time.monotonic() + PATIENCE_S
    while (response := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.02)
    return response


def test_a_response_is_made_found_and_forgotten(client: OpenAI, model: str) -> None:
    """As the package's documentation does it."""
    made = client.responses.create(model=model, input="What is 2+2?", temperature=0, metadata={"a": "b"})
    assert (made.status, made.metadata) == ("completed", {"a": "b"})
    assert "4" in made.output_text
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    found = client.responses.retrieve(made.id)
    assert (found.output_text, found.usage) == (made.output_text, made.usage)
    (item,) = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    client.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_a_chain_remembers_and_reads_only_what_is_new(client: OpenAI, model: str) -> None:
    """What was said before is in the KV already."""
    first = client.responses.create(model=model, input="My name is Ada.", temperature=0)
    second = client.responses.create(model=model, input="And?", previous_response_id=first.id, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_the_stream_puts_together_the_same_response(client: OpenAI, model: str) -> None:
    """The package's own accumulation of events agrees with the object at the end."""
    with client.responses.stream(model=model, input="What is 2+2?", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    assert final.output_text == client.responses.retrieve(final.id).output_text


def test_an_answer_is_parsed(client: OpenAI, model: str) -> None:
    """Held to the schema of a pydantic model."""
    parsed = client.responses.parse(
        model=model, input="Tell me of a person.", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)


def test_a_function_is_asked_for_and_answered(client: OpenAI, model: str) -> None:
    """What it answered goes on from the response; the arguments are those that its schema accepts."""
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


def test_one_in_the_background_is_polled_and_cancelled(client: OpenAI, model: str) -> None:
    """One ends by itself, the other when it is told to."""
    made = client.responses.create(model=model, input="What is 2+2?", background=True, temperature=0)
    assert made.status == "queued"
    assert "4" in settled(client, made.id).output_text
    endless = client.responses.create(model=model, input="Go on.", background=True, extra_body=ENDLESS)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert settled(client, endless.id).status == "cancelled"


def test_what_is_not_there_to_go_on_from_is_told(client: OpenAI, model: str) -> None:
    """With the code that programs send everything again for."""
    with pytest.raises(BadRequestError) as refusal:
        client.responses.create(model=model, input="x", previous_response_id="resp_" + "a" * 44)
    assert refusal.value.code == "previous_response_not_found"


async def test_lanes_of_one_socket(daemon: Daemon, model: str) -> None:
    """Each response ends in its lane, with what was asked there."""
    async with asking(daemon) as client, client.responses.connect() as connection:
        for lane in ("a", "b", "c", "a"):
            await connection.response.create(
                model=model, input="What is 2+2?", stream_id=lane, temperature=0, store=False
            )
        lanes = []
        for _ in range(4):
            event = await ended(connection)
            assert "4" in event.response.output_text
            lanes.append(event.stream_id)
        assert sorted(lanes) == ["a", "a", "b", "c"]


async def test_a_socket_cancels_and_another_goes_on(daemon: Daemon, model: str) -> None:
    """What was cancelled has said something, which is gone on from over another socket."""
    async with asking(daemon) as client:
        async with client.responses.connect() as connection:
            create: Any = {"type": "response.create", "model": model, "input": "Go on.", **ENDLESS}
            await connection.send(create)
            async with asyncio.timeout(PATIENCE_S):
                while (await connection.recv()).type != "response.output_text.delta":
                    pass
            cancel: Any = {"type": "response.cancel"}
            await connection.send(cancel)
            cancelled = (await ended(connection)).response
        assert cancelled.status == "cancelled"
        assert cancelled.output_text
        async with client.responses.connect() as connection:
            await connection.response.create(
                model=model, input="What is 2+2?", previous_response_id=cancelled.id, temperature=0
            )
            assert (await ended(connection)).type == "response.completed"


async def test_what_is_wrong_on_a_socket_has_its_code(daemon: Daemon, model: str) -> None:
    """And the next request on it is answered."""
    async with asking(daemon) as client, client.responses.connect() as connection:
        await connection.response.create(model=model, input="x", previous_response_id="resp_" + "a" * 44)
        error = await ended(connection)
        assert (error.type, error.status, error.error.code) == ("error", 400, "previous_response_not_found")
        await connection.response.create(model=model, input="What is 2+2?", temperature=0)
        assert (await ended(connection)).type == "response.completed"


async def test_a_response_outlives_its_socket_and_its_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """It goes on without the socket, is there after a restart, and is gone on from then."""
    state_dir = tmp_path / "state"
    with run_daemon(state_dir, demo_model_path) as daemon:
        async with asking(daemon) as client, client.responses.connect() as connection:
            await connection.response.create(
                input="Tell me about yourself.", instructions="Be kind.", metadata={"a": "b"}, temperature=0
            )
            async with asyncio.timeout(PATIENCE_S):
                created: Any = await connection.recv()
        name = created.response.id
    with run_daemon(state_dir, demo_model_path) as daemon:
        base_url = f"http://127.0.0.1:{daemon.port}/v1"
        with OpenAI(base_url=base_url, api_key=daemon.admin_token, max_retries=0) as other:
            found = settled(other, name)
            assert (found.status, found.instructions, found.metadata) == ("completed", "Be kind.", {"a": "b"})
            assert found.output_text
            later = other.responses.create(
                input="And?", instructions="Be kind.", previous_response_id=name, temperature=0
            )
            assert later.status == "completed"
            assert later.usage is not None
            assert found.usage is not None
            assert later.usage.input_tokens > found.usage.input_tokens
