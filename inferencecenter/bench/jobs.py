"""What the measuring process asks of the load generator, and what it answers: one JSON object a line."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from inferencecenter.bench.target import AbortTrace, TargetSpec, TurnTrace


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clients that each start their next turn when the last one ends.

    Each begins with a warm-up turn, of a length of its own so that they do not stay in step; when the last warm-up is
    over, turns are started for ``duration_s`` more.
    """

    target: TargetSpec
    clients: int
    prompt_tokens: int
    max_tokens: int
    duration_s: float
    first_seed: int


class Round(msgspec.Struct, frozen=True):
    """One turn that every client starts at the same moment."""

    prompt_tokens: int
    max_tokens: int


class Rounds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Turns that all clients start together, round after round; with ``continues`` each stays in its conversation."""

    target: TargetSpec
    clients: int
    rounds: tuple[Round, ...]
    continues: bool
    first_seed: int


class Aborts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clients that each abort ``count`` turns: after so many pieces of text, or while the prompt is read."""

    target: TargetSpec
    clients: int
    count: int
    prompt_tokens: int
    max_tokens: int
    after_tokens: int | None
    first_seed: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open more connections to a daemon, each with so many sessions, and keep them until ``Release``."""

    target: TargetSpec
    connections: int
    sessions_each: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Close what is held."""


Job: TypeAlias = ClosedLoop | Rounds | Aborts | Hold | Release


class Turns(msgspec.Struct, frozen=True, tag=True):
    """The turns of each client, in order, warm-up first; ``cpu_s`` is what the generator used for them."""

    clients: tuple[tuple[TurnTrace, ...], ...]
    cpu_s: float


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The aborted turns of all clients."""

    traces: tuple[AbortTrace, ...]
    cpu_s: float


class Holding(msgspec.Struct, frozen=True, tag=True):
    """So many connections are open now."""

    connections: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job could not be done; ``code`` is an ``errors.ErrorCode`` value."""

    code: str
    message: str
    hint: str | None


Answer: TypeAlias = Turns | Aborted | Holding | Failed
