"""Records with defaults for tests."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inferencecenter.protocol.events import End, Error
from inferencecenter.protocol.params import Params
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, TranscriptTurn, TurnStats, Usage
from inferencecenter.sessions.context import SessionConfig
from inferencecenter.sessions.history import History, TurnFailure
from inferencecenter.sessions.journal import SessionOpened, TokensAppended, TurnEnded, TurnQueued
from inferencecenter.sessions.turn import TurnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOCK = 1_795_000_000.5
"""Unix seconds: 2026-11-18, in UTC."""


def make_facts(session_id: str = "s_1", **changes: Any) -> SessionConfig:
    """The configuration of a session."""
    config = SessionConfig(
        session_id=session_id,
        epoch="e_1",
        client_id="ada",
        mode="chat",
        chosen_model=None,
        model="toy",
        n_ctx=4096,
        params=Params(temperature=0.5, stop=("END",), logit_bias=((3, False), (4, 1.5))),
        chosen=frozenset({"temperature", "stop"}),
        priority="normal",
        on_full="shift",
        on_disconnect="detach",
        store=True,
        ttl_s=60.0,
        metadata={"title": "Überschrift"},
        created_at=CLOCK,
    )
    return replace(config, **changes)


def said_by(role: Any, content: str) -> ChatMessage:
    """A message."""
    return ChatMessage(role=role, content=content)


def packed(tokens: Sequence[int]) -> bytes:
    """Packed token ids."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def make_history(text: str = "") -> History:
    """A history of one question and an answer, one token per character."""
    if not text:
        return History()
    messages = (said_by("user", "?"), said_by("assistant", text))
    return History(messages, packed([ord(each) for each in text]), text, model_fingerprint="toy")


def make_usage(tokens: int = 4) -> Usage:
    """The usage of a turn."""
    return Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=tokens)


def make_turn(turn_id: str = "t_1", **changes: Any) -> TranscriptTurn:
    """A finished turn."""
    turn = TranscriptTurn(
        turn_id=turn_id, finish_reason="stop", messages=2, usage=make_usage(), ended_at=1_700_000_000.5
    )
    return turn.model_copy(update=changes)


def make_end(turn_id: str = "t_1", *, session_id: str = "s_1", seq: int = 9) -> End:
    """The final event of a turn."""
    stats = TurnStats(
        ttft_ms=1.25, total_ms=3.5, tokens=4, tps=0.1, prompt_tokens=7, cached_tokens=2, queue_ms=0.0, preempted=0
    )
    return End.model_validate(
        {
            "id": "frame-1",
            "session_id": session_id,
            "seq": seq,
            "turn_id": turn_id,
            "finish_reason": "stop",
            "stop": "END",
            "warnings": ("top_k has no effect.",),
            "usage": make_usage(),
            "stats": stats,
        }
    )


def make_failure(turn_id: str = "t_1", *, session_id: str = "s_1", seq: int = 9, note: str = "a note") -> TurnFailure:
    """The failure of a turn."""
    error = Error(
        code="engine_crashed",
        message="gone",
        error="gone",
        session_id=session_id,
        seq=seq,
        turn_id=turn_id,
        retryable=True,
    )
    return TurnFailure(error, note)


def make_order(turn_id: str = "t_1", **changes: Any) -> TurnSpec:
    """An unfinished turn."""
    request = Infer(op="infer", id="7", session_id="s_1", prompt="Who?", params={"top_k": 3}, turn_key="key")
    order = TurnSpec(
        turn_id=turn_id,
        request=request,
        params=Params(top_k=3, seed=11, stop_regex=(r"\d+",)),
        rank=1,
        warnings=("A warning.",),
        submitted_at=CLOCK + 1,
        rendered_at="2026-11-18T10:26:40+01:00",
        model="toy",
        model_fingerprint="fingerprint",
    )
    return replace(order, **changes)


def opened(session_id: str = "s_1", *, history: History | None = None, **changes: Any) -> SessionOpened:
    """A session is created."""
    config = make_facts(session_id, **changes)
    return SessionOpened(config=config, history=history or History(), turns=(), last_used_at=CLOCK)


def ordered(session_id: str = "s_1", *, seq: int = 1, order: TurnSpec | None = None) -> TurnQueued:
    """A turn is queued."""
    return TurnQueued(session_id=session_id, seq=seq, last_used_at=CLOCK, spec=order or make_order())


def said(text: str, session_id: str = "s_1", *, seq: int = 2, turn_id: str = "t_1") -> TokensAppended:
    """A turn generates ``text``, one token per character."""
    return TokensAppended(
        session_id=session_id, seq=seq, turn_id=turn_id, tokens=packed([ord(each) for each in text]), text=text
    )


def ended(session_id: str = "s_1", *, text: str = "Hello", turn_key: str | None = None, **changes: Any) -> TurnEnded:
    """A turn finishes with the answer ``text``."""
    record = TurnEnded(
        session_id=session_id,
        client_id="ada",
        seq=9,
        last_used_at=CLOCK,
        history=make_history(text),
        turn=make_turn(),
        turn_key=turn_key,
        end=make_end(session_id=session_id),
    )
    return replace(record, **changes)
