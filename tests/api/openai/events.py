"""Session events and streams for the tests of the APIs of others."""

from __future__ import annotations

import json
from typing import Any

from inferencecenter.protocol import events
from inferencecenter.protocol.values import TokenLogprobs, TurnStats, Usage

_NAMES: dict[str, Any] = {"session_id": "s_1", "seq": 1, "turn_id": "t_1"}


def token(text: str, *, logprobs: tuple[TokenLogprobs, ...] | None = None) -> events.Token:
    """Return a token event."""
    return events.Token(**_NAMES, content=text, logprobs=logprobs)


def reasoning_token(text: str) -> events.Reasoning:
    """Return what is thought."""
    return events.Reasoning(**_NAMES, content=text)


def tool_call_delta(text: str, *, index: int = 0, name: str | None = None) -> events.ToolCall:
    """Return more of a call."""
    return events.ToolCall(**_NAMES, index=index, call_id=f"c{index}", name=name, arguments=text)


def end(reason: Any, *, warnings: tuple[str, ...] = ()) -> events.End:
    """Return the end of a turn of 10 prompt tokens, 4 of them cached, and 2 completion tokens."""
    stats = TurnStats(
        ttft_ms=1, total_ms=1, tokens=2, tps=1, prompt_tokens=10, cached_tokens=4, queue_ms=0, preempted=0
    )
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=2)
    return events.End(**_NAMES, finish_reason=reason, warnings=warnings, usage=usage, stats=stats)


def failure(code: str) -> events.Error:
    """Return the end of a failed turn."""
    return events.Error(code=code, message="no", error="no", session_id="s_1", seq=1, turn_id="t_1", retryable=False)


def data_of(body: bytes) -> list[Any]:
    """Return the data of all events of a stream; ``[DONE]`` is not JSON."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
