"""What the scheduler decides for one step, and what the executor tells it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferencecenter.engine.backend import Chunk


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep the first ``n_tokens`` of a slot; ``turn_id`` is the turn that builds on them, if one does."""

    slot: int
    n_tokens: int
    turn_id: str | None


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the sequences of two slots. ``turn_a`` runs in ``a`` before and in ``b`` after it, ``turn_b`` likewise."""

    a: int
    b: int
    turn_a: str | None
    turn_b: str | None


@dataclass(frozen=True, slots=True)
class Admission:
    """A turn gets a slot; ``cached_tokens`` of its ``prompt`` are there already."""

    turn_id: str
    prompt: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """A turn's chunk in a decode pass."""

    turn_id: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Pass:
    """One ``Backend.decode``: chunks of equal length in ascending slots, at most one a slot.

    ``prefill`` tells reading prompts from generating.
    """

    rows: tuple[Row, ...]
    prefill: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: truncate, then swap, then admit, then decode pass after pass.

    The chunks' slots are those after the swaps. ``reasons`` says in words why.
    """

    truncations: tuple[Truncation, ...] = ()
    swaps: tuple[Swap, ...] = ()
    admissions: tuple[Admission, ...] = ()
    passes: tuple[Pass, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a plan, by turn id.

    ``decoded`` counts the tokens that went into KV. ``emptied`` turns lost the KV they were to build on and read their
    prompt from its start; ``wiped`` slots, numbered as after the swaps, lost an idle session's KV. ``ended`` turns are
    over; of them the ``lost`` ones left no KV behind. ``prefill_s`` is what reading ``prefill_tokens`` took,
    ``decode_s`` the pass of those that generate.
    """

    decoded: Mapping[str, int] = field(default_factory=dict)
    sampled: Mapping[str, int] = field(default_factory=dict)
    emptied: frozenset[str] = frozenset()
    wiped: frozenset[int] = frozenset()
    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """``done`` of ``total`` prompt tokens of a turn are in KV, and more is to be read."""

    turn_id: str
    done: int
    total: int
