"""The plain HTTP endpoints on the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.http_client import HttpResponse, exchange
from tests.e2e.harness import Daemon, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model."""
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path) as running:
        yield running


def post(daemon: Daemon, path: str, **body: Any) -> HttpResponse:
    """Send a request and return the response."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        f"Authorization: Bearer {daemon.admin_token}\r\n\r\n"
    )
    return asyncio.run(exchange(daemon.port, head.encode() + data))


async def answer_over_websocket(daemon: Daemon, **params: Any) -> str:
    """Return the daemon's answer to the same prompt over a WebSocket."""
    async with connect_client(daemon) as client:
        text, _ = await client.turn(await client.create(), QUESTION, **params)
        return text


def test_answer_equals_the_websocket_answer(daemon: Daemon) -> None:
    """The same seed gives the same text as a document, as a stream and over a WebSocket."""
    chosen = {"seed": 7, "temperature": 0.7, "max_tokens": 40}
    whole = post(daemon, "/generate", prompt=QUESTION, **chosen).json
    parts = post(daemon, "/generate", prompt=QUESTION, stream=True, **chosen).events
    text = asyncio.run(answer_over_websocket(daemon, **chosen))
    assert text
    assert whole["text"] == text
    assert "".join(part.get("text", "") for part in parts) == text
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_answer_follows_schema_and_regex(daemon: Daemon) -> None:
    """A JSON schema and a regular expression constrain the answer."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    found = post(daemon, "/generate", prompt=QUESTION, json_schema=schema, temperature=0).json
    assert isinstance(json.loads(found["text"])["city"], str)
    digits = post(daemon, "/generate", prompt=QUESTION, regex="[0-9]{3}", temperature=0).json
    assert re.fullmatch("[0-9]{3}", digits["text"])


def test_tokenize_and_detokenize_are_inverse(daemon: Daemon) -> None:
    """The tokens of any text decode to the same text."""
    text = "Hello wörld, 世界 🎉\n  def f(x):\t<|im_end|>"
    plain = post(daemon, "/tokenize", text=text, pieces=True).json
    special = post(daemon, "/tokenize", text=text, special=True).json
    assert post(daemon, "/detokenize", tokens=plain["tokens"]).json["text"] == text
    assert post(daemon, "/detokenize", tokens=special["tokens"]).json["text"] == text
    assert plain["count"] == len(plain["tokens"]) == len(plain["pieces"])
    assert special["count"] < plain["count"]


def test_invalid_token_id_is_refused(daemon: Daemon) -> None:
    """The error names the id and its index."""
    error = post(daemon, "/detokenize", tokens=[1, 2, 2_000_000_000]).error
    assert (error["param"], "2000000000" in error["message"]) == ("tokens.2", True)
