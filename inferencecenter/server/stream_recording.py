"""Streams that outlive their connection: their events are kept for a while, so that another request can read on.

All recordings share ``MEMORY_BYTES``, fairly between clients: a client that has more than its share loses its oldest
events. A recording is kept for ``KEPT_S`` after its end.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_S: Final = 300.0
MEMORY_BYTES: Final = 64 * 1024 * 1024
_RECORDING_BYTES: Final = 1024
_EVENT_BYTES: Final = 64
_READ_BYTES: Final = 64 * 1024


class StreamRecording:
    """The events of one stream, numbered from 0.

    Args:
        client_id: The client.
        grown: Called with the size of each event.
    """

    def __init__(self, client_id: str, *, grown: Callable[[StreamRecording, int], None]) -> None:
        self.client_id = client_id
        self.name = ""
        self.n_bytes = _RECORDING_BYTES
        self.finished = False
        self._grown = grown
        self._events: list[bytes] = []
        self._n_dropped = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_events(self) -> bool:
        """Whether any of its events are kept."""
        return bool(self._events)

    def add(self, event: bytes) -> None:
        """Add an encoded event."""
        self._events.append(event)
        self._wake()
        size = _EVENT_BYTES + len(event)
        self.n_bytes += size
        self._grown(self, size)

    def finish(self) -> None:
        """End the stream; see ``StreamRecordings.finish``."""
        self.finished = True
        self._wake()

    def drop_oldest(self) -> int:
        """Drop the oldest half of the events, and return their size."""
        n_oldest = (len(self._events) + 1) // 2
        size = sum(_EVENT_BYTES + len(event) for event in self._events[:n_oldest])
        del self._events[:n_oldest]
        self._n_dropped += n_oldest
        self.n_bytes -= size
        return size

    def read(self, start: int) -> list[bytes]:
        """Return some of the events from a number on, none if there are no more yet.

        Raises:
            InferenceCenterError: ``overloaded`` if some of them were dropped.
        """
        if start < self._n_dropped:
            raise InferenceCenterError(
                ErrorCode.OVERLOADED,
                f"the events up to {self._n_dropped - 1} are not kept any more",
                hint="Retrieve the response without stream.",
                field="starting_after",
            )
        found: list[bytes] = []
        size = 0
        for place in range(start - self._n_dropped, len(self._events)):
            found.append(self._events[place])
            size += len(found[-1])
            if size >= _READ_BYTES:
                break
        return found

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done with the next event, or with the end."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class StreamRecordings:
    """The recordings of all clients.

    Args:
        room_bytes: The memory that they share.
    """

    def __init__(self, room_bytes: int = MEMORY_BYTES) -> None:
        self._share = FairShare(room_bytes)
        self._of_client: defaultdict[str, dict[StreamRecording, None]] = defaultdict(dict)
        self._by_name: dict[tuple[str, str], StreamRecording] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))

    def begin(self, client_id: str) -> StreamRecording:
        """Start the recording of a client's stream."""
        recording = StreamRecording(client_id, grown=self._grow)
        self._of_client[client_id][recording] = None
        self._share.add(client_id, recording.n_bytes)
        return recording

    def publish(self, recording: StreamRecording, name: str) -> None:
        """Have a recording found by a name."""
        recording.name = name
        self._by_name[recording.client_id, name] = recording

    def find(self, client_id: str, name: str) -> StreamRecording | None:
        """Return the recording of a client's stream, if it is kept."""
        return self._by_name.get((client_id, name))

    def finish(self, recording: StreamRecording) -> None:
        """End a stream; its recording is discarded later."""
        recording.finish()
        asyncio.get_running_loop().call_later(KEPT_S, self.discard, recording)

    def discard(self, recording: StreamRecording) -> None:
        """Discard a recording, if it is kept."""
        of_client = self._of_client[recording.client_id]
        if recording in of_client:
            del of_client[recording]
            self._by_name.pop((recording.client_id, recording.name), None)
            self._share.remove(recording.client_id, recording.n_bytes)
        if not of_client:
            del self._of_client[recording.client_id]

    def _grow(self, recording: StreamRecording, size: int) -> None:
        """Count a new event, and drop the oldest events of a client that has more than its share."""
        client_id = recording.client_id
        of_client = self._of_client.get(client_id, {})
        if recording not in of_client:  # discarded before its end
            return
        self._share.add(client_id, size)
        for oldest in of_client:
            while oldest.has_events and not self._share.fits(client_id, 0):
                self._share.remove(client_id, oldest.drop_oldest())
