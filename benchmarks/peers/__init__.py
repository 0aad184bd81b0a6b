"""The servers that a benchmark supports, behind the interfaces of ``benchmarks.target``.

Common to all of them: the prompt's words (``prompts``), the sampling parameters (``sampling``), one connection that is
kept for each client, and a clock that starts when a turn is sent and records the time of each piece of text when its
bytes have arrived. The time between tokens is the difference of two consecutive times; where pieces hold several
tokens, the turn's mean is its time from the first piece to the last, divided by its tokens less one.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from benchmarks.peers.daemon import Daemon
from benchmarks.target import TargetSpec
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.target import Target, TargetKind

__all__ = ["detect", "make_target"]

T = TypeVar("T")

_PROBE_TIMEOUT_S: Final = 10.0
_WEB_SCHEMES: Final = {"http": "ws", "https": "wss"}


class _About(msgspec.Struct):
    """Our daemon's answer to a plain request."""

    server: str = ""


class _Props(msgspec.Struct):
    """llama-server's properties."""

    total_slots: int


class _ListedModel(msgspec.Struct):
    """An entry of an OpenAI-compatible list of models."""

    id: str


class _ListedModels(msgspec.Struct):
    """An OpenAI-compatible list of models."""

    data: list[_ListedModel]


async def detect(name: str, url: str, *, token: str | None = None) -> TargetSpec:
    """Detect the server at an address.

    A ``ws`` address is assumed to be this project's daemon.

    Raises:
        InferenceCenterError: ``invalid_request`` for an address that is none, ``daemon_unreachable`` if no supported
            server answers there.
    """
    return await asyncio.to_thread(_detect, name, url, token)


def make_target(spec: TargetSpec) -> Target:
    """Return the peer that sends requests to the server.

    Raises:
        InferenceCenterError: ``invalid_config`` when the packages of the extra ``bench`` are missing.
    """
    if spec.kind == "inferencecenter":
        return Daemon(spec)
    try:
        # Not at the top: the daemon alone can be measured without the extra.
        from benchmarks.peers.agents import AgentTarget, ClaudeCodeSession, CodexSession  # noqa: PLC0415
        from benchmarks.peers.embeddings import EmbeddingSession  # noqa: PLC0415
        from benchmarks.peers.images import ImageChatSession  # noqa: PLC0415
        from benchmarks.peers.llama_server import LlamaServer  # noqa: PLC0415
        from benchmarks.peers.openai import ChatSession, CompletionsSession, OpenAITarget  # noqa: PLC0415
        from benchmarks.peers.responses import ResponsesSession  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"{spec.url} is driven with the package {error.name}, which is not installed",
            hint="Install the extra: pip install 'inferencecenter[bench]'.",
        ) from error
    targets: dict[TargetKind, Callable[[TargetSpec], Target]] = {
        "llama-server": LlamaServer,
        "openai": partial(OpenAITarget, connect=CompletionsSession.connect),
        "chat-completions": partial(OpenAITarget, connect=ChatSession.connect),
        "image-chat": partial(OpenAITarget, connect=ImageChatSession.connect),
        "responses": partial(OpenAITarget, connect=ResponsesSession.connect),
        "embeddings": partial(OpenAITarget, connect=EmbeddingSession.connect),
        "codex": partial(AgentTarget, agent=CodexSession),
        "claude-code": partial(AgentTarget, agent=ClaudeCodeSession),
    }
    return targets[spec.kind](spec)


def _detect(name: str, url: str, token: str | None) -> TargetSpec:
    parts = urlsplit(url)
    if parts.scheme in _WEB_SCHEMES.values() and parts.netloc:
        return TargetSpec(name, "inferencecenter", url, token)
    if parts.scheme not in _WEB_SCHEMES or not parts.netloc:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{url!r} is no address", hint="Write http://HOST:PORT or ws://HOST:PORT."
        )
    base = url.rstrip("/").removesuffix("/v1")
    about = _fetch(f"{base}/", _About, token=token)
    if about is not None and about.server == "inferencecenter":
        address = urlunsplit((_WEB_SCHEMES[parts.scheme], parts.netloc, parts.path or "/", "", ""))
        return TargetSpec(name, "inferencecenter", address, token)
    if _fetch(f"{base}/props", _Props, token=token) is not None:
        return TargetSpec(name, "llama-server", base, token)
    listed = _fetch(f"{base}/v1/models", _ListedModels, token=token)
    if listed is not None and listed.data:
        return TargetSpec(name, "openai", base, token, listed.data[0].id)
    raise InferenceCenterError(
        ErrorCode.DAEMON_UNREACHABLE,
        f"what answers at {url} is neither InferenceCenter nor llama-server nor lists models as OpenAI's servers do",
    )


def _fetch(url: str, kind: type[T], *, token: str | None) -> T | None:
    """Fetch a page, or ``None`` when there is no such page or it holds something else.

    Raises:
        InferenceCenterError: ``daemon_unreachable``.
    """
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S) as answer:  # noqa: S310 - the scheme was checked
            return msgspec.json.decode(answer.read(), type=kind)
    except (urllib.error.HTTPError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"nothing answers at {url}: {error}") from error
