"""Models by their names, aliases and properties, and paths and credentials as clients of other servers have them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI

from inferencecenter.ipc.port import EngineState
from tests.api.http_client import post, request
from tests.api.responses.helpers import receive, send
from tests.api.streaming import CHAT, HI, send_answer
from tests.server.harness import ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from anthropic import AsyncAnthropic

    from tests.server.harness import Running


async def answered(server: Running, path: str, body: dict[str, Any], **options: Any) -> Any:
    """Return the response to a request whose turn is answered."""
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(send_answer(server, "Hello"))
        answer = await post(server, path, body, **options)
        assert answer.status == 200, answer.body
        await answering
    return answer.json


async def test_model_has_the_properties_that_routers_read(server: Running) -> None:
    """A model has its context length, capabilities, state and metadata, and is found by its alias."""
    server.engine.aliases = {"gpt-4o": "stub"}
    listed = await request(server, "GET", "/v1/models")
    (model,) = listed.json["data"]
    assert (model["id"], model["aliases"], model["state"]) == ("stub", ["gpt-4o"], "loaded")
    assert (model["context_length"], model["max_model_len"], model["meta"]["n_ctx_train"]) == (4096, 4096, 4096)
    assert model["capabilities"] == ["chat", "completion"]
    found = await request(server, "GET", "/v1/models/gpt-4o")
    assert found.json == model


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HI), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})]
)
async def test_alias_calls_its_model(server: Running, path: str, body: dict[str, Any]) -> None:
    """The answer names the model and has no warning."""
    server.engine.aliases = {"gpt-4o": "stub"}
    answer = await answered(server, path, {**body, "model": "gpt-4o"})
    assert answer["model"] == "stub"
    assert not answer.get("warnings")


@pytest.mark.parametrize("name", ["stub:latest", "gpt-4o:latest"])
async def test_tag_of_ollama_calls_the_same_model(server: Running, name: str) -> None:
    """A tag as in Ollama's names is ignored, also after an alias."""
    server.engine.aliases = {"gpt-4o": "stub"}
    answer = await answered(server, CHAT, {**HI, "model": name})
    assert (answer["model"], answer.get("warnings")) == ("stub", None)
    assert (await post(server, CHAT, {**HI, "model": "stub:7b"})).status == 404


async def test_unknown_model_is_answered_by_the_default_if_configured(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """A warning reports it; without the setting the status is 404."""
    async with serve(unknown_models="default") as server:
        answer = await answered(server, CHAT, {**HI, "model": "gpt-99"})
        async with server.connect(
            "/v1/responses", additional_headers={"Authorization": f"Bearer {server.token}"}
        ) as connection:
            await send(connection, model="gpt-99", input="Hi")
            await send_answer(server, "Hello")
            final = (await receive(connection, "response.completed"))["response"]
    warning = "model has no effect: there is no model 'gpt-99', and the default answers"
    assert (answer["model"], answer["warnings"]) == ("stub", [warning])
    assert (final["model"], final["warnings"]) == ("stub", [warning])


async def test_list_is_read_by_the_anthropic_package(server: Running, claude: AsyncAnthropic) -> None:
    """Its page ends the list, whatever number of models was asked for."""
    models = [model async for model in claude.models.list(limit=1)]
    assert [(model.id, model.display_name, model.type) for model in models] == [("stub", "stub", "model")]
    found = await claude.models.retrieve("stub")
    created = (await request(server, "GET", "/v1/models/stub")).json["created"]
    assert found.created_at.timestamp() == created


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_token_may_be_an_api_key_alone(server: Running, header: str) -> None:
    """Clients of other services send nothing else."""
    answer = await request(server, "GET", "/v1/models", token=None, headers={header: server.token})
    assert answer.status == 200
    refused = await request(server, "GET", "/v1/models", token=None, headers={header: "ic_no"})
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")


async def test_base_url_may_lack_the_version(server: Running) -> None:
    """Paths below ``/v1`` exist without it, for the socket too."""
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}", api_key=server.token, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["stub"]
        asked: Any = HI["messages"]
        answer, _ = await asyncio.gather(
            client.chat.completions.create(model="stub", messages=asked), send_answer(server, "Hello")
        )
    assert answer.choices[0].message.content == "Hello"
    async with server.connect(
        "/responses", additional_headers={"Authorization": f"Bearer {server.token}"}
    ) as connection:
        await send(connection, input="Hi")
        await send_answer(server, "Hello")
        assert (await receive(connection, "response.completed"))["response"]["status"] == "completed"


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_that_of_llama_server(server: Running, path: str) -> None:
    """It needs no token, and is 503 while the engine does not serve."""
    assert (await request(server, "GET", path, token=None)).json == {"status": "ok"}
    server.engine.become(ready(state=EngineState.STARTING))
    loading = await request(server, "GET", path, token=None)
    assert (loading.status, loading.json["error"]["message"]) == (503, "Loading model")
