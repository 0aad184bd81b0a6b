"""The plain addresses on the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.asking import Heard, exchange
from tests.e2e.harness import Daemon, run_daemon, talk

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


def ask(daemon: Daemon, path: str, **body: Any) -> Heard:
    """Send a body."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        f"Authorization: Bearer {daemon.admin_token}\r\n\r\n"
    )
    return asyncio.run(exchange(daemon.port, head.encode() + data))


async def said_over_a_socket(daemon: Daemon, **params: Any) -> str:
    """Return what the daemon answers in its own protocol."""
    async with talk(daemon) as client:
        text, _ = await client.turn(await client.create(), QUESTION, **params)
        return text


def test_the_answer_is_the_sockets(daemon: Daemon) -> None:
    """Whole, in pieces and over a socket the same seed gives the same text."""
    chosen = {"seed": 7, "temperature": 0.7, "max_tokens": 40}
    whole = ask(daemon, "/generate", prompt=QUESTION, **chosen).json
    parts = ask(daemon, "/generate", prompt=QUESTION, stream=True, **chosen).events
    text = asyncio.run(said_over_a_socket(daemon, **chosen))
    assert text
    assert whole["text"] == text
    assert "".join(part.get("text", "") for part in parts) == text
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_answer_has_the_form_that_was_asked_for(daemon: Daemon) -> None:
    """A schema and an expression hold it."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    found = ask(daemon, "/generate", prompt=QUESTION, json_schema=schema, temperature=0).json
    assert isinstance(json.loads(found["text"])["city"], str)
    digits = ask(daemon, "/generate", prompt=QUESTION, regex="[0-9]{3}", temperature=0).json
    assert re.fullmatch("[0-9]{3}", digits["text"])


def test_tokens_there_and_back(daemon: Daemon) -> None:
    """What a text is made of spells it again, with what no vocabulary has in one piece."""
    text = "Hello wörld, 世界 🎉\n  def f(x):\t<|im_end|>"
    plain = ask(daemon, "/tokenize", text=text, pieces=True).json
    special = ask(daemon, "/tokenize", text=text, special=True).json
    assert ask(daemon, "/detokenize", tokens=plain["tokens"]).json["text"] == text
    assert ask(daemon, "/detokenize", tokens=special["tokens"]).json["text"] == text
    assert plain["count"] == len(plain["tokens"]) == len(plain["pieces"])
    assert special["count"] < plain["count"]


def test_a_number_that_is_no_token_is_refused(daemon: Daemon) -> None:
    """It is named by itself and by its place."""
    error = ask(daemon, "/detokenize", tokens=[1, 2, 2_000_000_000]).error
    assert (error["param"], "2000000000" in error["message"]) == ("tokens.2", True)
