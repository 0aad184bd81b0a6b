"""What a session is given when it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from inferencecenter.ipc.port import EnginePort
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import Mode, Priority
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


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What never changes about a session.

    ``params`` are effective: no level is left to merge below them. ``chosen`` are those that the client set itself.
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
    on_disconnect: Literal["close", "detach"]
    ttl_s: float | None
    metadata: dict[str, str]
    created_at: float
