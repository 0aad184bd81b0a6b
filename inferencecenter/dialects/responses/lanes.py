"""The lanes of a socket: in each, one response after the other; different ones go on at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.dialects.responses.requests import CreateOnSocket
    from inferencecenter.dialects.responses.voice import Voice

MAX_LANES: Final = 16
"""Lanes of one socket in which something runs or waits."""
MAX_WAITING: Final = 64
"""Requests of one socket that wait for others of their lanes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, and how many bytes it takes."""

    request: CreateOnSocket
    n_bytes: int


@dataclass(slots=True)
class Lane:
    """One lane: what runs in it, and what waits for that."""

    stream_id: str | None
    voice: Voice | None = None
    waiting: deque[Waiting] = field(default_factory=deque)


class Lanes:
    """All lanes of one socket in which something runs or waits.

    Args:
        max_waiting_bytes: What requests that wait may take together.
    """

    def __init__(self, *, max_waiting_bytes: int) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._lanes: dict[str | None, Lane] = {}
        self._n_waiting = 0
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def active(self) -> list[Lane]:
        """All lanes."""
        return list(self._lanes.values())

    @property
    def voices(self) -> list[Voice]:
        """What runs."""
        return [lane.voice for lane in self._lanes.values() if lane.voice is not None]

    def find(self, stream_id: str | None) -> Voice | None:
        """Return what runs in a lane."""
        lane = self._lanes.get(stream_id)
        return None if lane is None else lane.voice

    def queue(self, request: CreateOnSocket, *, n_bytes: int) -> Lane:
        """Have a request wait for its turn in its lane, and return that.

        Raises:
            InferenceCenterError: ``websocket_stream_limit_reached``.
        """
        lane = self._lanes.get(request.stream_id)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise InferenceCenterError(
                    ErrorCode.STREAM_LIMIT,
                    f"responses run in {MAX_LANES} lanes of this socket, as many as may",
                    hint="Wait for the end of one, or use another socket.",
                    field="stream_id",
                )
            lane = self._lanes[request.stream_id] = Lane(request.stream_id)
        elif self._n_waiting >= MAX_WAITING or self._n_bytes + n_bytes > self._max_waiting_bytes:
            raise InferenceCenterError(
                ErrorCode.STREAM_LIMIT,
                f"{self._n_waiting} requests wait on this socket, with {self._n_bytes} bytes",
                hint="Wait for the end of some, or use other lanes or another socket.",
                field="stream_id",
            )
        lane.waiting.append(Waiting(request, n_bytes))
        self._n_waiting += 1
        self._n_bytes += n_bytes
        return lane

    def take(self, lane: Lane) -> CreateOnSocket | None:
        """Return the next request of a lane in which nothing runs; a lane without any is gone."""
        if lane.voice is not None:
            return None
        if not lane.waiting:
            self._lanes.pop(lane.stream_id, None)
            return None
        waiting = lane.waiting.popleft()
        self._n_waiting -= 1
        self._n_bytes -= waiting.n_bytes
        return waiting.request

    def give_up(self) -> list[CreateOnSocket]:
        """Let nothing wait any more; return what did."""
        given_up = [waiting.request for lane in self._lanes.values() for waiting in lane.waiting]
        for lane in list(self._lanes.values()):
            lane.waiting.clear()
            if lane.voice is None:
                del self._lanes[lane.stream_id]
        self._n_waiting = self._n_bytes = 0
        return given_up
