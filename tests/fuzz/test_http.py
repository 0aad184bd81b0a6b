"""Fuzzed requests with a valid token: each operation answers as documented, and the daemon survives."""

from __future__ import annotations

import http.client
import json
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.api.app import OPERATIONS
from inferencecenter.api.endpoint import BODY_ERRORS, COMMON_ERRORS, Operation
from inferencecenter.core.errors import ERRORS, ErrorCode
from tests.fuzz.budget import examples
from tests.fuzz.json_document import changed

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

MESSAGES: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "user", "content": "And now?"},
]
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: Final = {"name": "now", "description": "Tells the time.", "parameters": SCHEMA}
BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/chat/completions": [
        {"model": "echo", "messages": MESSAGES, "max_tokens": 4, "stop": ["x"], "seed": 5},
        {
            "model": "echo",
            "messages": MESSAGES[:2],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "now"}},
            "max_completion_tokens": 4,
        },
        {
            "model": "echo",
            "messages": MESSAGES[:2],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logit_bias": {"5": 1.5},
            "n": 2,
            "max_tokens": 4,
        },
        {
            "model": "echo",
            "messages": MESSAGES[:2],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "max_tokens": 4,
        },
    ],
    "/v1/completions": [{"model": "echo", "prompt": ["Hi", "Ho"], "max_tokens": 4, "echo": True, "logprobs": 1}],
    "/v1/responses": [
        {"model": "echo", "input": "Hi", "max_output_tokens": 16, "instructions": "Be brief."},
        {
            "model": "echo",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "tools": [{"type": "function", **FUNCTION}],
            "stream": True,
            "max_output_tokens": 16,
            "metadata": {"a": "b"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
        },
        {"model": "echo", "input": "Hi", "previous_response_id": "resp_5", "max_output_tokens": 16},
    ],
    "/generate": [
        {"prompt": "Hi", "system": "Be brief.", "max_tokens": 4, "params": {"temperature": 0.5, "stop": ["x"]}},
        {"prompt": "Hi", "max_tokens": 4, "stream": True, "regex": "[a-z]+"},
        {"prompt": "Hi", "max_tokens": 4, "json_schema": SCHEMA, "priority": "batch"},
        {"prompt": "Hi", "max_tokens": 4, "grammar": 'root ::= "a" | "b"'},
    ],
    "/tokenize": [{"text": "Hi", "special": True, "add_bos": False, "pieces": True}],
    "/detokenize": [{"tokens": [72, 105]}],
}
SEGMENTS: Final = st.sampled_from(
    ["echo", "resp_5", "..", "%2e%2e", "%00", "%ff", "x" * 5000, "a%2Fb", "%F0%9F%98%80", ".", "%25s", "a;b", "null"]
)
QUERIES: Final = st.sampled_from(
    ["", "?", "?a=1", "?stream=true", "?limit=-1", "?limit=99999999999999999999", "?order=up", "?after=%ff", "?a&a=&=b"]
) | st.lists(st.sampled_from(["limit", "order", "after", "stream", "x"]), max_size=4).map(
    lambda names: "?" + "&".join(f"{name}=1" for name in names)
)
TYPES: Final = st.sampled_from(
    [*["application/json"] * 8, "", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "\xff"]
)
HEADERS: Final = st.sampled_from(
    ["http://[half", "[::1", "null", "\xff", "x" * 5000, "http://a:99999999", "", "00-0-0-0"]
)
INTERNAL: Final = re.compile(rb'"code": ?"internal"')
MAX_READ: Final = 2**20


def test_every_operation_with_a_body_is_fuzzed() -> None:
    """The table of bodies is complete."""
    assert {row.path for row in OPERATIONS if row.body is not None} == BODIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: f"{row.method} {row.path}")
@examples(150)
@given(data=st.data())
def test_any_request_is_answered_as_documented(fuzzed: Daemon, row: Operation, data: st.DataObject) -> None:
    """Only documented failures occur, and never an internal one."""
    path, body = row.path, b""
    for name in ("model", "response_id"):
        path = path.replace(f"{{{name}}}", data.draw(SEGMENTS))
    path += data.draw(QUERIES) if data.draw(st.integers(0, 4)) == 0 else ""
    if row.body is not None:
        body = data.draw(
            changed(st.sampled_from(BODIES[row.path]), names=st.sampled_from(sorted(row.body.model_fields)))
        )
    elif data.draw(st.booleans()):
        body = data.draw(st.binary(max_size=100))
    headers = {"Authorization": f"Bearer {fuzzed.admin_token}", "Content-Type": data.draw(TYPES)}
    if data.draw(st.integers(0, 9)) == 0:
        headers |= {
            data.draw(st.sampled_from(["Origin", "Host", "X-Forwarded-For", "Traceparent"])): data.draw(HEADERS)
        }
    status, answer = send_request(fuzzed, row.method, path, body=body, headers=headers)
    assert status < 500 or status in statuses(row), (status, answer)
    assert not INTERNAL.search(answer), answer
    if status >= 400:
        assert "error" in json.loads(answer) or "code" in json.loads(answer), answer
        # Refusals in a row are delayed; one request that is accepted ends the row.
        accepted = {"Authorization": f"Bearer {fuzzed.admin_token}"}
        assert send_request(fuzzed, "GET", "/v1/models", body=b"", headers=accepted)[0] == 200


def send_request(daemon: Daemon, method: str, path: str, *, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send a request and return the status and the beginning of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_READ)
    finally:
        connection.close()


def statuses(row: Operation) -> set[int]:
    """Return the documented failure statuses of an operation, without internal errors."""
    codes = {*COMMON_ERRORS, *BODY_ERRORS, *row.errors} - {ErrorCode.INTERNAL, ErrorCode.ENGINE_CRASHED}
    return {ERRORS[code].http_status for code in codes}
