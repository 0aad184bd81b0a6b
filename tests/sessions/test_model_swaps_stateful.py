"""A stateful test: swaps, lost engines and aborts lose no turn and change no text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.config.settings import SessionSettings
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.manager import SessionManager
from tests.sessions.conftest import LARGE, TOY, FakeEngines, FakeSink, InlineTemplates
from tests.sessions.oracle import Oracle, script

ADA = Principal("ada", 4, "normal", frozenset({"user"}))


class Recallable(Oracle):
    """An oracle with recall."""

    def recall(self) -> None:
        """Recall all turns without tokens."""
        turns = {**self.waiting, **{turn_id: running.turn for turn_id, running in self.running.items()}}
        for turn_id, turn in turns.items():
            if not turn.n_tokens:
                self.waiting.pop(turn_id, None)
                self.running.pop(turn_id, None)
                turn.resubmit()


class Conversation:
    """One session on two models, of which one is the default."""

    def __init__(self, *, pinned: bool) -> None:
        self.oracles = {
            model.name: Recallable(status=EngineStatus(EngineState.READY, model=model)) for model in (TOY, LARGE)
        }
        self.engines = FakeEngines(engines=dict(self.oracles), default="toy")
        self.sessions = SessionManager(
            engines=self.engines,
            renderers=InlineTemplates(),
            config_params=Params(),
            settings=SessionSettings(max_sessions=9),
        )
        self.sink = FakeSink()
        request = requests.CreateSession(op="create_session", model="toy" if pinned else None)
        self.session_id = self.sessions.create(ADA, request, self.sink).session_id
        self.asked: list[str] = []
        self.aborted: set[int] = set()

    @property
    def session(self) -> events.Session:
        """The session as described to clients."""
        return self.sessions.get(ADA, requests.GetSession(op="get_session", session_id=self.session_id))

    @property
    def is_busy(self) -> bool:
        """Whether a turn is running."""
        return self.session.state == "busy"

    def ask(self) -> None:
        """Send the next question if the session is idle."""
        if not self.is_busy:
            self.asked.append(f"question {len(self.asked)}")
            request = requests.Infer(op="infer", session_id=self.session_id, prompt=self.asked[-1])
            self.sessions.infer(ADA, request, self.sink)

    def work(self) -> None:
        """Step both engines."""
        for oracle in self.oracles.values():
            oracle.step()

    def swap(self) -> None:
        """Make the other model the default."""
        before = self.oracles[self.engines.default]
        self.engines.default = "large" if self.engines.default == "toy" else "toy"
        before.recall()

    def lose(self) -> None:
        """Lose the default's engine."""
        self.oracles[self.engines.default].lose()

    def ready(self) -> None:
        """Start the lost engines."""
        for oracle in self.oracles.values():
            if oracle.status.state is not EngineState.READY:
                oracle.ready()

    def abort(self) -> None:
        """Abort the turn, once."""
        if self.is_busy and len(self.asked) not in self.aborted:
            self.aborted.add(len(self.asked))
            self.sessions.abort(ADA, requests.Abort(op="abort", session_id=self.session_id))

    def finish(self) -> None:
        """Run everything to its end."""
        self.ready()
        for oracle in self.oracles.values():
            oracle.run()

    def check(self) -> None:
        """Check every question, its answer and the prompt that produced it."""
        contents = [message.content for message in self.session.transcript]
        assert contents[::2] == self.asked
        for turn in self.session.turns:
            prompts = [
                oracle.prompts[turn.turn_id] for oracle in self.oracles.values() if turn.turn_id in oracle.prompts
            ]
            answer = contents[turn.messages - 1]
            if turn.finish_reason == "stop":
                assert answer in [script(prompt) for prompt in prompts]
            elif answer:
                assert any(script(prompt).startswith(answer) for prompt in prompts)
            for prompt in prompts:
                place = 0
                for content in contents[: turn.messages - 1]:
                    place = prompt.index(content, place) + len(content)


@given(
    steps=st.lists(st.sampled_from(["ask", "work", "swap", "lose", "ready", "abort"]), max_size=40),
    pinned=st.booleans(),
)
def test_swaps_change_no_text_and_lose_no_turn(steps: list[str], pinned: bool) -> None:
    """Each turn ends once, with its model's answer to the whole conversation."""
    conversation = Conversation(pinned=pinned)
    for step in steps:
        getattr(conversation, step)()
    conversation.finish()
    assert not conversation.is_busy
    assert conversation.sink.ops.count("end") == len(conversation.asked) == len(conversation.session.turns)
    assert "error" not in conversation.sink.ops
    conversation.check()
