"""The blocking client: from plain code, from threads, and beside a running event loop."""

from __future__ import annotations

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inferencecenter.client import START, TryLaterError, UnreachableError
from inferencecenter.client.blocking import BlockingClient, LoopThread
from inferencecenter.protocol.events import End, Queued, Token
from inferencecenter.protocol.requests import Ping
from inferencecenter.protocol.values import GpuReadings, InferenceReadings
from tests.client.peer import HELLO, scripted_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.client.peer import Peer, Script

    Starts = Callable[[Script], str]


READINGS = {
    "gpu": dict.fromkeys(GpuReadings.model_fields),
    "inference": dict.fromkeys(InferenceReadings.model_fields, 1),
    "engine": {"state": "ready", "model": "demo", "gpu_layers": 0, "restarts": 0, "rss_mb": 1.0},
}


@pytest.fixture
def start() -> Iterator[Starts]:
    """Return a function that starts scripted daemons in a thread."""
    thread = LoopThread()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.close)
        scripted = scripted_daemon()
        begin = thread.call(scripted.__aenter__())
        stack.callback(lambda: thread.call(scripted.__aexit__(None, None, None)))

        async def one(script: Script) -> str:
            return await begin(script)

        yield lambda script: thread.call(one(script))


async def echo(peer: Peer) -> None:
    """Answer each prompt with its own words; one that ends in ``…`` continues until it is aborted."""
    await peer.welcome()
    n_sessions = 0
    running: str | None = None
    while True:
        frame = await peer.receive()
        session_id = frame.get("session_id", "")
        match frame["op"]:
            case "create_session":
                n_sessions += 1
                created = {"epoch": "e", "model": "demo", "n_ctx": 1024, "params": {}, "warnings": []}
                await peer.send(op="session_created", id=frame["id"], session_id=f"s{n_sessions}", **created)
            case "infer":
                turn_id = frame["turn_key"]
                await peer.numbered("queued", session_id, id=frame["id"], turn_id=turn_id, position=0)
                for word in frame["prompt"].split():
                    await peer.token(turn_id, f"{word} ", session_id)
                running = turn_id if frame["prompt"].endswith("…") else None
                if running is None:
                    await peer.end(turn_id, session_id)
            case "abort":
                await peer.end(str(running), session_id, finish_reason="aborted")
            case "rewind_session":
                await peer.numbered("session_rewound", session_id, id=frame["id"], turn=frame["turn"], messages=0)
            case "close_session":
                await peer.send(op="session_closed", id=frame["id"], session_id=session_id)
            case "list_models":
                await peer.send(op="models", id=frame["id"], models=[])
            case _:
                await peer.send(op="pong", id=frame["id"])


def test_conversation_in_blocking_code(start: Starts) -> None:
    """A turn's text is iterated, awaited as a whole or read as events, and the session's other methods work."""
    with BlockingClient(start(echo), "ic_a_b") as client:
        assert client.connected
        assert (client.hello.model, client.account.client_id) == ("demo", "admin")
        with client.session(system="Be brief.") as session:
            turn = session.infer("one two")
            assert list(turn) == ["one ", "two "]
            assert turn.finish_reason == "stop"
            assert str(session.ask("three")) == "three "
            assert [type(event) for event in session.infer("four").events()] == [Queued, Token, End]
            assert session.rewind(START).turn == START
            assert list(session.follow()) == []
        assert client.models() == ()
        assert client.request(Ping(op="ping")).op == "pong"
    assert not client.connected


def test_leaving_a_loop_aborts_the_turn(start: Starts) -> None:
    """The next prompt is sent after the end of the aborted turn."""
    with BlockingClient(start(echo), "ic_a_b") as client, client.session() as session:
        turn = session.infer("on and on …")
        for text in turn:
            assert text == "on "
            break
        assert str(session.ask("next")) == "next "
        assert turn.result().finish_reason == "aborted"


def test_threads_share_a_client(start: Starts) -> None:
    """Each uses its own sessions concurrently and receives its own answers."""
    with BlockingClient(start(echo), "ic_a_b") as client, ThreadPoolExecutor(8) as threads:

        def converse(number: int) -> list[str]:
            with client.session() as session:
                return ["".join(session.infer(f"{number} {turn}")).strip() for turn in range(5)]

        answers = list(threads.map(converse, range(16)))
    assert answers == [[f"{number} {turn}" for turn in range(5)] for number in range(16)]


async def test_client_works_beside_a_running_event_loop(start: Starts) -> None:
    """The client works while the thread's event loop runs, as in a notebook cell."""
    with BlockingClient(start(echo), "ic_a_b") as client, client.session() as session:
        assert list(session.infer("one two")) == ["one ", "two "]


def test_abort_from_another_thread(start: Starts) -> None:
    """The turn's reader receives its end."""
    with BlockingClient(start(echo), "ic_a_b") as client, client.session() as session:
        turn = session.infer("on and on …")
        received = []
        for text in turn:
            received.append(text)
            if text == "… ":
                thread = threading.Thread(target=session.abort)
                thread.start()
                thread.join()
        assert "".join(received) == "on and on … "
        assert turn.finish_reason == "aborted"


def test_ctrl_c_interrupts_the_wait_and_aborts_the_turn(start: Starts) -> None:
    """The exception is raised in the waiting call, and the session stays usable."""
    with BlockingClient(start(echo), "ic_a_b") as client, client.session() as session:

        def interrupt_when_all_is_read() -> None:
            for text in session.infer("on and on …"):
                if text == "… ":
                    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
                    timer.start()

        with pytest.raises(KeyboardInterrupt):
            interrupt_when_all_is_read()
        assert str(session.ask("next")) == "next "


def test_closing_the_client_fails_all_waiting_threads(start: Starts) -> None:
    """All waiting threads fail, from whichever thread it is closed."""
    client = BlockingClient(start(echo), "ic_a_b")
    client.open()
    session = client.create_session()
    turn = iter(session.infer("on …"))
    assert (next(turn), next(turn)) == ("on ", "… ")
    closing = threading.Timer(0.05, client.close)
    closing.start()
    with pytest.raises(UnreachableError):
        next(turn)
    closing.join()
    with pytest.raises(UnreachableError):
        session.ask("too late")
    with pytest.raises(UnreachableError, match="not open"):
        client.models()


def test_refused_client_leaves_no_thread(start: Starts) -> None:
    """The async client's error is raised."""

    async def refuse(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        await peer.send(op="auth_failed", id=auth["id"], reason="no such token", retry_after_ms=1)

    url = start(refuse)
    before = threading.active_count()
    with pytest.raises(TryLaterError, match="no such token"):
        BlockingClient(url, "ic_a_b").open()
    assert threading.active_count() == before


def test_client_can_be_reopened(start: Starts) -> None:
    """A closed client can be opened again, as in a notebook."""
    client = BlockingClient(start(echo), "ic_a_b")
    for _ in range(2):
        with client:
            assert client.models() == ()


def test_blocking_call_in_a_callback_is_refused(start: Starts) -> None:
    """A blocking call in a callback would deadlock."""
    errors: list[RuntimeError] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        ping = await peer.receive()
        await peer.send(op="going_away", deadline_ms=1000, resume=True)
        await peer.send(op="pong", id=ping["id"])

    def ask(_notice: object) -> None:
        with pytest.raises(RuntimeError) as caught:
            client.models()
        errors.append(caught.value)

    with BlockingClient(start(daemon), "ic_a_b", on_notice=ask) as client:
        client.request(Ping(op="ping"))
    assert "cannot make a blocking call" in str(errors[0])


def test_stats_are_iterated(start: Starts) -> None:
    """The loop gets one reading for each sample until it is left."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        while True:
            frame = await peer.receive()
            await peer.send(op="metrics", id=frame["id"], timestamp=float(len(peer.received)), **READINGS)

    with BlockingClient(start(daemon), "ic_a_b") as client:
        timestamps = []
        for reading in client.metrics(interval_s=0.001):
            timestamps.append(reading.timestamp)
            if len(timestamps) == 3:
                break
    assert timestamps == [2.0, 3.0, 4.0]
