"""What may be said of a client, a session and a turn, all of it by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

from inferencecenter.client.errors import made
from inferencecenter.protocol import requests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from ssl import SSLContext

    from inferencecenter.client.multiplexer import Notice
    from inferencecenter.client.transport import Timing
    from inferencecenter.protocol.values import (
        ChatMessage,
        Metadata,
        Mode,
        OnDisconnect,
        OnFull,
        Priority,
        Tool,
        ToolChoice,
    )


def current_traceparent() -> str | None:
    """Return the current span as W3C Trace Context has it; ``None`` where there is none.

    OpenTelemetry is not imported: in a program that has a span, it is there.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 0xFF:02x}"


def infer_request(
    session_id: str, prompt: str | None, *, messages: Messages | None, asked: InferOptions
) -> requests.Infer:
    """Return the request, which belongs to the caller's current span.

    Raises:
        RequestError: What is asked makes no sense.
    """
    fields: dict[str, Any] = {name: value for name, value in asked.items() if name not in RetryOptions.__annotations__}
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


Messages: TypeAlias = "Sequence[ChatMessage | dict[str, Any]]"
"""What is said: messages of the protocol, or objects with their fields."""


class ClientOptions(TypedDict, total=False):
    """How a client gets in and what it does when its socket is lost.

    Attributes:
        client_id: The account's name, with ``api_key``, in place of a token.
        api_key: The account's key.
        tls: Verifies the daemon's certificate at a ``wss://`` address, in place of the system's authorities.
        open_timeout_s: Seconds that opening, and then authenticating, may take.
        keepalive_s: Seconds between pings; a daemon that leaves one unanswered for as long is lost.
        reconnect: Open another socket when this one is lost, and go on there with every session. Without it a lost
            socket is the end.
        give_up_after_s: Seconds without a connection after which that is the end; ``None`` for never.
        retries: How often a session or a turn is asked for again when the daemon says that it may succeed later, as
            with ``overloaded`` or ``rate_limited``; each time after as long as it says.
        on_notice: Called with each change of the connection, and with what the daemon tells everybody.
        timing: Time and chance, for tests.
    """

    client_id: str | None
    api_key: str | None
    tls: SSLContext
    open_timeout_s: float
    keepalive_s: float
    reconnect: bool
    give_up_after_s: float | None
    retries: int
    on_notice: Callable[[Notice], None] | None
    timing: Timing


class RetryOptions(TypedDict, total=False):
    """What a caller may say of waiting.

    Attributes:
        retries: How often it is asked again when the daemon says that it may succeed later; the client's own count
            when not given. Once something was said, it is not.
        load_timeout_s: Seconds that its model may take to be loaded.
        on_loading: Called with what the daemon says, about once a second while it loads the model.
    """

    retries: int
    load_timeout_s: float
    on_loading: Callable[[str], None]


class SessionOptions(RetryOptions, total=False):
    """How a session is.

    Attributes:
        system: System prompt.
        mode: Whether the model's template is applied.
        model: Name of its model; without it the session goes with the daemon's choice.
        params: Session level of parameters.
        priority: Class of its turns; the account's when not given.
        on_full: What happens when its context is full; without it the mode decides.
        on_disconnect: What happens when the socket is lost; without it the session goes on and is resumed.
        store: Whether it may be written to disk.
        ttl_s: Idle seconds before it expires.
        metadata: Strings of the caller's own.
    """

    system: str | None
    mode: Mode
    model: str | None
    params: dict[str, Any] | None
    priority: Priority | None
    on_full: OnFull | None
    on_disconnect: OnDisconnect | None
    store: bool
    ttl_s: float | None
    metadata: Metadata | None


class InferOptions(RetryOptions, total=False):
    """What a turn may be asked with, beside what is said.

    Attributes:
        params: Parameters of this turn; docs/protocol.md lists them.
        tools: Tools that the model may ask for.
        tool_choice: Whether it does.
        parallel_tool_calls: Whether it may ask for several at once.
        json_schema: The answer is JSON that this accepts.
        regex: This matches the whole answer.
        grammar: This spells the answer.
        thinking: Whether the model thinks before it answers.
        n_probs: How many of the likeliest tokens are told with each.
        priority: Class of the turn.
    """

    params: dict[str, Any] | None
    tools: Sequence[Tool | dict[str, Any]]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    json_schema: dict[str, Any] | bool
    regex: str
    grammar: str
    thinking: bool
    n_probs: int
    priority: Priority


def waits(options: Mapping[str, Any]) -> RetryOptions:
    """Return what was said of waiting."""
    return cast(
        "RetryOptions", {name: value for name, value in options.items() if name in RetryOptions.__annotations__}
    )
