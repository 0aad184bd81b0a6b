"""Interfaces of the servers that a benchmark measures, and the trace of a turn as a client observes it.

``peers`` implements the targets: ``detect(name, url, token=...)`` queries the server at an address and returns its
``TargetSpec``; ``make_target(spec)`` returns the ``Target`` that sends it requests. A spec is plain data: the measuring
process passes it to the load generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

USUAL_TEMPERATURE: Final = 0.8
"""llama-server's default."""

TargetKind: TypeAlias = Literal[
    "inferencecenter",
    "llama-server",
    "openai",
    "chat-completions",
    "responses",
    "embeddings",
    "image-chat",
    "codex",
    "claude-code",
]
"""The API of a server that is measured.

`chat-completions` and, over WebSocket, `responses` are our own daemon's, as is what the agents `codex` and
`claude-code` send; `embeddings` and `image-chat` are any server's `/v1/embeddings` and `/v1/chat/completions`.
"""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The address and the API of a server.

    ``token`` is the bearer or account token, where one is needed. ``model`` is the model name that an OpenAI-compatible
    server requires in each request; empty if it is not needed. ``stored`` conversations are stored by our daemon;
    others end with their connection. Of our daemon's sessions, ``chat`` is whether prompts go through the model's
    template, and ``json_schema`` is the text of the schema that every answer follows; empty for none.
    """

    name: str
    kind: TargetKind
    url: str
    token: str | None = None
    model: str = ""
    stored: bool = False
    chat: bool = False
    json_schema: str = ""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts that a server reports; ``None`` or an empty string for unknown ones.

    ``library`` names the version of llama.cpp. ``threads`` are those that generate. ``n_ctx`` is tokens per slot.
    """

    name: str
    kind: TargetKind
    url: str
    model: str
    model_bytes: int | None
    n_params: int | None
    library: str
    threads: int | None
    slots: int | None
    n_ctx: int | None


@dataclass(frozen=True, slots=True)
class Opening:
    """The words with which several prompts begin: their first ``tokens``, a function of ``seed``."""

    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Work:
    """One turn to run.

    The prompt is a function of ``seed`` and ``prompt_tokens``; prompts of different seeds differ from their first words
    on, so that no prefix is found in a cache, unless they have the same ``opening``, whose tokens are part of
    ``prompt_tokens``. Exactly ``max_tokens`` are generated: ends of text are ignored. Turns of one ``history_id``
    continue one conversation, up to one that ``ends_history``; ``None`` is a conversation of its own. ``slot`` is where
    the conversation's KV is, for servers that clients may name a slot to; others find it by themselves. Tokens are
    drawn at the ``temperature``, at 0 the likeliest are taken. With ``image`` there is one before the text, which
    depends on the opening's seed, or without an opening on the turn's; only some protocols can send it.
    """

    prompt_tokens: int
    max_tokens: int
    seed: int
    history_id: str | None = None
    ends_history: bool = False
    opening: Opening | None = None
    slot: int | None = None
    temperature: float = USUAL_TEMPERATURE
    image: bool = False


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """One turn as its client saw it; times are seconds of the client's monotonic clock.

    ``token_times_s`` has one entry for each piece of text that arrived, which may be fewer than ``tokens``: a piece
    can hold several, and half a character is held back. ``prompt_tokens`` and ``tokens`` are the server's own count.
    """

    started_s: float
    token_times_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    tokens: int
    cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AbortTrace:
    """A turn that its client aborted: ``aborted_s`` is the time of the abort, ``ended_s`` that of the server's stop."""

    started_s: float
    token_times_s: tuple[float, ...]
    aborted_s: float
    ended_s: float
    error: str | None = None


class TargetSession(Protocol):
    """One client's connection."""

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``.

        Args:
            work: What to run.
            on_text: Called when a piece of text arrives, after its time was noted.
        """

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Abort a turn after a number of pieces of text, or during prefill if it is ``None``."""


class Target(Protocol):
    """A server that runs turns."""

    async def facts(self) -> TargetFacts:
        """Query the facts of the server.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """

    def session(self) -> AbstractAsyncContextManager[TargetSession]:
        """Open a connection for one client.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
