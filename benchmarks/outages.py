"""Pauses of streams that lost their engine, and the part of them that loading and prefill explain. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.observed_turn import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A turn, with or without a kill of its engine.

    Attributes:
        times_s: When each piece of its text arrived.
        prompt_tokens: Tokens it read.
        tokens: Tokens it made, as the daemon counts.
        finishes: Its terminal events.
        against_transcript: What the client was shown, against the session's transcript.
        against_undisturbed: The transcript against the same turn without a kill.
        misnumbered: Events whose number did not rise.
    """

    times_s: tuple[float, ...]
    prompt_tokens: int
    tokens: int
    finishes: tuple[str, ...]
    against_transcript: Difference
    against_undisturbed: Difference
    misnumbered: int


@dataclass(frozen=True, slots=True)
class Outage:
    """An engine that was killed, when the one after it was started and when it was ready; ``streams`` ran meanwhile."""

    killed_s: float
    started_s: float
    ready_s: float
    streams: tuple[Stream, ...]

    @property
    def down_s(self) -> float:
        """How long there was no engine."""
        return self.started_s - self.killed_s

    @property
    def load_s(self) -> float:
        """How long the next engine took to load."""
        return self.ready_s - self.started_s

    def gaps_s(self) -> tuple[float, ...]:
        """Return the pause caused by the kill for each stream with text before and after it.

        Text in flight arrives after the kill, so the pause is the longest of those that overlap the time between the
        kill and the next engine's readiness.
        """
        pauses = (_longest(stream.times_s, self.killed_s, self.ready_s) for stream in self.streams)
        return tuple(pause for pause in pauses if pause is not None)

    def waits_s(self) -> tuple[float, ...]:
        """Return, for each stream that had no text yet, the time from the kill to its first."""
        return tuple(
            stream.times_s[0] - self.killed_s
            for stream in self.streams
            if stream.times_s and stream.times_s[0] > self.ready_s
        )

    def tokens_to_read(self) -> float:
        """Return the tokens in the contexts of all running streams: prompts and partial answers."""
        return sum(
            stream.prompt_tokens + stream.tokens * _before(stream.times_s, self.killed_s) / len(stream.times_s)
            for stream in self.streams
            if stream.times_s and stream.times_s[-1] > self.killed_s
        )

    def beyond_s(self, *, prefill_tok_s: float) -> float | None:
        """Return the longest pause less the time of loading and prefill; ``None`` without a pause."""
        pauses = (*self.gaps_s(), *self.waits_s())
        return max(pauses) - self.load_s - self.tokens_to_read() / prefill_tok_s if pauses else None


def _longest(times_s: Sequence[float], from_s: float, to_s: float) -> float | None:
    pauses: Iterable[float] = (
        later - earlier for earlier, later in pairwise(times_s) if later > from_s and earlier < to_s
    )
    return max(pauses, default=None)


def _before(times_s: Sequence[float], at_s: float) -> int:
    return sum(each <= at_s for each in times_s)
