"""What a turn is asked with, as a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferencecenter.client.failures import made
from inferencecenter.client.options import Waits
from inferencecenter.client.tracing import current_traceparent
from inferencecenter.protocol import requests

if TYPE_CHECKING:
    from inferencecenter.client.options import Asked, Messages


def asking(session_id: str, prompt: str | None, *, messages: Messages | None, asked: Asked) -> requests.Infer:
    """Return the request, which belongs to the caller's current span.

    Raises:
        RequestError: What is asked makes no sense.
    """
    fields: dict[str, Any] = {name: value for name, value in asked.items() if name not in Waits.__annotations__}
    if "tools" in fields:
        fields["tools"] = list(fields["tools"])
    return made(
        requests.Infer,
        session_id=session_id,
        prompt=prompt,
        messages=None if messages is None else list(messages),
        traceparent=current_traceparent(),
        **fields,
    )
