"""Error responses in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from inferencecenter.api.errors import error_body, error_headers
from inferencecenter.core.errors import ERRORS, ErrorCode, ErrorSpec, InferenceCenterError
from tests.api.http_client import post

if TYPE_CHECKING:
    from tests.server.harness import Running


@pytest.mark.parametrize("row", [row for row in ERRORS.values() if row.on_http], ids=lambda row: row.code.value)
def test_every_error_has_openai_fields(row: ErrorSpec) -> None:
    """Message, type, param and code exist for every row, and the type follows the status."""
    error = orjson.loads(error_body(InferenceCenterError(row.code)))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] is None
    assert (error["type"] == "server_error") == (row.http_status >= 500)
    retries = error_headers(InferenceCenterError(row.code))["x-should-retry"]
    assert retries == ("true" if row.retryable else "false")


def test_hint_is_appended_to_the_message() -> None:
    """OpenAI's shape has no field for it."""
    error = InferenceCenterError(ErrorCode.INVALID_REQUEST, "n is 9.", hint="At most 8.", field="n")
    assert orjson.loads(error_body(error))["error"] == {
        "message": "n is 9. At most 8.",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_request",
    }


def test_retry_delay_is_sent_in_seconds_and_milliseconds() -> None:
    """``retry-after`` is rounded up; OpenAI's client reads ``retry-after-ms``."""
    headers = error_headers(InferenceCenterError(ErrorCode.RATE_LIMITED, retry_after_ms=1200))
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages.0.content.0.image_url.url",
            "not data:image/…;base64,…",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input.0.content.0.image_url",
            "not data:image/…;base64,…",
        ),
    ],
)
async def test_image_is_refused_in_words(
    server: Running, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    """The error names the part and the reason, not the union's type mismatch."""
    response = await post(server, path, body)
    assert (response.status, response.error["param"]) == (400, param)
    assert reason in response.error["message"]
