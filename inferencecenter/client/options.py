"""Keyword options of a client, a session and a turn."""

from __future__ import annotations

import sys
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, cast

from inferencecenter.client.errors import RequestError, new_request
from inferencecenter.core.errors import ErrorCode
from inferencecenter.protocol import requests
from inferencecenter.protocol.values import MessageImage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from ssl import SSLContext

    from inferencecenter.client.connection import Notice
    from inferencecenter.client.retry import Timing
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


_UNIX: Final = "unix://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the daemon and how to connect to it.

    Attributes:
        url: WebSocket URL, or ``unix://`` and the path of the daemon's Unix socket.
        credential: Token, client id with API key, or neither on a Unix socket, where the user of the process counts.
        tls: TLS context; ``None`` uses the system's certificate authorities.
        open_timeout_s: Timeout in seconds of the handshake, and again of the authentication.
        keepalive_s: Seconds between pings, and the timeout of each.
    """

    url: str
    credential: requests.Auth
    tls: SSLContext | None
    open_timeout_s: float
    keepalive_s: float


def socket_url(url: str) -> str:
    """Return the WebSocket URL for an ``http``, ``https``, ``ws`` or ``wss`` address of the daemon.

    One with ``unix`` is returned as it is.

    Raises:
        RequestError: The path of a ``unix`` address is not absolute.
    """
    scheme, separator, rest = url.partition("://")
    if scheme.lower() == "unix":
        if not rest.startswith("/"):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"{url} has no absolute path",
                field="url",
                hint="unix:///run/inferencecenter/daemon.sock",
            )
        return _UNIX + rest
    return {"http": "ws", "https": "wss"}.get(scheme.lower(), scheme) + separator + rest


def unix_path(url: str) -> str | None:
    """Return the path of the socket in a ``unix`` address of ``socket_url``, ``None`` for any other."""
    return url.removeprefix(_UNIX) if url.startswith(_UNIX) else None


def current_traceparent() -> str | None:
    """Return the current span's context in W3C Trace Context format; ``None`` without a span.

    Never imports OpenTelemetry: a program that has a span has already imported it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 0xFF:02x}"


def infer_request(
    session_id: str, prompt: str | None, *, messages: Messages | None, options: InferOptions
) -> requests.Infer:
    """Return an ``infer`` request with the caller's trace context.

    Raises:
        RequestError: An option is unknown or invalid.
    """
    fields: dict[str, Any] = {
        name: value for name, value in options.items() if name not in RetryOptions.__annotations__
    }
    if "tools" in fields:
        fields["tools"] = list(fields["tools"])
    if images := list(fields.pop("images", ())):
        if messages is not None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "images belong to a prompt, and messages have their own")
        prompt, messages = None, [_with_images(prompt or "", images)]
    return new_request(
        requests.Infer,
        session_id=session_id,
        prompt=prompt,
        messages=None if messages is None else list(messages),
        traceparent=current_traceparent(),
        **fields,
    )


ImageSource: TypeAlias = "str | Path | bytes | MessageImage"
"""An image: the path of a file, whose name stands for it, its content, or what ``Client.add_image`` returned."""


def _with_images(prompt: str, images: Sequence[ImageSource]) -> dict[str, Any]:
    parts = [_image_part(image) for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if prompt else parts}


def _image_part(image: ImageSource) -> dict[str, Any]:
    if isinstance(image, MessageImage):
        alt = {} if image.alt is None else {"alt": image.alt}
        return {"type": "image", "digest": image.digest, **alt}
    if isinstance(image, bytes):
        return {"type": "image", "data": b64encode(image).decode()}
    path = Path(image)
    return {"type": "image", "data": b64encode(path.read_bytes()).decode(), "alt": path.name}


Messages: TypeAlias = "Sequence[ChatMessage | dict[str, Any]]"
"""Messages of the protocol, or dictionaries with their fields."""


class ClientOptions(TypedDict, total=False):
    """Authentication and connection options.

    Attributes:
        client_id: Name of the account, with ``api_key``, instead of a token.
        api_key: API key of the account.
        tls: TLS context for a ``wss://`` address, instead of the system's certificate authorities.
        open_timeout_s: Timeout in seconds of the handshake, and again of the authentication.
        keepalive_s: Seconds between pings, and the timeout of each.
        reconnect: Reconnect when the socket is lost, and restore every session. Without it the connection ends with its
            socket.
        give_up_after_s: Seconds without a connection after which reconnecting stops; ``None`` for never.
        retries: How often a session or turn is retried after a temporary error such as ``overloaded`` or
            ``rate_limited``, each time after the delay that the daemon gives.
        on_notice: Called with each change of the connection's state and each broadcast of the daemon.
        timing: Clock and randomness, for tests.
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
    """Retry options of one operation.

    Attributes:
        retries: How often the operation is retried after a temporary error; defaults to the client's count. Never
            retried once part of the answer has arrived.
        load_timeout_s: Seconds to wait for the model to load.
        on_loading: Called with the daemon's refusal, about once a second, while the model loads.
    """

    retries: int
    load_timeout_s: float
    on_loading: Callable[[str], None]


class SessionOptions(RetryOptions, total=False):
    """Options of a new session.

    Attributes:
        system: System prompt.
        mode: Whether the model's chat template is applied.
        model: Name of its model; the daemon's default model when not given.
        params: Parameters of the session level.
        priority: Priority class of its turns; the account's when not given.
        on_full: Behavior when the context is full; the mode's default when not given.
        on_disconnect: Behavior when the socket is lost; by default the session continues and is resumed.
        store: Whether the session may be written to disk.
        ttl_s: Idle seconds before it expires.
        metadata: Strings for the caller's own use.
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
    """Options of a turn, besides its prompt or messages.

    Attributes:
        params: Parameters of this turn; docs/protocol.md lists them.
        tools: Tools that the model may call.
        tool_choice: Whether and which tools the model calls.
        parallel_tool_calls: Whether the model may call several tools at once.
        json_schema: JSON schema that the answer conforms to.
        regex: Regular expression that matches the whole answer.
        grammar: GBNF grammar that the answer conforms to.
        thinking: Whether the model reasons before it answers.
        n_probs: Number of top token probabilities sent with each token.
        priority: Priority class of the turn.
        images: Images before the prompt; see ``ImageSource``. Files are read at once, and all together are smaller than
            a frame (``hello.limits``); for larger ones see ``Client.add_image``.
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
    images: Sequence[ImageSource]


def request_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of the request."""
    return {name: value for name, value in options.items() if name not in RetryOptions.__annotations__}


def retry_options(options: Mapping[str, Any]) -> RetryOptions:
    """Return the retry options among the given options."""
    return cast(
        "RetryOptions", {name: value for name, value in options.items() if name in RetryOptions.__annotations__}
    )
