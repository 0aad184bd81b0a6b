"""The engine's loop over a real socket, with the echo backend; and the real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.engine.echo import EchoSampler
from inferencecenter.ipc.engine_child import send_descriptors
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.framing import encode
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import (
    AbortTurn,
    Configure,
    Embed,
    EmbeddingInput,
    Failed,
    Finished,
    LoadFailed,
    Loading,
    LogLine,
    PrefillProgress,
    QueuePosition,
    Ready,
    ReleaseSession,
    Started,
    StepOutput,
    ToEngine,
    TokenDelta,
    unpack_tokens,
)
from tests.engine.harness import TIMEOUT_S, Engine, Front, StandingClock, submit
from tests.engine.process import child_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.protocol.params import Params


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine of two slots with room for endless turns."""
    engine = Engine()
    yield engine
    engine.stop()


def test_embedding_request_on_a_text_model_is_refused(engine: Engine) -> None:
    """Turns are not affected."""
    request = Embed(turn_id="e", client_id="client", priority=1, inputs=(EmbeddingInput("text"),))
    engine.front.send(request, submit("t", "text"))
    engine.front.wait_for("e", "t")
    assert isinstance(refused := engine.front.events["e"][-1], Failed)
    assert (refused.code, refused.field) == ("invalid_request", "model")


def test_turn_is_answered(engine: Engine) -> None:
    """The number of prompt tokens comes first, then the answer, then one end."""
    engine.front.send(submit("t", "Grüße"))
    end = engine.front.finished("t")
    started, *deltas, _ = engine.front.events["t"]
    assert isinstance(started, Started)
    assert bytes(token for token in unpack_tokens(started.tokens) if token < 256).startswith("user\nGrüße".encode())
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    assert engine.front.text("t") == "Grüße"
    assert (end.reason, end.end_text, end.kept_chars, end.kept_tokens) == ("stop", "<|im_end|>", 5, 8)


def test_many_turns_at_once_get_their_own_answers(engine: Engine) -> None:
    """Eight sessions, while two long turns have both slots: each gets its own text, and each turn ends once."""
    long = [submit(f"long{n}", "x" * 10_000) for n in range(2)]
    engine.front.send(*long)
    events = engine.front.events
    engine.front.read_until(lambda: all(turn.turn_id in events for turn in long))
    turns = [submit(f"t{n}", f"words of {n}") for n in range(8)]
    engine.tell(*turns)
    engine.front.read_until(lambda: any(isinstance(event, QueuePosition) for event in events.get("t7", ())))
    engine.front.send(*(AbortTurn(turn.turn_id) for turn in long))
    engine.front.wait_for(*(turn.turn_id for turn in (*turns, *long)))
    for n in range(8):
        assert engine.front.text(f"t{n}") == f"words of {n}"
        assert sum(isinstance(event, Finished) for event in events[f"t{n}"]) == 1
    last = engine.front.frames[-1]
    assert isinstance(last, StepOutput)
    assert (last.running, last.waiting) == (0, 0)
    assert last.rss_bytes > 1_000_000


def test_next_turn_reuses_kv(engine: Engine) -> None:
    """A turn that continues the history decodes only what is new, also with others in between."""
    engine.front.send(submit("one", "first", session="s"))
    history = engine.front.history("one")
    engine.front.send(submit("other", "else"))
    engine.front.wait_for("other")
    engine.front.send(submit("two", "second", session="s", tokens=history))
    end = engine.front.finished("two")
    # The history without its end token, which was sampled and never decoded.
    assert end.cached_tokens == len(history) // 4 - 1
    assert engine.front.text("two") == "second"


def test_released_session_leaves_no_kv(engine: Engine) -> None:
    """After a release the same history is prefilled from its start."""
    engine.front.send(submit("one", "first", session="s"))
    history = engine.front.history("one")
    engine.front.send(ReleaseSession("s"), submit("two", "second", session="s", tokens=history))
    assert engine.front.finished("two").cached_tokens == 0


def test_running_turn_can_be_aborted(engine: Engine) -> None:
    """The partial answer stays, and the other turn continues."""
    engine.front.send(submit("long", "ab", params=b'{"ignore_eos":true}'), submit("other", "fine"))
    engine.front.read_until(lambda: "long" in engine.front.events and bool(engine.front.text("long")))
    engine.front.send(AbortTurn("long"))
    end = engine.front.finished("long")
    assert end.reason == "aborted"
    assert end.kept_chars == len(engine.front.text("long")) == end.kept_tokens
    assert engine.front.finished("other").reason == "stop"


def test_waiting_turn_can_be_aborted() -> None:
    """It never ran, and ends with its prompt's length and no tokens."""
    engine = Engine(quantum_tokens=1_000_000)
    engine.front.send(*(submit(name, "ab", params=b'{"ignore_eos":true}') for name in ("x", "y")))
    engine.front.read_until(lambda: bool(engine.front.text("x") and engine.front.text("y")))
    engine.front.send(submit("waits", "text"))
    engine.front.read_until(lambda: "waits" in engine.front.events)
    engine.front.send(AbortTurn("waits"))
    end = engine.front.finished("waits")
    assert (end.reason, end.generated_tokens) == ("aborted", 0)
    engine.front.send(ReleaseSession("x"), AbortTurn("y"))
    assert engine.front.finished("x").reason == engine.front.finished("y").reason == "aborted"
    engine.stop()


@pytest.mark.parametrize("command", [AbortTurn("t"), ReleaseSession("s")])
def test_turn_can_be_aborted_during_tokenization(engine: Engine, command: ToEngine) -> None:
    """It ends at once; its tokens are dropped when they arrive, and the session stays usable."""
    engine.backend.tokenizing["slow"] = threading.Event()
    engine.front.send(submit("t", "slow", session="s"), command)
    assert engine.front.finished("t").reason == "aborted"
    engine.backend.tokenizing["slow"].set()
    engine.front.send(submit("next", "text", session="s"))
    engine.front.finished("next")
    assert engine.front.text("next") == "text"
    assert len(engine.front.events["t"]) == 1


def test_turns_of_a_session_keep_their_order(engine: Engine) -> None:
    """A turn that is tokenized faster does not overtake its predecessor, but may overtake other sessions' turns."""
    engine.backend.tokenizing["slow"] = threading.Event()
    engine.front.send(submit("one", "slow", session="s"), submit("two", "fast", session="s"), submit("other", "x"))
    engine.front.wait_for("other")
    assert "two" not in engine.front.events
    engine.backend.tokenizing["slow"].set()
    engine.front.wait_for("one", "two")
    order = [
        (event.turn_id, type(event))
        for frame in engine.front.frames
        if isinstance(frame, StepOutput)
        for event in frame.events
    ]
    assert order.index(("two", Started)) > order.index(("one", Finished))


def test_tokenization_error_fails_only_its_turn(engine: Engine) -> None:
    """The turn fails with internal, the log has the reason, others run."""
    engine.front.send(submit("bad", "unspeakable"), submit("good", "text"))
    engine.front.wait_for("bad", "good")
    (failure,) = engine.front.events["bad"]
    assert isinstance(failure, Failed)
    assert failure.code == "internal"
    assert LogLine("error", "preparing a turn failed: RuntimeError('no token for it')", "engine") in engine.front.frames
    assert engine.front.text("good") == "text"


def test_oversized_prompt_fails() -> None:
    """The error has the length of the prompt and of the context."""
    engine = Engine(n_ctx=200)
    engine.front.send(submit("t", "x" * 200))
    engine.front.wait_for("t")
    engine.stop()
    (failure,) = engine.front.events["t"]
    assert isinstance(failure, Failed)
    assert failure.code == "prompt_too_long"
    assert "maximum context length is 200 tokens" in failure.message


def test_refused_parameter_fails_the_turn(engine: Engine) -> None:
    """The backend's refusal names the field, and the slot is free again."""
    engine.front.send(submit("t", "x", params=b'{"logit_bias":{"1":2.0}}'), submit("next", "text"))
    engine.front.wait_for("t", "next")
    failure = engine.front.events["t"][-1]
    assert isinstance(failure, Failed)
    assert (failure.code, failure.field) == ("invalid_request", "params.logit_bias")


def test_long_prompt_reports_progress() -> None:
    """Each chunk but the last reports the progress; if no time passes, no speed is learned."""
    engine = Engine(prefill_grid_tokens=16, clock=StandingClock())
    engine.front.send(submit("t", "x" * 60, params=b'{"max_tokens":1}'))
    total = engine.front.finished("t").prompt_tokens
    done = [(event.done, event.total) for event in engine.front.events["t"] if isinstance(event, PrefillProgress)]
    engine.stop()
    assert done == [(position, total) for position in range(16, total, 16)]


def test_deadline_ends_running_and_waiting_turns() -> None:
    """Turns end with reason time wherever they are; the answer so far is kept."""
    engine = Engine(slots=1)
    limited = b'{"ignore_eos":true,"max_time_ms":50}'
    engine.front.send(submit("runs", "ab", params=limited), submit("waits", "ab", params=limited))
    runs, waits = engine.front.finished("runs"), engine.front.finished("waits")
    engine.stop()
    assert runs.reason == waits.reason == "time"
    assert runs.kept_tokens == runs.generated_tokens == len(engine.front.text("runs"))


def test_one_step_is_one_frame(engine: Engine) -> None:
    """Two turns that decode together send their tokens together, in slot order."""
    engine.front.send(submit("a", "ab", params=b'{"ignore_eos":true}'))
    engine.front.read_until(lambda: "a" in engine.front.events)  # it has the first slot
    engine.front.send(submit("b", "ab", params=b'{"ignore_eos":true}'))

    def together() -> bool:
        steps = [frame.events for frame in engine.front.frames if isinstance(frame, StepOutput)]
        return any(
            [(event.turn_id, type(event)) for event in events] == [("a", TokenDelta), ("b", TokenDelta)]
            for events in steps
        )

    engine.front.read_until(together)
    engine.front.send(AbortTurn("a"), AbortTurn("b"))
    engine.front.wait_for("a", "b")


def test_closed_pipe_ends_the_loop_during_a_turn() -> None:
    """The loop ends with running and waiting turns, and frees its samplers."""
    engine = Engine(slots=1)
    engine.front.send(*(submit(name, "ab", params=b'{"ignore_eos":true}') for name in ("x", "y")))
    engine.front.read_until(lambda: "x" in engine.front.events)
    engine.stop()
    assert not any(thread.name.startswith("worker") for thread in threading.enumerate())


def test_process_serves_until_its_pipe_closes() -> None:
    """It reports that it is ready, ignores signals meant for the front, answers, and exits when the pipe closes."""
    child = child_of(EngineOptions(backend="echo", parent_pid=os.getpid(), slots=2))
    child.front.read_until(lambda: any(isinstance(frame, Ready) for frame in child.front.frames))
    assert child.front.frames[0] == Loading(0.0)
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    child.front.send(submit("t", "still here"))
    child.front.finished("t")
    assert child.front.text("t") == "still here"
    child.front.close()
    assert child.wait() == 0


STUCK = """
import socket, sys, threading
from inferencecenter.engine.inbox import Inbox, watch
from inferencecenter.ipc.framing import BlockingChannel
watch(BlockingChannel(socket.socket(fileno=int(sys.argv[1]))), Inbox())
threading.Event().wait()
"""


def test_process_with_a_stuck_main_thread_exits_with_its_pipe() -> None:
    """A hanging load or decode does not keep the process alive."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    ours.close()
    assert process.wait(TIMEOUT_S) == 0


def send_heartbeat(ours: socket.socket) -> None:
    """Send what an engine receives before its options."""
    heartbeat = Heartbeat.create()
    send_descriptors(ours, (heartbeat.fd,))
    heartbeat.close()


@pytest.mark.parametrize("option", ["backend", "kv_adopt", "kv_type_k", "split_mode", "abacus"])
def test_unknown_options_are_refused(option: str) -> None:
    """They are refused before anything is loaded, with the option's name and the exit status of the error."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "inferencecenter.engine", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    send_heartbeat(ours)
    front = Front(ours)
    front.send(Configure(msgspec.json.encode({"backend": "echo", "parent_pid": os.getpid(), option: "bead"})))
    front.read_until(lambda: len(front.frames) > 0)
    (refusal,) = front.frames
    assert isinstance(refusal, LoadFailed)
    assert refusal.code == "invalid_config"
    assert option in refusal.message
    front.close()
    assert process.wait(TIMEOUT_S) == 78


def test_orphan_does_not_start() -> None:
    """If the parent is not the one that started it, the process exits before it loads anything."""
    child = child_of(EngineOptions(backend="echo", parent_pid=1))
    assert child.wait() == os.EX_UNAVAILABLE
    child.front.close()


def test_process_requires_its_options_first() -> None:
    """The first frame must be Configure."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "inferencecenter.engine", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    send_heartbeat(ours)
    ours.sendall(encode(AbortTurn("t")))
    assert process.wait(TIMEOUT_S) == os.EX_PROTOCOL
    ours.close()


def test_turn_with_delayed_tokens_does_not_block_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other turns run meanwhile; it can be aborted, and continues when it is due."""
    samplers: dict[str, EchoSampler] = {}

    def sampler(params: Params, prompt: Sequence[int], answer: Sequence[int], constraint: object) -> EchoSampler:
        made = EchoSampler(engine.backend, params, prompt)
        text = bytes(made.rest[:-1]).decode()
        made.wait_s = 0.0 if text == "fast" else 60.0
        return samplers.setdefault(text, made)

    monkeypatch.setattr(engine.backend, "sampler", sampler)
    engine.front.send(submit("slow", "slow"), submit("late", "late"))
    engine.front.read_until(lambda: {"slow", "late"} <= engine.front.events.keys())
    engine.front.send(AbortTurn("slow"), submit("fast", "fast"))
    assert engine.front.finished("slow").reason == "aborted"
    assert engine.front.finished("fast").reason == "stop"
    assert engine.front.text("late") == ""
    samplers["late"].wait_s = 0.0
    assert engine.front.finished("late").reason == "stop"
    assert engine.front.text("late") == "late"
