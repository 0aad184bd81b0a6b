"""What the bundled model says of pictures, and remembers of them whatever happens to their KV."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from inferencecenter.client import Client
from inferencecenter.demo import demo_projector_path
from tests.e2e.harness import command_line, connect_client, run_daemon, start_daemon, stopped
from tests.e2e.other_model import write_other_model
from tools.demo_model.pictures import COLORS, SHAPES, draw_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.e2e.harness import Daemon, Message, SocketClient

QUESTION, RECALL = "What is in the picture?", "What was in the picture?"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
LONG = {"temperature": 0.0, "max_tokens": 120}
SENTENCE = "A red circle."
N_CTX = 256


def picture(color: str, figure: str) -> bytes:
    """The file of a picture that training did not have."""
    file = io.BytesIO()
    Image.fromarray(draw_figure(np.random.default_rng(5), color, figure).pixels).save(file, "PNG")
    return file.getvalue()


async def send_question(
    client: SocketClient, session: str, text: str, file: bytes | None, params: Mapping[str, float], **fields: str
) -> None:
    """Submit a turn, with a picture before its text."""
    content: object = text
    if file is not None:
        data = base64.b64encode(file).decode()
        content = [{"type": "image", "data": data}, {"type": "text", "text": text}]
    await client.send(
        op="infer", session_id=session, messages=[{"role": "user", "content": content}], params=dict(params), **fields
    )


async def ask(
    client: SocketClient,
    session: str,
    text: str,
    file: bytes | None = None,
    params: Mapping[str, float] = GREEDY,
    **fields: str,
) -> str:
    """A greedy turn's answer."""
    await send_question(client, session, text, file, params, **fields)
    said = ""
    while (event := await client.receive())["op"] != "end":
        assert event["op"] != "error", event
        said += event["content"] if event["op"] == "token" else ""
    return said


async def test_pictures_are_named_by_the_default_model(tmp_path: Path) -> None:
    """Without any setting, over the Python client."""
    with run_daemon(tmp_path / "state", None) as daemon:
        async with Client(f"http://127.0.0.1:{daemon.port}", daemon.admin_token) as client, client.session() as session:
            for color, figure in (("red", "circle"), ("blue", "square"), ("green", "star")):
                answer = await session.ask(QUESTION, images=[picture(color, figure)], params=GREEDY)
                assert answer.content == f"A {color} {figure}."


async def restarted(daemon: Daemon, tmp_path: Path, demo_model_path: Path, **settings: str) -> Daemon:
    """Kill a daemon and start another one in its state directory."""
    daemon.process.kill()
    daemon.process.wait()
    second = start_daemon(tmp_path / "state", demo_model_path, **settings)
    second.wait_ready()
    return second


async def recall(client: SocketClient, session: str) -> str:
    """Which picture a fork of a session recalls; the session itself stays as it is.

    The small model may say something else where the rounding of a CPU decides, so it chooses among pictures.
    """
    forked = (await client.ask(op="fork_session", session_id=session))["session_id"]
    return await ask(client, forked, RECALL, regex=f"A ({'|'.join(COLORS)}) ({'|'.join(SHAPES)})\\.")


@pytest.mark.slow
async def test_picture_is_recalled_whatever_happens_meanwhile(tmp_path: Path, demo_model_path: Path) -> None:
    """Three turns later, in forks: after its KV was parked, the engine killed, and the daemon restarted."""
    settings = {
        "INFERENCECENTER_MODEL__MMPROJ": str(demo_projector_path()),
        "INFERENCECENTER_ENGINE__SLOTS": "1",
        "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
    }
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            session, other = await client.create(), await client.create()
            assert await ask(client, session, QUESTION, picture("red", "circle")) == SENTENCE
            for small in ("What is the capital of France?", "Count from 1 to 5."):
                await ask(client, session, small)
            assert await recall(client, session) == SENTENCE
            assert await ask(client, other, QUESTION, picture("blue", "square")) == "A blue square."
            assert await recall(client, session) == SENTENCE
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            assert await recall(client, session) == SENTENCE
        second = await restarted(daemon, tmp_path, demo_model_path, **settings)
        try:
            async with connect_client(second) as client:
                assert (await client.ask(op="resume_session", session_id=session))["op"] == "session_resumed"
                assert await recall(client, session) == SENTENCE
                assert await ask(client, session, RECALL) == SENTENCE
        finally:
            assert second.stop() == 0


async def kept(client: SocketClient, session: str) -> Message:
    """The session's transcript, and what of it is in the context."""
    return await client.ask(op="get_session", session_id=session)


@pytest.mark.slow
async def test_picture_stays_in_a_full_context_with_its_turn(tmp_path: Path) -> None:
    """Older turns leave before it, while it is shown and while an answer grows; then it leaves with its own turn."""
    settings = {"INFERENCECENTER_ENGINE__N_CTX": str(N_CTX), "INFERENCECENTER_ENGINE__SLOTS": "2"}
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            filler = "Count from 1 to 5."
            for room in (40, 110):
                session = await client.create()
                while (await kept(client, session))["n_tokens"] < N_CTX - room:
                    await ask(client, session, filler)
                assert await ask(client, session, QUESTION, picture("red", "circle")) == SENTENCE
                shown_at = len((await kept(client, session))["transcript"]) - 2
                assert ((await kept(client, session))["dropped_messages"] > 0) == (room == 40)
            await ask(client, session, "Count from 1 to 30.", params=LONG)
            assert 0 < (await kept(client, session))["dropped_messages"] <= shown_at
            assert await recall(client, session) == SENTENCE
            while (await kept(client, session))["dropped_messages"] <= shown_at:
                await ask(client, session, filler)
            transcript = await kept(client, session)
            rest = transcript["transcript"][transcript["dropped_messages"] :]
            assert "images" in transcript["transcript"][shown_at]
            without = await client.create()
            await client.ask(op="append", session_id=without, messages=rest)
            answers = [await ask(client, each, RECALL) for each in (session, without)]
            n_tokens = [(await kept(client, each))["n_tokens"] for each in (session, without)]
    assert answers[0] == answers[1]
    assert n_tokens[0] == n_tokens[1]


@pytest.mark.slow
async def test_picture_is_rewound_with_its_turn(tmp_path: Path) -> None:
    """To before it and to after it; the KV of what is left is used again."""
    with run_daemon(tmp_path / "state", None) as daemon:
        async with connect_client(daemon) as client:
            session = await client.create()
            await ask(client, session, "What is the capital of France?")
            assert await ask(client, session, QUESTION, picture("red", "circle")) == SENTENCE
            first, shown = [turn["turn_id"] for turn in (await kept(client, session))["turns"]]
            await ask(client, session, "Count from 1 to 5.")
            await client.ask(op="rewind_session", session_id=session, turn=shown)
            assert await ask(client, session, RECALL) == SENTENCE
            assert [each for each in client.seen if each["op"] == "end"][-1]["usage"]["cached_tokens"] > 0
            await client.ask(op="rewind_session", session_id=session, turn=first)
            assert await ask(client, session, QUESTION, picture("blue", "square")) == "A blue square."
            assert len((await kept(client, session))["transcript"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("store", [True, False])
async def test_picture_of_a_session_out_of_memory_or_unstored(tmp_path: Path, *, store: bool) -> None:
    """A stored session is archived and loaded with it; one that is not stored keeps it while it is open."""
    with run_daemon(tmp_path / "state", None) as daemon:
        if store:
            command_line(daemon, "client", "limits", "admin", "max_sessions=2")
        async with connect_client(daemon) as client:
            session = await client.create(store=store)
            assert await ask(client, session, QUESTION, picture("red", "circle")) == SENTENCE
            digest = (await kept(client, session))["transcript"][0]["images"][0]["digest"]
            for _ in range(3):
                other = await client.create(store=store)
                await ask(client, other, "Count from 1 to 5.")
            assert await ask(client, session, RECALL) == SENTENCE
            for each in (session, other):
                await client.ask(op="close_session", session_id=each)
            found = await client.ask(op="get_image", digest=digest)
    assert found["op"] == ("image" if store else "error")


async def ask_all(
    daemon: Daemon, client: SocketClient, sessions: Sequence[str], text: str, files: Sequence[bytes | None]
) -> tuple[list[str], int]:
    """Greedy turns that an engine gets all at once: their answers, and how often they were preempted together."""
    answers, preempted = dict.fromkeys(sessions, ""), 0
    running = set(sessions)
    with stopped(daemon.engine_pid()):
        for session, file in zip(sessions, files, strict=True):
            await send_question(client, session, text, file, {"temperature": 0.0, "max_tokens": 120})
        for _ in sessions:
            await client.until(lambda frame: frame["op"] == "queued")
    while running:
        event = await client.receive()
        assert event["op"] != "error", event
        if event["op"] == "token":
            answers[event["session_id"]] += event["content"]
        if event["op"] == "end":
            running.remove(event["session_id"])
            preempted += event["stats"]["preempted"]
    return list(answers.values()), preempted


@pytest.mark.slow
async def test_picture_is_seen_by_preempted_turns(tmp_path: Path) -> None:
    """On one slot, four tokens at a time: when it is shown, in a long answer after it, and when it is recalled."""
    settings = {"INFERENCECENTER_ENGINE__SLOTS": "1", "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "4"}
    shown = [("red", "circle"), ("blue", "square"), ("green", "star")]
    sentences = [f"A {color} {figure}." for color, figure in shown]
    with run_daemon(tmp_path / "state", None, **settings) as daemon:
        async with connect_client(daemon) as client:
            sessions = [await client.create() for _ in shown]
            asked: list[tuple[str, list[bytes | None], list[str]]] = [
                (QUESTION, [picture(*each) for each in shown], sentences),
                ("Count from 1 to 20.", [None] * 3, [", ".join(map(str, range(1, 21))) + "."] * 3),
                (RECALL, [None] * 3, sentences),
            ]
            for text, files, expected in asked:
                answers, preempted = await ask_all(daemon, client, sessions, text, files)
                assert answers == expected
                assert preempted >= len(sessions), f"too few preemptions to test anything: {text}"


async def load(client: SocketClient, name: str) -> None:
    """Make a model the default."""
    request_id = f"load-{name}"
    await client.send(op="load_model", id=request_id, name=name)
    last = await client.until(
        lambda frame: frame.get("id") == request_id and (frame["op"] == "error" or frame["phase"] in ("done", "failed"))
    )
    assert last["phase"] == "done", last


@pytest.mark.slow
async def test_picture_stays_when_the_model_changes(tmp_path: Path, demo_model_path: Path) -> None:
    """Within an answer, which the old model ends; the new one, with other token ids, sees it from its file."""
    other = write_other_model(demo_model_path, tmp_path / "other.gguf")
    projector = str(demo_projector_path())
    models = {"other": {"path": str(other), "mmproj": projector}, "blind": {"path": str(other), "mmproj": "off"}}
    settings = {
        "INFERENCECENTER_MODEL__NAME": "demo",
        "INFERENCECENTER_MODEL__MMPROJ": projector,
        "INFERENCECENTER_MODELS": json.dumps(models),
    }
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            session = await client.create()
            assert await ask(client, session, QUESTION, picture("red", "circle")) == SENTENCE
            begin = len(client.seen)
            await send_question(client, session, "Count from 1 to 30.", None, LONG)
            await client.until(lambda frame: frame["op"] == "token")
            with stopped(daemon.engine_pid()):  # the model may load more slowly than the turn ends
                await load(client, "other")
            assert "end" not in [frame["op"] for frame in client.seen[begin:]]
            await client.until(lambda frame: frame["op"] == "end")
            counted = "".join(frame["content"] for frame in client.seen[begin:] if frame["op"] == "token")
            assert counted == ", ".join(map(str, range(1, 31))) + "."
            assert await recall(client, session) == SENTENCE
            assert client.seen[-1]["stats"]["cached_tokens"] == 0
            await load(client, "blind")
            await send_question(client, session, RECALL, None, GREEDY)
            refused = await client.until(lambda frame: frame["op"] in ("error", "end"))
            assert (refused["op"], refused["code"]) == ("error", "invalid_request")
            await load(client, "demo")
            assert await recall(client, session) == SENTENCE
            assert (await kept(client, session))["model"] == "demo"
