"""Fuzzed requests with a valid token: each operation answers as documented, and the daemon survives."""

from __future__ import annotations

import http.client
import json
import re
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.api.endpoint import BODY_ERRORS, COMMON_ERRORS, Operation
from inferencecenter.api.operations import OPERATIONS
from inferencecenter.core.errors import ERRORS, ErrorCode
from tests.fuzz.budget import examples
from tests.fuzz.json_document import changed
from tests.sessions.images.files import image_file

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
BLOCKS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon", "is_error": False}]},
]
IMAGE: Final = b64encode(image_file()).decode()
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
        {
            "model": "echo",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Look:"},
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                    ],
                }
            ],
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
    "/infill": [{"input_prefix": "def f(", "input_suffix": "):", "prompt": "a", "n_predict": 4, "stream": True}],
    "/v1/fim/completions": [{"prompt": "def f(", "suffix": "):", "random_seed": 1, "max_tokens": 4, "stream": True}],
    "/v1/embeddings": [
        {"model": "echo", "input": ["a", "b"], "encoding_format": "float"},
        {"model": "echo", "input": [[1, 2], [3]], "dimensions": 4, "user": "u"},
    ],
    "/v1/rerank": [{"model": "echo", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/v1/responses/compact": [{"model": "echo", "input": "Hi", "max_output_tokens": 16}],
    "/v1/responses/input_tokens": [{"model": "echo", "input": "Hi", "instructions": "Be brief."}],
    "/v1/conversations": [{"items": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b"}}],
    "/v1/conversations/{conversation_id}": [{"metadata": {"a": "b"}}],
    "/v1/conversations/{conversation_id}/items": [{"items": [{"role": "user", "content": "Hi"}]}],
    "/apply-template": [{"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}],
    "/v1/messages": [
        {
            "model": "echo",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": BLOCKS,
            "tools": [{"name": "now", "description": "Tells the time.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
        },
        {"model": "echo", "max_tokens": 4, "messages": BLOCKS[:1], "stream": True, "stop_sequences": ["x"]},
        {
            "model": "echo",
            "max_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
                    ],
                }
            ],
        },
    ],
    "/v1/messages/count_tokens": [{"model": "echo", "messages": BLOCKS[:1], "system": "Be brief."}],
    "/api/chat": [
        {"model": "echo", "messages": MESSAGES[:2], "options": {"num_predict": 4, "temperature": 0.5}},
        {
            "model": "echo",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "format": SCHEMA,
            "think": False,
            "stream": False,
            "keep_alive": "5m",
            "options": {"num_predict": 4},
        },
    ],
    "/api/generate": [
        {"model": "echo", "prompt": "Hi", "system": "Be brief.", "options": {"num_predict": 4, "stop": ["x"]}},
        {"model": "echo", "prompt": "Hi", "raw": True, "stream": False, "format": "json", "context": [1, 2]},
        {"model": "echo", "prompt": "Hi", "images": [IMAGE], "options": {"num_predict": 4}},
        {"model": "echo", "prompt": "def f", "suffix": "return x", "options": {"num_predict": 4}},
    ],
    "/api/embed": [{"model": "echo", "input": ["a", "b"], "truncate": True, "dimensions": 4}],
    "/api/embeddings": [{"model": "echo", "prompt": "a", "keep_alive": 0}],
    "/api/copy": [{"source": "echo", "destination": "copy"}],
    "/api/show": [{"model": "echo", "verbose": True}],
    "/api/pull": [{"model": "no/such/model.gguf", "insecure": False, "stream": True}],
    "/api/delete": [{"model": "none"}],
    "/tokenize": [
        {"text": "Hi", "special": True, "add_bos": False, "pieces": True},
        {"text": "Hi", "count_only": True},
    ],
    "/detokenize": [{"tokens": [72, 105]}],
    "/images": [{"data": IMAGE}],
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
    """Only documented failures occur, in the form of the API, and never an internal one."""
    path, body = row.path, b""
    for name in ("model", "response_id", "conversation_id", "item_id", "digest"):
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
    if row.method == "HEAD":
        assert answer == b""
    if status >= 400:
        assert row.method == "HEAD" or {"error", "code"} & json.loads(answer).keys(), answer
        if row.method != "HEAD" and "{" not in row.path:  # a path with other segments may be another operation's
            row.error_format.answer.model_validate_json(answer)
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
