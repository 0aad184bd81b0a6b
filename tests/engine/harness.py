"""An engine's loop on a thread over a real socket, with the echo backend, and the front at the other end."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inferencecenter.engine.echo import EchoBackend
from inferencecenter.engine.inbox import FrontDisconnected, Inbox, KvFetched, ReceivedCommand
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.loop import EngineLoop
from inferencecenter.engine.output_processor import OutputProcessor
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.framing import BlockingChannel, encode, from_engine_decoder
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import (
    Configure,
    ContextFull,
    Failed,
    Finished,
    FromEngine,
    PromptSegment,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    TokenDelta,
    TurnEvent,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.protocol import params as turn_params
from tests.engine.parked import MIB, open_store
from tests.leftovers import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.output_processor import Detokenizer

TIMEOUT_S = 60  # only a hang takes so long, even on a busy machine


def submit(
    turn_id: str,
    text: str,
    *,
    session: str = "",
    client: str = "client",
    tokens: bytes = b"",
    params: bytes = b"{}",
    priority: int = 1,
    answer: bytes = b"",
    shown_chars: int = 0,
    may_shift: bool = False,
) -> Submit:
    """Return a chat turn; the session is named like the turn if not given."""
    pieces = (
        PromptSegment("<|im_start|>user\n", special=True),
        PromptSegment(text),
        PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
    )
    return Submit(
        turn_id=turn_id,
        session_id=session or turn_id,
        client_id=client,
        priority=priority,
        tokens=tokens,
        pieces=pieces,
        params_json=params,
        answer=answer,
        shown_chars=shown_chars,
        may_shift=may_shift,
    )


def output_of_turn(
    turn: Submit,
    vocabulary: Detokenizer,
    *,
    prompt_tokens: int = 10,
    n_ctx: int = 100,
    submitted_s: float = 0.0,
    queue_timeout_s: float = math.inf,
    clock: Callable[[], float] = time.thread_time,
) -> OutputProcessor:
    """Return the output of a turn, as it is after tokenization."""
    return OutputProcessor(
        turn,
        vocabulary,
        params=turn_params.decode(turn.params_json),
        prompt_tokens=prompt_tokens,
        n_ctx=n_ctx,
        submitted_s=submitted_s,
        answer=unpack_tokens(turn.answer),
        queue_timeout_s=queue_timeout_s,
        clock=clock,
    )


class Front:
    """The other end of the socket: sends commands and collects events by turn."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        self._connection = connection
        self._decoder = from_engine_decoder()
        self.frames: list[FromEngine] = []
        self.events: dict[str, list[TurnEvent]] = {}

    def send(self, *messages: ToEngine) -> None:
        """Send frames in one piece."""
        self._connection.sendall(b"".join(map(encode, messages)))

    def read_until(self, done: Callable[[], bool]) -> None:
        """Read frames until a condition holds."""
        while not done():
            data = self._connection.recv(65_536)
            assert data, "the engine is gone"
            for frame in self._decoder.feed(data):
                self.frames.append(frame)
                for event in frame.events if isinstance(frame, StepOutput) else ():
                    self.events.setdefault(event.turn_id, []).append(event)

    def ended(self, turn_id: str) -> bool:
        """Return whether a turn's terminal event has arrived."""
        events = self.events.get(turn_id, ())
        return any(isinstance(event, Finished | Failed | ContextFull) for event in events)

    def wait_for(self, *turn_ids: str) -> None:
        """Read until these turns have ended."""
        self.read_until(lambda: all(self.ended(turn_id) for turn_id in turn_ids))

    def text(self, turn_id: str) -> str:
        """Return a turn's text."""
        return "".join(event.text for event in self.events.get(turn_id, ()) if isinstance(event, TokenDelta))

    def finished(self, turn_id: str) -> Finished:
        """Return how a turn ended."""
        self.wait_for(turn_id)
        last = self.events[turn_id][-1]
        assert isinstance(last, Finished), last
        return last

    def history(self, turn_id: str) -> bytes:
        """Return the tokens that the turn leaves in its session's history."""
        end = self.finished(turn_id)
        events = self.events[turn_id]
        prompt = next(event.tokens for event in events if isinstance(event, Started))
        answer = b"".join(event.tokens for event in events if isinstance(event, TokenDelta))
        return prompt + pack_tokens(unpack_tokens(answer)[: end.kept_tokens])

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class SlowEcho(EchoBackend):
    """An echo backend that tokenizes and decodes only as the test allows; ``entered`` is set by its first decode.

    ``tokenized`` are the texts of all pieces that it was given.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, sleep=self._wait)
        self.tokenizing: dict[str, threading.Event] = {}
        self.tokenized: list[str] = []
        self.entered = threading.Event()
        self.decoding = threading.Event()
        self.decoding.set()

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Tokenize, waiting for the event of this text if there is one; refuse the text ``unspeakable``."""
        text = pieces[1].text if len(pieces) > 1 else ""
        if text == "unspeakable":
            raise RuntimeError("no token for it")
        if text in self.tokenizing:
            assert self.tokenizing[text].wait(TIMEOUT_S)
        tokens = super().tokenize(pieces, first=first, after=after)
        self.tokenized += (piece.text for piece in pieces)
        return tokens

    def _wait(self, seconds: float) -> None:
        self.entered.set()
        assert self.decoding.wait(TIMEOUT_S)


class StandingClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


class Engine:
    """A loop on a thread, the front at the other end of its socket; it parks in the directory ``kv``, if given one.

    It saves what slots hold when nothing came in for ``quiet_s``. One that a test leaves running is stopped after it.
    """

    def __init__(
        self,
        kv: Path | None = None,
        *,
        ram_bytes: int = MIB,
        disk_bytes: int = 0,
        adopt: RecoveryMode = RecoveryMode.ALL,
        on_log: Callable[[str, str], None] = lambda level, text: None,
        quiet_s: float = 1000.0,
        clock: Callable[[], float] = time.monotonic,
        **options: float,
    ) -> None:
        ours, theirs = socket.socketpair()
        settings: dict[str, float] = {
            "slots": 2,
            "n_ctx": 50_000,
            "prefill_grid_tokens": 64,
            "echo_delay_ms": 1,
        } | options
        configured = EngineOptions(backend="echo", parent_pid=0, **settings)
        self.backend = SlowEcho(configured)
        self.front = Front(theirs)
        self._pipe = BlockingChannel(ours)
        self._inbox = Inbox()
        self._clock = clock
        self._n_received = 0
        self._is_stopped = False
        self.kv = open_store(
            self.backend,
            kv or Path(),
            ram_bytes=0 if kv is None else ram_bytes,
            disk_bytes=0 if kv is None else disk_bytes,
            adopt=adopt,
            on_log=on_log,
            on_fetched=lambda: self._inbox.put(KvFetched()),
        )
        self._held = ExitStack()
        self.heartbeat = Heartbeat.create()
        self._held.callback(self.heartbeat.close)
        self.loop = EngineLoop(
            self.backend,
            configured,
            kv=self.kv,
            inbox=self._inbox,
            heartbeat=self.heartbeat,
            send=self._pipe.send,
            clock=clock,
            quiet_s=quiet_s,
        )
        self.failure: BaseException | None = None
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._run)]
        for thread in self._threads:
            thread.start()
        leftovers.callback(self._clean_up)

    def tell(self, *messages: ToEngine) -> None:
        """Send commands, and wait until the loop takes all of them together."""
        expected = self._n_received + len(messages)
        self.front.send(*messages)
        until_s = time.monotonic() + TIMEOUT_S
        while self._n_received < expected:
            assert time.monotonic() < until_s, "the commands were not read"
            os.sched_yield()

    def stop(self) -> None:
        """Close the socket, wait for the loop and raise its exception; later calls do nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.backend.decoding.set()
        for event in self.backend.tokenizing.values():
            event.set()
        self.front.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        self.kv.close()
        self._pipe.close()
        self._held.close()
        if self.failure is not None:
            raise self.failure

    def _read(self) -> None:
        while (message := self._pipe.read()) is not None:
            assert not isinstance(message, Configure)
            self._inbox.put(ReceivedCommand(message, self._clock()))
            self._n_received += 1
        self._inbox.put(FrontDisconnected())

    def _clean_up(self) -> None:
        with suppress(Exception):  # the test has already failed if this is still running
            self.stop()

    def _run(self) -> None:
        try:
            self.loop.run()
        except ConnectionError:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised again by stop(), on the test's thread
            self.failure = failure
