"""A turn over real sockets has the daemon's text exactly once, wherever it is disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from websockets import ConnectionClosed

from inferencecenter.client import Client, Timing
from tests.client.model_daemon import ModelDaemon
from tests.client.peer import scripted_daemon

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event
    from tests.client.peer import Peer

_TIMEOUT_S = 60.0
Loss = Literal["kept", "forgotten", "restarted"]


class Disconnect(NamedTuple):
    """The loss of a socket: the number of frames before it, the turn steps until the next socket, and lost state."""

    n_frames: int
    n_steps: int
    loss: Loss


@dataclass
class UnstableDaemon:
    """A daemon whose sockets are disconnected while its turn continues."""

    model: ModelDaemon
    disconnects: list[Disconnect]
    joined: bool
    frames_left: int | None = field(default=None, init=False)

    async def serve(self, peer: Peer) -> None:
        """Serve one socket until it ends."""
        await peer.welcome()
        disconnect = self.disconnects.pop(0) if self.disconnects else None
        self.frames_left = None if disconnect is None else disconnect.n_frames
        with contextlib.suppress(ConnectionClosed):
            while await self._answer(peer) == "create_session" or self.frames_left != 0:
                pass
        if disconnect is not None:
            for _ in range(disconnect.n_steps):
                self.model.step()
            if disconnect.loss != "kept":
                self.model.forget(restarted=disconnect.loss == "restarted")
        peer.socket.transport.abort()

    async def _answer(self, peer: Peer) -> str:
        """Answer one frame, advance the turn, and return the request."""
        frame = await peer.receive()
        match frame["op"]:
            case "create_session":  # always delivered: a client cannot know the outcome of its creation
                created = {"model": "demo", "n_ctx": 1024, "params": {}, "warnings": []}
                await peer.send(op="session_created", id=frame["id"], session_id="s", epoch="e1", **created)
            case "infer":
                await self._publish(peer, *self.model.infer(frame["id"], frame["turn_key"]))
            case "resume_session":
                resumed, *missed = self.model.resume(frame.get("epoch"), frame["last_seq"], joined=self.joined)
                await self._publish(peer, resumed.model_copy(update={"id": frame["id"]}), *missed)
        while self.model.turn is not None and self.frames_left != 0 and frame["op"] != "create_session":
            await self._publish(peer, *self.model.step())
        return str(frame["op"])

    async def _publish(self, peer: Peer, *events: Event) -> None:
        for event in events:
            if self.frames_left == 0:
                return
            if self.frames_left is not None:
                self.frames_left -= 1
            await peer.socket.send(event.model_dump_json(exclude_none=True))


async def run_turn(daemon: UnstableDaemon) -> tuple[str, str | None]:
    """Return a client's text and finish reason of one turn."""

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    async with asyncio.timeout(_TIMEOUT_S), scripted_daemon() as start:
        url = await start(daemon.serve)
        async with Client(
            url, "ic_a_b", timing=Timing(sleep=sleep, random=lambda: 0.0), give_up_after_s=None
        ) as client:
            turn = (await client.create_session()).infer("?")
            pieces = [text async for text in turn]
            assert "".join(pieces) == turn.content
            return turn.content, turn.finish_reason


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.text("abä", min_size=1, max_size=3), max_size=8),
    disconnects=st.lists(
        st.builds(Disconnect, st.integers(0, 6), st.integers(0, 5), st.sampled_from(get_args(Loss))), max_size=5
    ),
    joined=st.booleans(),
)
def test_random_disconnects_lose_and_repeat_nothing(
    pieces: list[str], disconnects: list[Disconnect], joined: bool
) -> None:
    """With replayed events, the current text or the transcript every piece arrives once."""
    daemon = UnstableDaemon(ModelDaemon(pieces), disconnects, joined)
    assert asyncio.run(run_turn(daemon)) == ("".join(pieces), "stop")
    assert daemon.model.turns_begun == 1
