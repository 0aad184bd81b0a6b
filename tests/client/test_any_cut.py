"""Whatever is cut, and wherever, a turn over real sockets has the text that the daemon said, once."""

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
Fate = Literal["kept", "forgotten", "restarted"]


class Cut(NamedTuple):
    """The loss of a socket: after so many frames, so many steps of the turn before the next one, and what else."""

    n_frames: int
    n_steps: int
    fate: Fate


@dataclass
class FrailDaemon:
    """A daemon whose sockets are cut, and which goes on meanwhile."""

    model: ModelDaemon
    cuts: list[Cut]
    joined: bool
    left: int | None = field(default=None, init=False)

    async def serve(self, peer: Peer) -> None:
        """Follow one socket to its end."""
        await peer.welcome()
        cut = self.cuts.pop(0) if self.cuts else None
        self.left = None if cut is None else cut.n_frames
        with contextlib.suppress(ConnectionClosed):
            while await self._answer(peer) == "create_session" or self.left != 0:
                pass
        if cut is not None:
            for _ in range(cut.n_steps):
                self.model.step()
            if cut.fate != "kept":
                self.model.forget(restarted=cut.fate == "restarted")
        peer.socket.transport.abort()

    async def _answer(self, peer: Peer) -> str:
        """Answer one frame, go on with the turn if there is one, and return what was asked."""
        frame = await peer.hear()
        match frame["op"]:
            case "create_session":  # has arrived always: who makes one cannot know what became of it
                created = {"model": "demo", "n_ctx": 1024, "params": {}, "warnings": []}
                await peer.say(op="session_created", id=frame["id"], session_id="s", epoch="e1", **created)
            case "infer":
                await self._tell(peer, *self.model.infer(frame["id"], frame["turn_key"]))
            case "resume_session":
                resumed, *missed = self.model.resume(frame.get("epoch"), frame["last_seq"], joined=self.joined)
                await self._tell(peer, resumed.model_copy(update={"id": frame["id"]}), *missed)
        while self.model.turn is not None and self.left != 0 and frame["op"] != "create_session":
            await self._tell(peer, *self.model.step())
        return str(frame["op"])

    async def _tell(self, peer: Peer, *events: Event) -> None:
        for event in events:
            if self.left == 0:
                return
            if self.left is not None:
                self.left -= 1
            await peer.socket.send(event.model_dump_json(exclude_none=True))


async def ask(daemon: FrailDaemon) -> tuple[str, str | None]:
    """Return what a client has of one turn: its text and why it ended."""

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
    cuts=st.lists(st.builds(Cut, st.integers(0, 6), st.integers(0, 5), st.sampled_from(get_args(Fate))), max_size=5),
    joined=st.booleans(),
)
def test_any_cut_and_the_same_text(pieces: list[str], cuts: list[Cut], joined: bool) -> None:
    """With the missing events, what was said so far, or the transcript: no piece is missing and none comes twice."""
    daemon = FrailDaemon(ModelDaemon(pieces), cuts, joined)
    assert asyncio.run(ask(daemon)) == ("".join(pieces), "stop")
    assert daemon.model.turns_begun == 1
