"""What a program pays for before it uses the client: its imports, and the validators of messages."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.client.peer import HELLO

HEAVY = (
    "websockets",
    "http.client",
    "urllib.request",
    "email",
    "importlib.metadata",
    "orjson",
    "difflib",
    "json",
    "structlog",
    "rich",
    "typer",
    "msgspec",
    "regex",
    "inferencecenter.client.blocking",
    "inferencecenter.client.transport",
    "inferencecenter.protocol.codec",
    "inferencecenter.protocol.params",
    "inferencecenter.config",
    "inferencecenter.telemetry",
)
_INCOMPLETE = """
from inferencecenter.protocol.base import Event, Request
from inferencecenter.protocol.values import Value

def incomplete(*bases):
    for base in bases:
        for kind in base.__subclasses__():
            if not kind.__pydantic_complete__:
                yield kind.__name__
            yield from incomplete(kind)
"""


def printed(code: str) -> Any:
    """What a new interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_import_is_lightweight() -> None:
    """The socket library, and what only the daemon or a failure needs, are loaded when they are used."""
    code = (
        "import sys; import inferencecenter.client; names = sorted(sys.modules); import json; print(json.dumps(names))"
    )
    assert not set(HEAVY) & set(printed(code))


def test_frame_builds_the_validator_of_its_event_only() -> None:
    """The first frame does not wait for the validators of all events."""
    code = f"""{_INCOMPLETE}
import json
from inferencecenter.client.transport import parse

assert parse({json.dumps(HELLO)!r}).op == "hello"
print(json.dumps(list(incomplete(Event))))
"""
    left = printed(code)
    assert "Hello" not in left
    assert {"Token", "SessionResumed", "Status"} <= set(left)


def test_daemon_builds_every_validator_before_it_serves() -> None:
    """The first client that needs a validator does not wait for it."""
    code = f"""{_INCOMPLETE}
import inferencecenter.protocol.requests, inferencecenter.protocol.events, json
from inferencecenter.protocol.base import build_messages

before = list(incomplete(Request, Event, Value))
n_steps = sum(1 for _ in build_messages(Request, Event, Value))
print(json.dumps([len(before), n_steps, list(incomplete(Request, Event, Value))]))
"""
    n_before, n_steps, left = printed(code)
    assert n_before > 80
    assert n_steps >= n_before, "turns run between the models"
    assert left == []
