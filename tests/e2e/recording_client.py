"""A client that checks every frame of one session against what it received before.

Whatever happens to engine, daemon and sockets: a turn ends once, event numbers only rise, and text that was received
stays a prefix of what is received later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from tests.e2e.harness import Message, SocketClient

_NUMBERED = frozenset({"queued", "progress", "context_shifted", "token", "end", "error", "appended", "session_rewound"})


@dataclass
class Shown:
    """A turn as received: its text, and the event that ended it."""

    text: str = ""
    end: Message | None = None


@dataclass
class RecordingClient:
    """Follows a session over any number of sockets; ``asked`` until the submitted prompt is acknowledged."""

    client: SocketClient
    session_id: str
    epoch: str
    seq: int = 0
    turns: dict[str, Shown] = field(default_factory=dict)
    asked: bool = False

    @classmethod
    async def open(cls, client: SocketClient, **options: Any) -> RecordingClient:
        """Create a session."""
        created = await client.ask(op="create_session", **options)
        assert created["op"] == "session_created", created
        recorder = cls(client, created["session_id"], created["epoch"])
        client.listeners.append(recorder.see)
        return recorder

    @property
    def last(self) -> Shown:
        """The turn of the latest event."""
        return list(self.turns.values())[-1]

    @property
    def is_over(self) -> bool:
        """Whether every submitted turn is known to have ended."""
        return not self.asked and all(turn.end is not None for turn in self.turns.values())

    @property
    def text(self) -> str:
        """The text of the latest turn."""
        return self.last.text

    @property
    def end(self) -> Message:
        """The event that ended the latest turn."""
        assert self.last.end is not None, "it has not ended"
        return self.last.end

    async def infer(self, prompt: str, *, key: str | None = None, n_probs: int | None = None, **params: Any) -> None:
        """Submit a prompt without waiting for a reply."""
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
        """Receive frames up to the session's next event of one of these kinds."""
        return await self.client.until(
            lambda message: message.get("session_id") == self.session_id and message["op"] in ops
        )

    async def finish(self) -> str:
        """Receive frames until the running turn has ended or failed, and return its text."""
        while not self.is_over:
            await self.client.receive()
        return self.text

    async def turn(self, prompt: str, **given: Any) -> str:
        """Submit a prompt and return the complete answer."""
        await self.infer(prompt, **given)
        text = await self.finish()
        assert self.end["op"] == "end", self.end
        return text

    async def drain(self) -> int | None:
        """Receive frames until the socket closes, and return its close code if there was one."""
        try:
            while True:
                await self.client.receive()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None

    async def resume(self, client: SocketClient) -> Message:
        """Resume the session on another socket from the last event received; return the daemon's reply."""
        self.leave()
        self.client = client
        client.listeners.append(self.see)
        answer = await client.ask(op="resume_session", session_id=self.session_id, epoch=self.epoch, last_seq=self.seq)
        assert answer["op"] == "session_resumed", answer
        return answer

    def leave(self) -> None:
        """Stop receiving frames of the socket."""
        if self.see in self.client.listeners:
            self.client.listeners.remove(self.see)

    async def described(self) -> Message:
        """Fetch the session and compare it with what was received."""
        session = await self.client.ask(op="get_session", session_id=self.session_id)
        assert session["op"] == "session", session
        self._compare(session["transcript"], session["turns"])
        return session

    def see(self, message: Message) -> None:
        """Check a frame and record it."""
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
            assert turn.end is None, "an ended turn runs again"
            assert message["content"].startswith(turn.text), (
                f"{turn.text!r} was received, it is now {message['content']!r}"
            )
            turn.text, self.asked = message["content"], False
        self._compare(message["transcript"], message["turns"])
        lost = [
            turn_id for turn_id, turn in self.turns.items() if turn.end is None and turn_id != message.get("turn_id")
        ]
        assert not lost, f"turns that were received neither ended nor run: {lost}"

    def _compare(self, transcript: list[Message], turns: list[Message]) -> None:
        """Compare the received turns with the session's, and record the new ones."""
        for summary in turns:
            answer = transcript[summary["messages"] - 1]["content"]
            turn = self.turns.setdefault(summary["turn_id"], Shown())
            if turn.end is None:
                assert answer.startswith(turn.text), f"{turn.text!r} was received, the answer is {answer!r}"
                turn.text, turn.end, self.asked = answer, {"op": "end", **summary}, False
                continue
            assert turn.end["op"] == "end", f"a turn that failed is in the transcript: {turn.end}"
            assert answer == turn.text, f"{turn.text!r} was received, the answer is {answer!r}"
