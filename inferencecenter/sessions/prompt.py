"""What a turn is made of, and what it leaves behind. Pure: plans over values.

A session's tokens stay exactly as they were given and generated. A turn renders the whole conversation and submits,
after the tokens it already has, only the text that they do not spell yet. Where a template rewrites what was there
before, everything is rendered again; the engine then reuses the KV of what is still the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from datetime import datetime

    from inferencecenter.ipc.messages import Finished, Piece
    from inferencecenter.sessions.template import Renderer

TOKEN_BYTES: Final = 4
"""Bytes of one packed token id."""


@dataclass(frozen=True, slots=True)
class History:
    """What a session holds: its messages, and the packed tokens that spell the text ``covered``."""

    messages: tuple[ChatMessage, ...] = ()
    tokens: bytes = b""
    covered: str = ""

    @property
    def n_tokens(self) -> int:
        """Tokens held."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_chars(self) -> int:
        """Characters of all messages."""
        return sum(len(message.content) for message in self.messages)

    def appended(self, messages: tuple[ChatMessage, ...]) -> History:
        """Return the history with more messages; their tokens follow with the next turn."""
        return History(self.messages + messages, self.tokens, self.covered)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn submits: kept ``tokens`` and the ``pieces`` after them; together they spell ``text``."""

    messages: tuple[ChatMessage, ...]
    text: str
    tokens: bytes
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said in a turn: its text, its packed tokens, and the packed tokens of the prompt if it began."""

    text: str
    tokens: bytes
    prompt_tokens: bytes | None


def next_prompt(history: History, new: tuple[ChatMessage, ...], *, renderer: Renderer, now: datetime) -> Prompt:
    """Return what to submit to have ``new`` answered.

    Raises:
        InferenceCenterError: See ``Renderer.render``.
    """
    messages = history.messages + new
    rendering = renderer.render(messages, now=now)
    tokens, start = history.tokens, len(history.covered)
    if not tokens or not rendering.text.startswith(history.covered):
        # The engine puts the BOS token before what comes first; the template's own would be a second one.
        bos = renderer.implied_bos
        tokens, start = b"", len(bos) if rendering.text.startswith(bos) else 0
    return Prompt(messages=messages, text=rendering.text, tokens=tokens, pieces=rendering.pieces(start))


def after_turn(history: History, prompt: Prompt, *, answer: Answer, end: Finished, keeps_end: bool) -> History:
    """Return the history once a turn has ended, with whatever of the answer was shown.

    Args:
        history: As it was before the turn.
        prompt: What the turn submitted.
        answer: What came back.
        end: How it ended.
        keeps_end: Whether the token that ended the answer is part of the text.
    """
    messages = (*prompt.messages, ChatMessage(role="assistant", content=answer.text))
    if answer.prompt_tokens is None:
        return History(messages, history.tokens, history.covered)
    kept_tokens, end_text = end.kept_tokens, end.end_text
    if end_text and not keeps_end:
        kept_tokens, end_text = kept_tokens - 1, ""
    return History(
        messages,
        answer.prompt_tokens + answer.tokens[: kept_tokens * TOKEN_BYTES],
        prompt.text + answer.text[: end.kept_chars] + end_text,
    )
