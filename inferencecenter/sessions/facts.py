"""What a session is given when it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from inferencecenter.protocol.params import cross_check

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import datetime

    from inferencecenter.ipc.port import EnginePort
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import Mode, OnFull, Priority
    from inferencecenter.sessions.totals import TokenMeter, TurnRecord


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a session needs of the world. ``clock`` is Unix seconds, ``monotonic`` seconds that only rise."""

    engine: EnginePort
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    local_time: Callable[[], datetime]
    new_id: Callable[[str], str]
    new_seed: Callable[[], int]
    meter: TokenMeter
    eta_ms: Callable[[int], float | None]
    turn_ended: Callable[[TurnRecord], None]
    max_transcript_chars: int
    shared_prompts: frozenset[str]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What never changes about a session.

    ``params`` are effective: no level is left to merge below them. ``chosen`` are those that the client set itself.
    Without ``store`` nothing of the session may be written to a disk.
    """

    session_id: str
    epoch: str
    client_id: str
    mode: Mode
    model: str
    n_ctx: int
    params: Params
    chosen: frozenset[str]
    priority: Priority
    on_full: OnFull
    on_disconnect: Literal["close", "detach"]
    store: bool
    ttl_s: float | None
    metadata: dict[str, str]
    created_at: float

    def warnings(self, params: Params, *, chosen: Collection[str]) -> tuple[str, ...]:
        """Return a sentence for each of the ``chosen`` that has no effect.

        Raises:
            InferenceCenterError: ``invalid_request`` for two parameters that exclude each other.
        """
        warnings = cross_check(params, given=chosen)
        if self.on_full == "stop" and "n_keep" in chosen:
            warnings = (*warnings, "n_keep has no effect: on_full is stop.")
        return warnings
