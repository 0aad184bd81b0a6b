"""An engine process controlled by its turns and options, crashes included.

A turn's question is ``<what> <n>``: ``count`` answers with ``n`` letters; ``die`` kills the process in the step that
makes letter ``n``, ``oom`` as the kernel would, ``hang`` waits there forever, ``flood`` writes an invalid frame;
``die-reading`` kills it before the first step. ``hold`` says ``n`` letters and ends when its session is released. Any
other question is its own answer. Each step's turns are appended to the file ``model_path``, a line a step, with the
process id; so is ``HANGS`` when it does.

``model_name`` says how loading goes: ``layers <n>`` dies with more than ``n`` layers on the GPU, ``refuse <n>`` says
that they do not fit, ``die`` dies always, ``wait`` makes the file ``model_path``, or loads if it is there.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import resource
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inferencecenter.ipc.engine_child import receive_descriptors
from inferencecenter.ipc.framing import BlockingChannel
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import (
    AbortTurn,
    Configure,
    Finished,
    LoadFailed,
    Loading,
    ModelInfo,
    Ready,
    Reattach,
    ReleaseSession,
    RetainSessions,
    Started,
    StepOutput,
    Submit,
    Suspend,
    Suspended,
    ToEngine,
    TokenDelta,
    TurnEvent,
    pack_tokens,
)

HANGS = "hangs"
MODULE = "tests.supervisor.stub_engine"
MODEL = ModelInfo(
    name="stub",
    path="",
    description="",
    architecture="",
    backend="stub",
    n_params=0,
    size_bytes=0,
    n_vocab=26,
    n_layers=24,
    n_gpu_layers=0,
    n_ctx_train=0,
    n_ctx=1000,
    slots=8,
    n_threads=1,
    chat_template="",
    bos_token="",
    eos_token="",
    add_bos=False,
    special_tokens=(),
    sampling_defaults_json=b"{}",
    library="",
)
_QUESTION = re.compile(r"user\n(.*)<\|im_end\|>")
_COMMAND = re.compile(r"([\w-]+) (\d+)")


class _Options(msgspec.Struct):
    """The options that the engine reads; ``EngineOptions`` would double its start time."""

    model_path: str
    model_name: str
    n_gpu_layers: int
    echo_delay_ms: float


def answer(n: int) -> str:
    """Return the first letters of the only answer."""
    return "".join(chr(ord("a") + index % 26) for index in range(n))


@dataclass
class _Turn:
    turn_id: str
    what: str
    text: str
    done: int
    released: bool = False

    @property
    def waits(self) -> bool:
        """Whether it continues only when its session is released."""
        return self.what == "hold" and self.said and not self.released

    @property
    def said(self) -> bool:
        """Whether the whole text is generated."""
        return self.done == len(self.text)


class _Engine:
    def __init__(self, pipe: BlockingChannel, options: _Options, heartbeat: Heartbeat) -> None:
        self._pipe = pipe
        self._heartbeat = heartbeat
        self._log = Path(options.model_path) if options.model_path else None
        self._delay_s = options.echo_delay_ms / 1000
        self._model = _model(options)
        self._turns: dict[str, _Turn] = {}

    def run(self, inbox: queue.SimpleQueue[ToEngine | None]) -> None:
        while True:
            while all(turn.waits for turn in self._turns.values()) or not inbox.empty():
                command = inbox.get()
                if command is None:
                    return
                self._handle(command)
            self._step()

    def _handle(self, command: ToEngine) -> None:
        match command:
            case Submit():
                with self._heartbeat.preparing(command.turn_id):
                    self._submit(command)
            case AbortTurn(turn_id=turn_id) if turn_id in self._turns:
                self._send(_finished(self._turns.pop(turn_id), "aborted"))
            case ReleaseSession(session_id=turn_id) if turn_id in self._turns:  # a session is named like its turn
                self._turns[turn_id].released = True
            case Suspend():
                self._pipe.send(Suspended(0))
            case Reattach():
                self._turns.clear()
                self._pipe.send(Ready(self._model))
            case AbortTurn() | RetainSessions() | ReleaseSession() | Configure():
                pass

    def _submit(self, submit: Submit) -> None:
        question = _QUESTION.search(submit.pieces[0].text)
        assert question is not None
        command = _COMMAND.fullmatch(question[1])
        what, text = ("count", question[1]) if command is None else (command[1], answer(int(command[2])))
        turn = _Turn(submit.turn_id, what, text, len(submit.answer) // 4)
        if turn.what == "die-reading":
            _die()
        self._turns[turn.turn_id] = turn
        self._send(Started(turn.turn_id, b"", 0))

    def _step(self) -> None:
        turns = [turn for turn in self._turns.values() if not turn.waits]
        names = tuple(turn.turn_id for turn in turns)
        self._heartbeat.step(names)
        self._note(*names)
        time.sleep(self._delay_s)
        events: list[TurnEvent] = []
        for turn in turns:
            if turn.said:
                self._misbehave(turn)
                events.append(_finished(self._turns.pop(turn.turn_id), "stop"))
            else:
                events.append(TokenDelta(turn.turn_id, pack_tokens([turn.done]), turn.text[turn.done]))
                turn.done += 1
        self._send(*events)
        self._heartbeat.step(())

    def _misbehave(self, turn: _Turn) -> None:
        match turn.what:
            case "die":
                _die()
            case "oom":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                self._note(HANGS)
                threading.Event().wait()
            case "flood":
                while True:
                    os.write(self._pipe._connection.fileno(), b"\xff" * 65536)

    def _note(self, *words: str) -> None:
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(" ".join((str(os.getpid()), *words)) + "\n")

    def _send(self, *events: TurnEvent) -> None:
        self._pipe.send(StepOutput(events=events, running=len(self._turns), waiting=0, rss_bytes=0))


def _die() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGABRT)


def _finished(turn: _Turn, reason: str) -> Finished:
    return Finished(
        turn_id=turn.turn_id,
        reason=reason,
        stop=None,
        kept_tokens=turn.done,
        kept_chars=turn.done,
        end_text="",
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=turn.done,
        queue_ms=0,
        ttft_ms=0,
        total_ms=0,
        tokens_per_s=0,
    )


def _load(pipe: BlockingChannel, options: _Options) -> bool:
    how, _, bound = options.model_name.partition(" ")
    waits = how == "wait" and not Path(options.model_path).exists()
    if waits:
        Path(options.model_path).touch()
    if how:
        pipe.send(Loading(0.5, offloads=how in ("layers", "refuse")))
    if how == "die" or (how == "layers" and not 0 <= options.n_gpu_layers <= int(bound)):
        _die()
    if waits:
        threading.Event().wait()
    if how == "refuse" and not 0 <= options.n_gpu_layers <= int(bound):
        pipe.send(LoadFailed("invalid_model_file", "unable to allocate CUDA0 buffer", ""))
        return False
    pipe.send(Ready(_model(options)))
    return True


def _model(options: _Options) -> ModelInfo:
    return msgspec.structs.replace(MODEL, name=options.model_name or MODEL.name)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    heartbeat_fd, *_ = receive_descriptors(connection)
    pipe = BlockingChannel(connection)
    configure = pipe.read()
    assert isinstance(configure, Configure)
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()

    def read() -> None:
        while (message := pipe.read()) is not None:
            inbox.put(message)
        inbox.put(None)
        if threading.main_thread().is_alive():
            threading.Timer(1.0, os._exit, (0,)).start()

    threading.Thread(target=read, daemon=True).start()
    options = msgspec.json.decode(configure.options_json, type=_Options)
    if _load(pipe, options):
        _Engine(pipe, options, Heartbeat.attach(heartbeat_fd)).run(inbox)


if __name__ == "__main__":
    _main()
