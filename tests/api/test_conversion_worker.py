"""What takes long for a small request is done in the worker: conversations of many parts, and many tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

from inferencecenter.api.responses import request_schemas
from inferencecenter.core.fair_worker import FairWorker
from tests.api.http_client import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.harness import Running

_PARTS: Final = [{"type": "text", "text": "x"}] * 300
_CALLS: Final = [{"function": {"name": "f"}}] * 128
_OPENAI_CALLS: Final = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}] * 128
_SYSTEM: Final = [{"role": "system", "content": _PARTS}]


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the client of each job of a worker."""
    run, runs = FairWorker.run, list[str]()

    async def counted(worker: FairWorker, client_id: str, work: Callable[[], object]) -> object:
        runs.append(client_id)
        return await run(worker, client_id, work)

    monkeypatch.setattr(FairWorker, "run", counted)
    return runs


def off_the_event_loop(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion that fails on the event loop."""

    def converted(*args: Any) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return convert(*args)

    return converted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": _SYSTEM}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": _OPENAI_CALLS}] * 3}),
        ("/apply-template", {"messages": _SYSTEM}),
        ("/v1/messages", {"model": "stub", "max_tokens": 1, "messages": [{"role": "assistant", "content": _PARTS}]}),
        ("/api/chat", {"model": "stub", "messages": [{"role": "assistant", "tool_calls": _CALLS}] * 3}),
        ("/v1/responses", {"input": [{"role": "assistant", "content": ""}] * 300}),
    ],
    ids=["parts", "calls", "template", "blocks", "ollama's calls", "items"],
)
async def test_many_parts_are_converted_in_the_worker(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The conversation is refused, as its last message is not the user's, and the event loop did not read it.

    Items are converted with the body that they are in, and the messages of other dialects after it.
    """
    runs = counted_runs(monkeypatch)
    monkeypatch.setattr(request_schemas, "messages_of", off_the_event_loop(request_schemas.messages_of))
    assert (await post(server, path, body)).status == 400
    assert runs == ["ada"] * (1 if path == "/v1/responses" else 2)


@pytest.mark.parametrize(("n_texts", "runs"), [(100, []), (3000, ["ada"])])
async def test_many_values_are_parsed_in_the_worker(
    server: Running, monkeypatch: pytest.MonkeyPatch, n_texts: int, runs: list[str]
) -> None:
    """A body of a few KiB and one object can have thousands of lists, each of which is validated."""
    found = counted_runs(monkeypatch)
    body = {"model": "stub", "input": [[1]] * n_texts}
    assert (await post(server, "/v1/embeddings", body)).status == 400
    assert found == runs


@pytest.mark.parametrize(("n_chars", "runs"), [(100, []), (20_000, ["ada"])])
async def test_many_tokens_are_written_in_the_worker(
    server: Running, monkeypatch: pytest.MonkeyPatch, n_chars: int, runs: list[str]
) -> None:
    """A text of a million characters may have as many tokens, each an object of the response."""
    found = counted_runs(monkeypatch)
    answer = await post(server, "/tokenize", {"text": "x" * n_chars, "with_pieces": True})
    assert (answer.json["count"], found) == (n_chars, runs)
