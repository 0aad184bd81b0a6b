"""The protocols of our daemon, for scenarios that compare these instead of servers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.target import TargetSpec


def as_usual(spec: TargetSpec) -> TargetSpec:
    """Return our own protocol, with plain text."""
    return spec


def websocket(spec: TargetSpec) -> TargetSpec:
    """Return our own protocol, with conversations that go through the model's template as those of the others do."""
    return replace(spec, chat=True)


def chat_completions(spec: TargetSpec) -> TargetSpec:
    """Return OpenAI's chat completions over HTTP, streamed as server-sent events."""
    return replace(spec, kind="chat-completions", url=_http(spec))


def responses(spec: TargetSpec) -> TargetSpec:
    """Return OpenAI's Responses over WebSocket."""
    return replace(spec, kind="responses", url=_http(spec))


def embeddings(spec: TargetSpec) -> TargetSpec:
    """Return `/v1/embeddings` of our daemon or another server."""
    return replace(spec, kind="embeddings", url=_http(spec))


def chat_with_images(spec: TargetSpec) -> TargetSpec:
    """Return `/v1/chat/completions` of our daemon or another server, whose parameters are beside the others."""
    return replace(spec, kind="image-chat", url=_http(spec))


def codex(spec: TargetSpec) -> TargetSpec:
    """Return what Codex sends: `/v1/responses` over HTTP, with the whole conversation."""
    return replace(spec, kind="codex", url=_http(spec))


def claude_code(spec: TargetSpec) -> TargetSpec:
    """Return what Claude Code sends: `/v1/messages`, with the whole conversation."""
    return replace(spec, kind="claude-code", url=_http(spec))


def _http(spec: TargetSpec) -> str:
    """Return the HTTP address of a server; our daemon's WebSocket address is known."""
    return "http" + spec.url.removeprefix("ws").rstrip("/") if spec.url.startswith("ws") else spec.url
