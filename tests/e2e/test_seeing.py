"""What the bundled model says of pictures, and remembers of them whatever happens to their KV."""

from __future__ import annotations

import base64
import io
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from inferencecenter.client import Client
from inferencecenter.demo import demo_projector_path
from tests.e2e.harness import connect_client, run_daemon, start_daemon
from tools.demo_model.pictures import draw_figure

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon, SocketClient

QUESTION, RECALL = "What is in the picture?", "What was in the picture?"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SENTENCE = "A red circle."


def picture(color: str, figure: str) -> bytes:
    """The file of a picture that training did not have."""
    file = io.BytesIO()
    Image.fromarray(draw_figure(np.random.default_rng(5), color, figure).pixels).save(file, "PNG")
    return file.getvalue()


async def ask(client: SocketClient, session: str, text: str, file: bytes | None = None) -> str:
    """A greedy turn's answer."""
    content: object = text
    if file is not None:
        data = base64.b64encode(file).decode()
        content = [{"type": "image", "data": data}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    await client.send(op="infer", session_id=session, messages=messages, params=GREEDY)
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
    """What a fork of a session says of its picture; the session itself stays as it is."""
    forked = (await client.ask(op="fork_session", session_id=session))["session_id"]
    return await ask(client, forked, RECALL)


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
