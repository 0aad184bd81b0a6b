"""Heartbeats of one end of a connection between machines, and how it finds out that the other end is silent.

Silence is counted in checks in which nothing was received, not in seconds: an end that was itself suspended has missed
one in that time. None counts in which this end does not read, because what is not read may be heartbeats.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inferencecenter.ipc.link import BEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.channel import Channel


class Keepalive:
    """The heartbeats of this end.

    Args:
        channel: The connection.
        beat: Sends a heartbeat; called once in ``BEAT_S``.
        lost_after_s: Returns after which time without a message the connection is lost.
        checks_per_beat: Checks for silence in ``BEAT_S``. With more than one, silence is found up to a check earlier
            than its time, instead of up to one later.
    """

    def __init__(
        self,
        channel: Channel[Any, Any],
        *,
        beat: Callable[[], None],
        lost_after_s: Callable[[], float],
        checks_per_beat: int = 1,
    ) -> None:
        self._channel = channel
        self._beat = beat
        self._lost_after_s = lost_after_s
        self._checks_per_beat = checks_per_beat
        self._missed = 0

    def received(self) -> None:
        """Record a message of the other end."""
        self._missed = 0

    async def run(self) -> str:
        """Exchange heartbeats until the connection is lost, and return the cause; one that is silent is dropped."""
        check_s = BEAT_S / self._checks_per_beat
        early = min(1, self._checks_per_beat - 1)
        for check in itertools.count(1):
            self._missed = 0 if self._channel.is_paused else self._missed + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(check_s):
                    return await self._channel.lost()
            if (self._missed + early) * check_s >= self._lost_after_s():
                break
            if check % self._checks_per_beat == 0:
                self._beat()
        fault = f"no heartbeat for {self._lost_after_s():g} s"
        self._channel.give_up(fault)  # its loss is not waited for: without a TLS handshake there is none
        return fault
