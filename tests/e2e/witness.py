"""A client that lives through everything: what it was shown of one session, checked frame by frame.

Whatever happens to engine, daemon and sockets, a turn has one end, the numbers of events only rise, and what was shown
once is the beginning of what is shown later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from tests.e2e.harness import Message, Talk

_NUMBERED = frozenset({"queued", "progress", "context_shifted", "token", "end", "error", "appended", "session_rewound"})


@dataclass
class Shown:
    """One turn: its text, and the event that ended it once there was one."""

    text: str = ""
    end: Message | None = None


@dataclass
class Witness:
    """Follows a session over any number of sockets; ``asked`` while a question has had no echo."""

    client: Talk
    session_id: str
    epoch: str
    seq: int = 0
    turns: dict[str, Shown] = field(default_factory=dict)
    asked: bool = False

    @classmethod
    async def open(cls, client: Talk, **options: Any) -> Witness:
        """Open a session."""
        created = await client.ask(op="create_session", **options)
        assert created["op"] == "session_created", created
        witness = cls(client, created["session_id"], created["epoch"])
        client.listeners.append(witness.see)
        return witness

    @property
    def last(self) -> Shown:
        """The turn that was heard of last."""
        return list(self.turns.values())[-1]

    @property
    def is_over(self) -> bool:
        """Whether all that was asked has ended, as far as is known."""
        return not self.asked and all(turn.end is not None for turn in self.turns.values())

    @property
    def text(self) -> str:
        """What that turn has said."""
        return self.last.text

    @property
    def end(self) -> Message:
        """The event that ended that turn."""
        assert self.last.end is not None, "it has not ended"
        return self.last.end

    async def infer(self, prompt: str, *, key: str | None = None, n_probs: int | None = None, **params: Any) -> None:
        """Ask, without waiting for anything."""
        self.asked = True
        given = {"turn_key": key, "n_probs": n_probs}
        await self.client.send(
            op="infer",
            session_id=self.session_id,
            prompt=prompt,
            params=params,
            **{name: value for name, value in given.items() if value is not None},
        )

    async def until(self, *ops: str) -> Message:
        """Listen up to the session's next event of one of these kinds."""
        return await self.client.until(
            lambda message: message.get("session_id") == self.session_id and message["op"] in ops
        )

    async def finish(self) -> str:
        """Listen until the running turn is over, well or not, and return its text."""
        while not self.is_over:
            await self.client.receive()
        return self.text

    async def turn(self, prompt: str, **given: Any) -> str:
        """Ask, and return the answer to its end."""
        await self.infer(prompt, **given)
        text = await self.finish()
        assert self.end["op"] == "end", self.end
        return text

    async def drain(self) -> int | None:
        """Listen until the socket is gone, and return its close code if there was one."""
        try:
            while True:
                await self.client.receive()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None

    async def resume(self, client: Talk) -> Message:
        """Come back on another socket, with the position that was reached; return how the daemon took it."""
        self.leave()
        self.client = client
        client.listeners.append(self.see)
        answer = await client.ask(op="resume_session", session_id=self.session_id, epoch=self.epoch, last_seq=self.seq)
        assert answer["op"] == "session_resumed", answer
        return answer

    def leave(self) -> None:
        """Listen to the socket no more."""
        if self.see in self.client.listeners:
            self.client.listeners.remove(self.see)

    async def described(self) -> Message:
        """Ask for the session; what was shown must be what it holds."""
        session = await self.client.ask(op="get_session", session_id=self.session_id)
        assert session["op"] == "session", session
        self._compare(session["transcript"], session["turns"])
        return session

    def see(self, message: Message) -> None:
        """Take a frame, whatever it is about."""
        if message.get("session_id") != self.session_id:
            return
        if message["op"] == "session_resumed":
            self._resumed(message)
        elif message["op"] in _NUMBERED and "seq" in message:
            self._numbered(message)

    def _numbered(self, message: Message) -> None:
        turn_id = message.get("turn_id")
        turn = self.turns.get(turn_id) if turn_id else None
        if turn is not None and turn.end is not None:
            assert message["op"] == "end", f"after its end: {message}"
            assert "seq" not in turn.end or {**turn.end, "id": ""} == {**message, "id": ""}, "a turn has one end"
            turn.end, self.asked = message, False
            return
        is_joined = message["op"] == "token"
        assert message["seq"] > self.seq if is_joined else message["seq"] == self.seq + 1, (self.seq, message)
        self.seq = message["seq"]
        if turn_id is None:
            return
        turn = self.turns.setdefault(turn_id, Shown())
        self.asked = False
        if is_joined:
            turn.text += message["content"]
        elif message["op"] in ("end", "error"):
            turn.end = message

    def _resumed(self, message: Message) -> None:
        if message["resumed"]:
            assert message["epoch"] == self.epoch
            assert message["seq"] >= self.seq
            return
        self.epoch, self.seq = message["epoch"], message["seq"]
        if (turn_id := message.get("turn_id")) is not None:
            turn = self.turns.setdefault(turn_id, Shown())
            assert turn.end is None, "a turn that has ended runs again"
            assert message["content"].startswith(turn.text), (
                f"{turn.text!r} was shown, it is now {message['content']!r}"
            )
            turn.text, self.asked = message["content"], False
        self._compare(message["transcript"], message["turns"])
        forgotten = [
            turn_id for turn_id, turn in self.turns.items() if turn.end is None and turn_id != message.get("turn_id")
        ]
        assert not forgotten, f"turns that were shown have neither ended nor run: {forgotten}"

    def _compare(self, transcript: list[Message], turns: list[Message]) -> None:
        """Hold what was shown against what the session says of its turns, and take over what is new."""
        for told in turns:
            answer = transcript[told["messages"] - 1]["content"]
            turn = self.turns.setdefault(told["turn_id"], Shown())
            if turn.end is None:
                assert answer.startswith(turn.text), f"{turn.text!r} was shown, the answer is {answer!r}"
                turn.text, turn.end, self.asked = answer, {"op": "end", **told}, False
                continue
            assert turn.end["op"] == "end", f"a turn that failed is in the transcript: {turn.end}"
            assert answer == turn.text, f"{turn.text!r} was shown, the answer is {answer!r}"
