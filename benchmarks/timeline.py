"""Derives rates and delays from traces of turns: pure functions of times.

A token may have no text, such as a control token or half a character. A turn without any text counts as one piece, at
its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.target import TurnTrace

ClientTraces: TypeAlias = "Sequence[TurnTrace]"
"""The turns of one client, in order."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time; seconds of the generator's clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """The duration; not positive if there is no such window."""
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
    return [gap.length_s * 1000 for gap in _gaps(turns)]


def itl_inside_ms(turns: Iterable[TurnTrace], window: Window) -> list[float]:
    """Return the ``itl_ms`` of gaps that lie inside the window with both ends."""
    return [gap.length_s * 1000 for gap in _gaps(turns) if window.start_s <= gap.start_s and gap.end_s <= window.end_s]


def itl_touching_ms(turns: Iterable[TurnTrace], window: Window) -> list[float]:
    """Return the ``itl_ms`` of gaps that have a part inside the window, at their whole length."""
    return [gap.length_s * 1000 for gap in _gaps(turns) if gap.start_s < window.end_s and window.start_s < gap.end_s]


def span(turns: Sequence[TurnTrace]) -> Window:
    """Return the time from the first request to the end of the last turn."""
    return Window(min(turn.started_s for turn in turns), max(turn.ended_s for turn in turns))


def spread_tokens(turns: Sequence[TurnTrace]) -> float:
    """Return the greatest difference in generated tokens between two turns that were unfinished at the same moment.

    A turn is unfinished from its request until its last piece of text, which no longer counts. Pieces count as in
    ``tokens_in``.
    """
    moments = sorted((at_s, index) for index, turn in enumerate(turns) for at_s in (turn.started_s, *_times_s(turn)))
    to_come = [1 + len(_times_s(turn)) for turn in turns]
    generated: dict[int, float] = {}
    widest = 0.0
    for _, index in moments:
        to_come[index] -= 1
        pieces = len(_times_s(turns[index]))
        generated[index] = turns[index].tokens * (pieces - to_come[index]) / pieces
        if not to_come[index]:
            del generated[index]
        if generated:
            widest = max(widest, max(generated.values()) - min(generated.values()))
    return widest


def tokens_read(turns: Iterable[TurnTrace]) -> int | None:
    """Return the prompt tokens that were not cached; ``None`` when a server does not report it."""
    read = 0
    for turn in turns:
        if turn.cached_tokens is None:
            return None
        read += turn.prompt_tokens - turn.cached_tokens
    return read


def prefill_tok_s(turns: Sequence[TurnTrace]) -> float:
    """Return the prompt tokens a second of turns that started together, until the last has begun to answer."""
    started_s = min(turn.started_s for turn in turns)
    read_s = max(_times_s(turn)[0] for turn in turns) - started_s
    return sum(turn.prompt_tokens - (turn.cached_tokens or 0) for turn in turns) / read_s


def _gaps(turns: Iterable[TurnTrace]) -> Iterator[Window]:
    return (Window(earlier, later) for turn in turns for earlier, later in pairwise(turn.token_times_s))


def _times_s(turn: TurnTrace) -> tuple[float, ...]:
    return turn.token_times_s or (turn.ended_s,)
