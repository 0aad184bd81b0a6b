"""Jobs of the load generator and their results: one JSON object per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from benchmarks.target import USUAL_TEMPERATURE, AbortTrace, TargetSpec, TurnTrace

if TYPE_CHECKING:
    from collections.abc import Sequence


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clients that each start their next turn when the last one ends.

    Each begins with a warm-up turn, of a length of its own so that they do not stay in step; when the last warm-up is
    over, turns are started for ``duration_s`` more, at least two by each client. Each conversation has ``turns_each``
    turns. The ``temperature`` is that of ``Work``.
    """

    target: TargetSpec
    clients: int
    prompt_tokens: int
    max_tokens: int
    duration_s: float
    first_seed: int
    turns_each: int = 1
    temperature: float = USUAL_TEMPERATURE


class TurnSize(msgspec.Struct, frozen=True):
    """Prompt and answer of a turn; the ``image`` is as in ``Work``."""

    prompt_tokens: int
    max_tokens: int
    image: bool = False


class Round(TurnSize, frozen=True):
    """One turn of each client, started at the same moment.

    ``clients`` are the numbers of those that take part, counted from 0; all if unset. With ``at_once`` only that many
    begin, the lowest numbers first, and as many again when all of them have ended. All prompts begin with the same
    ``opening_tokens``, which are part of their tokens.
    """

    clients: tuple[int, ...] | None = None
    at_once: int | None = None
    opening_tokens: int = 0

    def active_clients(self, n_clients: int) -> tuple[int, ...]:
        """Return the numbers of the participating clients."""
        return tuple(range(n_clients)) if self.clients is None else self.clients


class Rounds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Turns that clients start together, round after round; with ``continues`` each stays in its conversation.

    With ``pinned`` client i requests slot i from servers that support this. ``warm_up`` is a turn of every client
    before the first round, in a conversation of its own.
    """

    target: TargetSpec
    clients: int
    rounds: tuple[Round, ...]
    continues: bool
    first_seed: int
    pinned: bool = False
    warm_up: TurnSize | None = None


class Arrival(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``streams`` clients start a turn each; when each has ``after_tokens`` pieces of text, another client starts one.

    The newcomer is the last client of the answer. ``warm_up`` is as in ``Rounds``.
    """

    target: TargetSpec
    streams: int
    stream: TurnSize
    newcomer: TurnSize
    after_tokens: int
    warm_up: TurnSize
    first_seed: int


class Aborts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clients that each abort ``count`` turns: after a number of pieces of text, or during prefill."""

    target: TargetSpec
    clients: int
    count: int
    prompt_tokens: int
    max_tokens: int
    after_tokens: int | None
    first_seed: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open more connections to a daemon, each with a number of sessions, and keep them until ``Release``."""

    target: TargetSpec
    connections: int
    sessions_each: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Close what is held."""


Job: TypeAlias = ClosedLoop | Rounds | Arrival | Aborts | Hold | Release


class Turns(msgspec.Struct, frozen=True, tag=True):
    """The turns of each client, in order; ``cpu_s`` is what the generator used for them and for their warm-up.

    The warm-up of a closed loop is among the turns, that of other jobs is not.
    """

    clients: tuple[tuple[TurnTrace, ...], ...]
    cpu_s: float

    def by_round(self, rounds: Sequence[Round]) -> tuple[tuple[TurnTrace, ...], ...]:
        """Return the turns of each round, in the order of their clients, of a job that had these rounds."""
        coming = [iter(turns) for turns in self.clients]
        return tuple(tuple(next(coming[index]) for index in each.active_clients(len(self.clients))) for each in rounds)


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The aborted turns of all clients."""

    traces: tuple[AbortTrace, ...]
    cpu_s: float


class Holding(msgspec.Struct, frozen=True, tag=True):
    """The number of open connections."""

    connections: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job could not be done; ``code`` is an ``errors.ErrorCode`` value."""

    code: str
    message: str
    hint: str | None


Answer: TypeAlias = Turns | Aborted | Holding | Failed
