"""What traces of turns say about a server: pure functions from times to rates and delays.

Tokens may spell nothing: a control token, half a character. A turn that has no text at all counts as one piece of it,
at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferencecenter.bench.target import TurnTrace

ClientTraces: TypeAlias = "Sequence[TurnTrace]"
"""The turns of one client, in order."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time; seconds of the generator's clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is; not positive when there was no such time."""
        return self.end_s - self.start_s


def busy_window(clients: Sequence[ClientTraces], *, warm_up_turns: int) -> Window:
    """Return the time in which every client had a turn running: after its warm-up, before its last turn ended."""
    return Window(
        start_s=max(turns[warm_up_turns].started_s for turns in clients),
        end_s=min(turns[-1].ended_s for turns in clients),
    )


def decode_window(turns: Sequence[TurnTrace]) -> Window:
    """Return the time in which every one of the turns was decoding: all have begun to answer and none has ended."""
    return Window(start_s=max(_times_s(turn)[0] for turn in turns), end_s=min(_times_s(turn)[-1] for turn in turns))


def tokens_in(turns: Iterable[TurnTrace], window: Window) -> float:
    """Return the tokens that arrived inside the window, after its first instant.

    A piece of text counts as its turn's tokens divided by its pieces, because a piece may hold several.
    """
    return sum(
        turn.tokens * sum(window.start_s < at_s <= window.end_s for at_s in _times_s(turn)) / len(_times_s(turn))
        for turn in turns
    )


def pieces_in(turns: Iterable[TurnTrace], window: Window) -> int:
    """Return the pieces of text that arrived inside the window, after its first instant."""
    return sum(window.start_s < at_s <= window.end_s for turn in turns for at_s in turn.token_times_s)


def ttft_ms(turns: Iterable[TurnTrace]) -> list[float]:
    """Return each turn's milliseconds from its request to its first text."""
    return [(_times_s(turn)[0] - turn.started_s) * 1000 for turn in turns]


def itl_ms(turns: Iterable[TurnTrace]) -> list[float]:
    """Return the milliseconds between consecutive pieces of text of a turn, all turns together."""
    return [(later - earlier) * 1000 for turn in turns for earlier, later in pairwise(turn.token_times_s)]


def prefill_tok_s(turns: Sequence[TurnTrace]) -> float:
    """Return the prompt tokens a second of turns that started together, until the last has begun to answer."""
    started_s = min(turn.started_s for turn in turns)
    read_s = max(_times_s(turn)[0] for turn in turns) - started_s
    return sum(turn.prompt_tokens - (turn.cached_tokens or 0) for turn in turns) / read_s


def _times_s(turn: TurnTrace) -> tuple[float, ...]:
    return turn.token_times_s or (turn.ended_s,)
